"""Splits a model's answer into text, reasoning and tool calls, by mlx-lm's own text state machine and tool parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_lm.generate import TextStateMachine

from service.core import Piece, PieceKind, ToolCall

ToolParser = Callable[[str, Any], Any]
"""mlx-lm's: the text between the markers of a call, and the tools; one call or several, as dictionaries."""


class AnswerReader:
    """core.AnswerReader. state: the state machine's at the answer's start. parser: None for a model without tool calls. start:
    the marker before a tool call, which a call that cannot be parsed becomes text with."""

    def __init__(
        self, state: tuple[Any, ...], parser: ToolParser | None, tools: Sequence[Mapping[str, object]], start: str
    ) -> None:
        self._state = state
        self._parser = parser
        self._tools = [_with_parameters(tool) for tool in tools]
        self._start = start
        self._call: str | None = None
        """The text so far of the call that is open."""
        self._blank: str | None = ""
        """White space at the start of a text, which sets calls apart; None: the text goes on."""
        self._called = False
        if state[0] == "tool":
            self._call = ""

    def add(self, text: str) -> list[Piece]:
        """See core.AnswerReader."""
        self._state, segments = TextStateMachine.split(self._state, text)
        return self._pieces(segments)

    def finish(self, cut: bool) -> list[Piece]:
        """See core.AnswerReader."""
        self._state, rest, name = TextStateMachine.flush(self._state)
        pieces = self._pieces([(name, rest)])
        if self._call is not None:
            # Formats without an end marker, and models that end their turn instead of writing it.
            pieces += self._text(self._start + self._call) if cut else self._close(self._call)
            self._call = None
        if self._blank and not self._called:
            pieces.append(Piece(PieceKind.TEXT, self._blank))
        return pieces

    def _pieces(self, segments: Sequence[tuple[str | None, str]]) -> list[Piece]:
        pieces: list[Piece] = []
        for state, text in segments:
            if state == "tool":
                self._call = (self._call or "") + text
                continue
            if self._call is not None:
                pieces += self._close(self._call)
                self._call = None
            if text and state == "reasoning":
                pieces.append(Piece(PieceKind.REASONING, text))
            elif text and state == "normal":
                pieces += self._text(text)
        return pieces

    def _text(self, text: str) -> list[Piece]:
        """Text, of which white space alone is withheld until more follows."""
        if self._blank is not None:
            text = self._blank + text
            self._blank = None if text.strip() else text
        return [Piece(PieceKind.TEXT, text)] if self._blank is None else []

    def _close(self, text: str) -> list[Piece]:
        """The calls that a text holds, or the text itself where it holds none."""
        try:
            parsed = self._parser(text, self._tools) if self._parser is not None else None
            calls = [_tool_call(each) for each in (parsed if isinstance(parsed, list) else [parsed])]
        except Exception:  # noqa: BLE001  (parsers raise whatever their text makes Python raise)
            calls = []
        if not calls:
            return self._text(self._start + text)
        self._blank, self._called = "", True
        return [Piece(PieceKind.CALL, call=call) for call in calls]


def _with_parameters(tool: Mapping[str, object]) -> dict[str, Any]:
    """The tool with `parameters`, which some parsers take for given."""
    function = tool.get("function")
    assert isinstance(function, Mapping)
    return {**tool, "function": {"parameters": {"type": "object", "properties": {}}, **function}}


def _tool_call(parsed: Any) -> ToolCall:
    """Raises ValueError, TypeError or KeyError for what is not a call."""
    name, arguments, id = parsed["name"], parsed.get("arguments"), parsed.get("id")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not name or not isinstance(name, str) or not isinstance(arguments or {}, dict):
        raise ValueError("not a tool call")
    text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
    # Half of a surrogate pair cannot be sent: it raises here.
    (name + text).encode()
    return ToolCall(name, text, id if isinstance(id, str) and id else None)
