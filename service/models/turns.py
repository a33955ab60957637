"""Normal forms of a chat: the same messages in forms that a chat template accepts if it refuses the original."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from service.models.grammar_schemas import without_nulls

Turn = dict[str, Any]
"""`role`, `content` as text, and other fields that chat templates read."""

SEPARATOR = "\n\n"
"""Separates the texts of merged turns."""
ID = re.compile("[A-Za-z0-9]{9}")
"""The call id format that the Mistral family's templates accept."""


@dataclass(frozen=True)
class Conversation:
    """Messages, and tools in the shape of OpenAI's chat route. Forms do not change them in place."""

    turns: Sequence[Turn]
    tools: Sequence[Mapping[str, Any]] = ()

    def without_names(self) -> bool:
        """Whether a tool's turn lacks the name of the tool."""
        return any(turn["role"] == "tool" and not turn.get("name") for turn in self.turns)


Form = Callable[[Conversation], Conversation]


def named_results(chat: Conversation) -> Conversation:
    """Adds the tool's name to tool turns, found by the id of its call. Most routes have no field for it."""
    if not chat.without_names():
        return chat
    names: dict[object, object] = {}
    turns: list[Turn] = []
    for turn in chat.turns:
        for call in turn.get("tool_calls") or ():
            names[call.get("id")] = call["function"]["name"]
        name = names.get(turn.get("tool_call_id"))
        lacks = turn["role"] == "tool" and not turn.get("name") and name is not None
        turns.append({**turn, "name": name} if lacks else turn)
    return replace(chat, turns=turns)


def described_tools(chat: Conversation) -> Conversation:
    """Functions with a description and parameters, possibly empty, and without null keywords."""
    tools = [{**tool, "function": _described(tool["function"])} for tool in chat.tools]
    return replace(chat, tools=tools)


def _described(function: Mapping[str, Any]) -> Mapping[str, Any]:
    given = without_nulls(function.get("parameters") or {})
    parameters = {"type": "object", "properties": {}, "required": [], **given}
    return {"description": "", **function, "parameters": parameters}


def object_arguments(chat: Conversation) -> Conversation:
    """Past calls with arguments as objects, as most templates require. A value that is not an object becomes its only
    member."""

    def arguments(given: object) -> object:
        if isinstance(given, dict):
            return cast("object", given)
        try:
            value = json.loads(str(given).strip() or "{}")
        except (ValueError, RecursionError):
            value = given
        return {} if value is None else value if isinstance(value, dict) else {"arguments": value}

    return _with_arguments(chat, arguments)


def text_arguments(chat: Conversation) -> Conversation:
    """Past calls with arguments as text, as DeepSeek's templates require."""
    return _with_arguments(
        chat, lambda given: given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    )


def _with_arguments(chat: Conversation, convert: Callable[[object], object]) -> Conversation:
    def converted(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": convert(function.get("arguments", {}))}}

    return replace(chat, turns=[_with_calls(turn, converted) for turn in chat.turns])


def _with_calls(turn: Turn, convert: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Turn:
    return {**turn, "tool_calls": [convert(call) for call in turn["tool_calls"]]} if turn.get("tool_calls") else turn


def short_ids(chat: Conversation) -> Conversation:
    """Call ids of nine letters and digits. An id is always mapped to the same one, so that prompts keep their prefixes."""
    given = [call["id"] for turn in chat.turns for call in turn.get("tool_calls") or ()]
    given += [turn["tool_call_id"] for turn in chat.turns if "tool_call_id" in turn]
    short = {id: id for id in given if ID.fullmatch(id)}
    for id in given:
        if id not in short:
            short[id] = next(new for new in _digests(id) if new not in short.values())

    def converted(turn: Turn) -> Turn:
        turn = _with_calls(turn, lambda call: {**call, "id": short[call["id"]]})
        return {**turn, "tool_call_id": short[turn["tool_call_id"]]} if "tool_call_id" in turn else turn

    return replace(chat, turns=[converted(turn) for turn in chat.turns])


def _digests(id: str) -> Iterator[str]:
    salt = 0
    while True:
        yield hashlib.sha256(f"{id}{salt or ''}".encode()).hexdigest()[:9]
        salt += 1


def system_first(chat: Conversation) -> Conversation:
    """All system messages merged into one turn, before all others."""
    said = [turn for turn in chat.turns if turn["role"] == "system"]
    others = [turn for turn in chat.turns if turn["role"] != "system"]
    return replace(chat, turns=[_joined(said), *others] if said else others)


def system_in_user(chat: Conversation) -> Conversation:
    """System messages prepended to the first user message, for templates without a system role."""
    first = system_first(chat)
    if not first.turns or first.turns[0]["role"] != "system":
        return first
    said, *others = first.turns
    said = {**said, "role": "user"}
    at = next((i for i, turn in enumerate(others) if turn["role"] == "user"), None)
    if at is None:
        return replace(chat, turns=[said, *others])
    return replace(chat, turns=[*others[:at], _joined([said, others[at]]), *others[at + 1 :]])


def user_last(chat: Conversation) -> Conversation:
    """A chat with a user message: if there is none, the last system message becomes one."""
    if any(turn["role"] == "user" for turn in chat.turns) or not chat.turns or chat.turns[-1]["role"] != "system":
        return chat
    return replace(chat, turns=[*chat.turns[:-1], {**chat.turns[-1], "role": "user"}])


def results_with_text(chat: Conversation) -> Conversation:
    """User text after a tool result appended to that result."""
    turns: list[Turn] = []
    for turn in chat.turns:
        if turn["role"] == "user" and turns and turns[-1]["role"] == "tool":
            turns[-1] = {**turns[-1], "content": _text([turns[-1], turn])}
        else:
            turns.append(turn)
    return replace(chat, turns=turns)


def joined_turns(chat: Conversation) -> Conversation:
    """Consecutive turns of one role merged. Each tool result remains a separate turn."""
    turns: list[Turn] = []
    for turn in chat.turns:
        if turns and turn["role"] == turns[-1]["role"] != "tool":
            turns[-1] = _joined([turns[-1], turn])
        else:
            turns.append(turn)
    return replace(chat, turns=turns)


def _joined(turns: Sequence[Turn]) -> Turn:
    """Turns of one role merged into one turn."""
    whole = {**turns[0], "content": _text(turns)}
    for turn in turns[1:]:
        for name, value in turn.items():
            if name == "tool_calls":
                whole[name] = [*(whole.get(name) or ()), *value]
            elif name == "reasoning_content":
                whole[name] = SEPARATOR.join(filter(None, (whole.get(name), value)))
            elif name == "name" and whole.get(name) != value:
                whole.pop(name, None)
    return whole


def _text(turns: Sequence[Turn]) -> str:
    return SEPARATOR.join(turn["content"] for turn in turns if turn["content"])


def candidates() -> Iterator[tuple[Form, ...]]:
    """Combinations of forms that are applied together, in order, to the same chat."""
    for arguments in (object_arguments, text_arguments):
        for system in (system_first, system_in_user):
            yield (described_tools, arguments, short_ids, user_last, system, results_with_text, joined_turns)


def normalised(chat: Conversation, forms: Sequence[Form]) -> Conversation:
    """The chat with all of these forms applied."""
    for form in forms:
        chat = form(chat)
    return chat
