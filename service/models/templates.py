"""Renders chats with a model's chat template, in a form that the template accepts, and determines the state of reasoning."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from transformers import PreTrainedTokenizerBase

from service.core import BadRequest, ChatEnd, Reasoning
from service.models.turns import Conversation, Form, Turn, candidates, named_results, normalised

OWN_ARGUMENTS = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}
"""Arguments of apply_chat_template itself, which a request must not set."""
REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RecursionError,
)
"""Errors that a template raises, deliberately or not, if it cannot render a chat."""
MAX_REMEMBERED = 8
"""Number of normal forms remembered per template."""
NEEDLE = "Needlework"
"""A text that is searched for in the output of a template."""


def load_chat_tokenizer(folder: Path, eos_token_ids: Any = None) -> TokenizerWrapper:
    """A folder's tokenizer. mlx-lm infers a model's tool call format from a single chat template. If there are several, it is
    given the one for tools. Raises as mlx-lm's load_tokenizer."""
    tokenizer = load_tokenizer(folder, eos_token_ids=eos_token_ids)
    templates = tokenizer.chat_template
    if not isinstance(templates, dict) or tokenizer.has_tool_calling:
        return tokenizer
    named = cast("dict[str, str]", templates)
    alone = load_tokenizer(
        folder, eos_token_ids=eos_token_ids, tokenizer_config_extra={"chat_template": _for_tools(named)}
    )
    alone.chat_template = named
    return alone if alone.has_tool_calling else tokenizer


def _for_tools(named: Mapping[str, str]) -> str:
    return named.get("tool_use") or named.get("default") or next(iter(named.values()))


class ChatTemplate:
    """The chat template or templates of a tokenizer. Thread-safe; keeps nothing of the chats that it renders."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._forms: dict[str | None, list[tuple[Form, ...]]] = {}
        """By the template's name: normal forms that it accepted, most recent first."""
        self._parts: dict[tuple[str | None, str], bool] = {}
        """By the template's name and a role: whether it requires contents as lists of parts."""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]],
        options: Mapping[str, object],
        end: ChatEnd,
    ) -> tuple[str, Reasoning]:
        """The prompt of a chat as text, and the state of reasoning at its end. A normal form of the chat is tried only if the
        template refuses the original. Raises BadRequest."""
        for name in sorted(OWN_ARGUMENTS & options.keys()):
            raise BadRequest(f"{name} is not an argument of the chat template", field="chat_template_kwargs")
        chat = named_results(Conversation([dict(message) for message in messages], [dict(tool) for tool in tools]))
        if end is ChatEnd.CONTINUED and chat.turns[-1].get("tool_calls"):
            raise BadRequest("a message with tool calls cannot be continued", field="messages")
        render = _Rendering(self, self._name(bool(tools)), options, end)
        chat, text = self._in_form(chat, render)
        return text, self._reasoning(chat, text, render)

    def _name(self, tools: bool) -> str | None:
        """The name of the template for chats with or without tools, if there are several."""
        templates = self._tokenizer.chat_template
        if not isinstance(templates, dict):
            return None
        named = cast("dict[str, str]", templates)
        wanted = ("tool_use", "default") if tools else ("default",)
        return next(name for name in (*wanted, *named) if name in named)

    def _in_form(self, chat: Conversation, render: _Rendering) -> tuple[Conversation, str]:
        """The chat in a form that the template accepts, and the prompt. Raises BadRequest with the first reason if it accepts
        none."""
        try:
            return chat, render(chat)
        except REFUSALS as error:
            refusal = error
        remembered = self._forms.setdefault(render.name, [])
        tried = [chat]
        # Excessive nesting fails in every form.
        for forms in () if isinstance(refusal, RecursionError) else (*remembered, *candidates()):
            form = normalised(chat, forms)
            if form in tried:
                continue
            tried.append(form)
            try:
                text = render(form)
            except REFUSALS:
                continue
            if forms not in remembered:
                forms = _least(chat, forms, render)
                form = normalised(chat, forms)
                text = render(form)
            self._forms[render.name] = [forms, *(other for other in remembered if other != forms)][:MAX_REMEMBERED]
            return form, text
        raise BadRequest(_reason(refusal, render.end), field="messages") from refusal

    def _reasoning(self, chat: Conversation, text: str, render: _Rendering) -> Reasoning:
        tokenizer = self._tokenizer
        start, end = tokenizer.think_start, tokenizer.think_end
        if not tokenizer.has_thinking or start is None or end is None:
            return Reasoning.CLOSED
        goes_on = render.end is ChatEnd.CONTINUED and bool(chat.turns[-1]["content"].strip())
        neither = Reasoning.CLOSED if goes_on else Reasoning.FREE
        if start not in text and end not in text:
            return neither
        own = self._own(chat, text, render)
        opened, closed = (at if (at := text.rfind(mark)) + len(mark) > own else -1 for mark in (start, end))
        if own == len(text) and render.end is ChatEnd.NEW_TURN:
            # The template opens the assistant's turn even without being asked to.
            opened, closed = (int(text.rstrip().endswith(mark)) - 1 for mark in (start, end))
        return Reasoning.OPEN if opened > closed else Reasoning.CLOSED if closed >= 0 else neither

    def _own(self, chat: Conversation, text: str, render: _Rendering) -> int:
        """The position in a prompt where the answer's turn begins. Users' texts come before it."""
        before = replace(chat, turns=chat.turns[:-1]) if render.end is ChatEnd.CONTINUED else chat
        try:
            return _common(text, replace(render, end=ChatEnd.CLOSED)(before))
        except REFUSALS:
            return 0

    def apply(self, name: str | None, chat: Conversation, options: Mapping[str, object], end: ChatEnd) -> str:
        """The template's output. Raises one of REFUSALS."""
        turns = [_in_parts(turn) if self._wants_parts(name, turn["role"]) else turn for turn in chat.turns]
        return self._applied(name, turns, chat.tools, options, end)

    def _applied(
        self,
        name: str | None,
        turns: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, object],
        end: ChatEnd,
    ) -> str:
        extra: dict[str, Any] = {**options}
        if tools:
            extra["tools"] = tools
        if name is not None:
            extra["chat_template"] = name
        if end is ChatEnd.CONTINUED:
            extra["continue_final_message"] = True
        inner = vars(self._tokenizer)
        apply = self._tokenizer.apply_chat_template
        if inner["_chat_template"] is None and self._tokenizer.has_thinking and "enable_thinking" not in options:
            # mlx-lm would turn reasoning on. Without the argument, the template uses its intended default.
            apply = cast("PreTrainedTokenizerBase", inner["_tokenizer"]).apply_chat_template
        return cast("str", apply(list(turns), tokenize=False, add_generation_prompt=end is ChatEnd.NEW_TURN, **extra))

    def _wants_parts(self, name: str | None, role: str) -> bool:
        """Whether contents of a role are rendered only as parts: a template that expects parts ignores a plain text, or
        fails."""
        if (known := self._parts.get((name, role))) is not None:
            return known

        def shown(content: object) -> bool:
            user = content if role == "user" else _parts(".") if self._wants_parts(name, "user") else "."
            turns, tools = _example(role, content, user)
            try:
                return NEEDLE in self._applied(name, turns, tools, {}, ChatEnd.NEW_TURN)
            except REFUSALS:
                return False

        found = vars(self._tokenizer)["_chat_template"] is None and not shown(NEEDLE) and shown(_parts(NEEDLE))
        self._parts[name, role] = found
        return found


@dataclass(frozen=True)
class _Rendering:
    """Renders chats with one template and the same options."""

    template: ChatTemplate
    name: str | None
    options: Mapping[str, object]
    end: ChatEnd

    def __call__(self, chat: Conversation) -> str:
        """The prompt. Raises one of REFUSALS."""
        return self.template.apply(self.name, chat, self.options, self.end)


def _least(chat: Conversation, forms: tuple[Form, ...], render: _Rendering) -> tuple[Form, ...]:
    """The minimal forms without which the template refuses the chat."""
    for form in forms:
        fewer = tuple(other for other in forms if other is not form)
        if normalised(chat, fewer) != normalised(chat, forms):
            try:
                render(normalised(chat, fewer))
            except REFUSALS:
                continue
        forms = fewer
    return forms


def _reason(refusal: Exception, end: ChatEnd) -> str:
    if end is ChatEnd.CONTINUED and isinstance(refusal, ValueError):
        # Transformers' message quotes the whole chat.
        return "the last message cannot be continued: the model's chat template does not render it as it is"
    return f"the model's chat template refuses these messages: {refusal}"


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}] if text else []


def _in_parts(turn: Turn) -> Turn:
    return {**turn, "content": _parts(turn["content"])}


def _example(role: str, content: object, user: object) -> tuple[list[Turn], list[dict[str, Any]]]:
    """A chat with this content in a turn of the role, and its tools."""
    asked: Turn = {"role": "user", "content": user}
    match role:
        case "user":
            return [asked], []
        case "assistant":
            return [asked, {"role": role, "content": content}, asked], []
        case "tool":
            parameters = {"type": "object", "properties": {}, "required": []}
            function = {"name": "look", "description": "Look.", "parameters": parameters}
            id = "abcdefghi"
            call = {"id": id, "type": "function", "function": {"name": "look", "arguments": {}}}
            caller: Turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            result: Turn = {"role": role, "tool_call_id": id, "name": "look", "content": content}
            return [asked, caller, result], [{"type": "function", "function": function}]
        case _:
            return [{"role": role, "content": content}, asked], []


def _common(one: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
