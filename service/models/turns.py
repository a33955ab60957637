"""Normal forms of a chat: the same messages as a chat template takes them that refuses them as they came."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from service.models.grammar_schemas import without_nulls

Turn = dict[str, Any]
"""`role`, `content` as text, and what else chat templates read."""

SEPARATOR = "\n\n"
"""Between the texts of turns that become one."""
ID = re.compile("[A-Za-z0-9]{9}")
"""What the Mistral family's templates take for the id of a call."""


@dataclass(frozen=True)
class Conversation:
    """Messages, and tools in the shape of OpenAI's chat route. Forms change neither in place."""

    turns: Sequence[Turn]
    tools: Sequence[Mapping[str, Any]] = ()

    def without_names(self) -> bool:
        """Whether a tool's turn lacks the name of the tool."""
        return any(turn["role"] == "tool" and not turn.get("name") for turn in self.turns)


Form = Callable[[Conversation], Conversation]


def named_results(chat: Conversation) -> Conversation:
    """Tools' turns with the name of the tool, by the id of its call. Most routes have no field for it."""
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
    """Functions with a description and parameters, which may be empty, and have no keyword that is null."""
    tools = [{**tool, "function": _described(tool["function"])} for tool in chat.tools]
    return replace(chat, tools=tools)


def _described(function: Mapping[str, Any]) -> Mapping[str, Any]:
    given = without_nulls(function.get("parameters") or {})
    parameters = {"type": "object", "properties": {}, "required": [], **given}
    return {"description": "", **function, "parameters": parameters}


def object_arguments(chat: Conversation) -> Conversation:
    """Past calls with objects as arguments, as most templates want them. What is no object is its only member."""

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
    """Past calls with arguments as text, as DeepSeek's templates want them."""
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
    """Ids of calls with nine letters and digits. An id always becomes the same, so that prompts keep their prefixes."""
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
    """All that the system says in one turn, before all others."""
    said = [turn for turn in chat.turns if turn["role"] == "system"]
    others = [turn for turn in chat.turns if turn["role"] != "system"]
    return replace(chat, turns=[_joined(said), *others] if said else others)


def system_in_user(chat: Conversation) -> Conversation:
    """What the system says before what the user says first, for templates that know no system."""
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
    """A chat in which the user says something: the system's last words are the user's where nobody else's are."""
    if any(turn["role"] == "user" for turn in chat.turns) or not chat.turns or chat.turns[-1]["role"] != "system":
        return chat
    return replace(chat, turns=[*chat.turns[:-1], {**chat.turns[-1], "role": "user"}])


def results_with_text(chat: Conversation) -> Conversation:
    """What the user says behind a tool's result as the end of that result."""
    turns: list[Turn] = []
    for turn in chat.turns:
        if turn["role"] == "user" and turns and turns[-1]["role"] == "tool":
            turns[-1] = {**turns[-1], "content": _text([turns[-1], turn])}
        else:
            turns.append(turn)
    return replace(chat, turns=turns)


def joined_turns(chat: Conversation) -> Conversation:
    """Neighbouring turns of one role as one. Each result of a tool is a turn of its own."""
    turns: list[Turn] = []
    for turn in chat.turns:
        if turns and turn["role"] == turns[-1]["role"] != "tool":
            turns[-1] = _joined([turns[-1], turn])
        else:
            turns.append(turn)
    return replace(chat, turns=turns)


def _joined(turns: Sequence[Turn]) -> Turn:
    """Turns of one role as one turn."""
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
    """Forms that are tried together, one after the other on the same chat."""
    for arguments in (object_arguments, text_arguments):
        for system in (system_first, system_in_user):
            yield (described_tools, arguments, short_ids, user_last, system, results_with_text, joined_turns)


def normalised(chat: Conversation, forms: Sequence[Form]) -> Conversation:
    """The chat in all of these forms."""
    for form in forms:
        chat = form(chat)
    return chat
