"""Splits a model's answer into text, reasoning and tool calls, by the markers of mlx-lm's tokenizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mlx_lm.tokenizer_utils import TokenizerWrapper

from service.core import Piece, PieceKind, ToolCall

NORMAL, REASONING, TOOL = "normal", "reasoning", "tool"
"""States of an answer. A model's response format may have others, whose text is not shown."""
Transitions = Mapping[str, Sequence[tuple[str, str]]]
"""By state: markers, and the state that follows each."""


class Unfinished(ValueError):
    """The call continues after an apparent end."""


class CallSyntax(Protocol):
    """How a model writes tool calls."""

    @property
    def start(self) -> str:
        """The marker before a call."""
        ...

    @property
    def end(self) -> str:
        """The marker after a call; "": none."""
        ...

    def may_begin(self, text: str) -> bool:
        """Whether the text after a marker may become a call."""
        ...

    def read(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[list[ToolCall], str]:
        """The calls in the text between two markers, and the text after them if there is no end marker. Raises ValueError if it
        is not a call, and Unfinished if more text may make it one."""
        ...


def transitions_of(tokenizer: TokenizerWrapper, *, tools: bool) -> dict[str, list[tuple[str, str]]]:
    """How a model's answers are divided. tools: whether to look for calls."""
    found: dict[str, list[tuple[str, str]]] = {NORMAL: []}
    start = tokenizer.tool_call_start
    formats = tokenizer.response_transitions
    opening, closing = tokenizer.think_start, tokenizer.think_end
    if opening is not None and closing is not None:
        found[NORMAL].append((opening, REASONING))
        found[REASONING] = [(closing, NORMAL)]
    if tools and start is not None:
        # A response format that includes calls defines where they begin.
        if not any(state == TOOL for marks in formats.values() for _, state in marks):
            found[NORMAL].append((start, TOOL))
        if REASONING in found:
            found[REASONING].append((start, TOOL))
    found[NORMAL] += [(marker, NORMAL) for marker in tokenizer.structural_markers]
    for state, marks in formats.items():
        found.setdefault(state, []).extend(marks)
    return found


class AnswerReader:
    """core.AnswerReader. state: at the answer's start. syntax: of tool calls; None: there are none. opening: the marker that
    opens reasoning; once the answer contains text, it counts as text."""

    def __init__(
        self,
        transitions: Transitions,
        state: str,
        syntax: CallSyntax | None = None,
        tools: Sequence[Mapping[str, object]] = (),
        opening: str | None = None,
    ) -> None:
        self._transitions = transitions
        self._state = state
        self._syntax = syntax
        self._tools = [_with_parameters(tool) for tool in tools]
        self._opening = opening
        self._pending = ""
        """Unread text that may belong to a marker or to a call."""
        self._around = (NORMAL, syntax.start if syntax is not None and state == TOOL else "")
        """The state before the open call, and the call's marker."""
        self._looked = 0
        """Length of the part of the open call that was searched for its end."""
        self._blank: str | None = ""
        """White space at the start of a text, which may only separate calls; None: the text has started."""
        self._called = self._said = False

    def add(self, text: str) -> list[Piece]:
        """See core.AnswerReader."""
        self._pending += text
        return self._read(ended=False, cut=False)

    def finish(self, cut: bool) -> list[Piece]:
        """See core.AnswerReader."""
        pieces = self._read(ended=True, cut=cut)
        if self._blank and not self._called:
            pieces.append(Piece(PieceKind.TEXT, self._blank))
        return pieces

    def _read(self, *, ended: bool, cut: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while True:
            if self._state == TOOL:
                found = self._call(ended=ended, cut=cut)
                if found is None:
                    return pieces
                pieces += found
                continue
            marks = self._marks()
            place = _first(self._pending, marks)
            if place is None:
                kept = 0 if ended else _withheld(self._pending, marks)
                cut_at = len(self._pending) - kept
                pieces += self._shown(self._pending[:cut_at])
                self._pending = self._pending[cut_at:]
                return pieces
            at, marker, state = place
            pieces += self._shown(self._pending[:at])
            if marker == self._opening and state == REASONING and self._state == NORMAL and self._said:
                # Text precedes the marker, so the marker is only mentioned.
                self._pending = self._pending[at:]
                continue
            self._pending = self._pending[at + len(marker) :]
            if state == TOOL:
                self._around, self._looked = (self._state, marker), 0
            self._state = state
            if state == TOOL and self._syntax is None:
                pieces += self._mentioned()

    def _marks(self) -> Sequence[tuple[str, str]]:
        marks = self._transitions.get(self._state, ())
        if self._state == NORMAL and self._said:
            return [mark for mark in marks if mark != (self._opening, REASONING)]
        return marks

    def _call(self, *, ended: bool, cut: bool) -> list[Piece] | None:
        """The call after the marker; None: more text may complete it. Anything else becomes text, including its marker, and is
        searched for further markers."""
        syntax = self._syntax
        assert syntax is not None
        while syntax.end and (at := self._pending.find(syntax.end, self._looked)) >= 0:
            try:
                calls, _ = syntax.read(self._pending[:at], self._tools)
            except Unfinished:
                self._looked = at + len(syntax.end)
                continue
            except Exception:  # noqa: BLE001  (parsers raise arbitrary errors on malformed text)
                return self._mentioned()
            return self._closed(calls, self._pending[at + len(syntax.end) :])
        if not syntax.may_begin(self._pending):
            return self._mentioned()
        if not ended:
            self._looked = max(self._looked, len(self._pending) - len(syntax.end) + 1) if syntax.end else 0
            return None
        if not cut:
            # For formats without an end marker, and models that end their turn instead of writing it.
            try:
                return self._closed(*syntax.read(self._pending, self._tools))
            except Exception:  # noqa: BLE001  (as above)
                pass
        return self._mentioned()

    def _mentioned(self) -> list[Piece]:
        """The marker of a call as text."""
        state, marker = self._around
        self._state = state if state == REASONING else NORMAL
        return self._shown(marker)

    def _closed(self, calls: Sequence[ToolCall], rest: str) -> list[Piece]:
        self._state, self._pending = NORMAL, rest
        self._blank, self._called, self._said = "", True, False
        return [Piece(PieceKind.CALL, call=call) for call in calls]

    def _shown(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self._state == REASONING:
            return [Piece(PieceKind.REASONING, text)]
        return self._text(text) if self._state == NORMAL else []

    def _text(self, text: str) -> list[Piece]:
        """Text. White space alone is withheld until more follows."""
        self._said = self._said or bool(text.strip())
        if self._blank is not None:
            text = self._blank + text
            self._blank = None if text.strip() else text
        return [Piece(PieceKind.TEXT, text)] if self._blank is None else []


def _first(text: str, marks: Sequence[tuple[str, str]]) -> tuple[int, str, str] | None:
    """The position of the first marker, the marker, and the state after it."""
    found = [(at, marker, state) for marker, state in marks if (at := text.find(marker)) >= 0]
    return min(found, key=lambda place: (place[0], len(place[1])), default=None)


def _withheld(text: str, marks: Sequence[tuple[str, str]]) -> int:
    """Number of characters at the end of a text that may begin a marker."""
    longest = max((len(marker) for marker, _ in marks), default=1) - 1
    return next(
        (
            size
            for size in range(min(longest, len(text)), 0, -1)
            if any(marker.startswith(text[-size:]) for marker, _ in marks)
        ),
        0,
    )


def _with_parameters(tool: Mapping[str, object]) -> dict[str, Any]:
    """The tool with `parameters`, which some parsers require."""
    function = tool.get("function")
    assert isinstance(function, Mapping)
    return {**tool, "function": {"parameters": {"type": "object", "properties": {}}, **function}}
