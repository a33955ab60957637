"""Answers split into text, reasoning and tool calls: every parser of mlx-lm, however the text is cut into parts."""

from __future__ import annotations

import json
import pkgutil
import random
from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace

import mlx_lm.tool_parsers
import pytest
from mlx_lm.generate import make_text_state_machine

from service.core import Piece, PieceKind, ToolCall
from service.models.answer import AnswerReader
from tests.support.tool_formats import CALLS, TOOLS, WANTED, marked


def test_every_installed_parser_is_tried() -> None:
    assert sorted(CALLS) == sorted(each.name for each in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__))


def reader(parser: str, start: str = "normal") -> AnswerReader:
    module = import_module(f"mlx_lm.tool_parsers.{parser}")
    tokenizer = SimpleNamespace(
        has_thinking=True,
        think_start="<think>",
        think_end="</think>",
        has_tool_calling=True,
        tool_call_start=module.tool_call_start,
        tool_call_end=module.tool_call_end,
        response_transitions={},
        structural_markers=(),
    )
    state = make_text_state_machine(tokenizer).make_state(start)
    return AnswerReader(state, module.parse_tool_call, TOOLS, module.tool_call_start)


def read(reader: AnswerReader, parts: Sequence[str], *, cut: bool = False) -> tuple[str, str, list[ToolCall]]:
    """All text, all reasoning, all calls."""
    pieces: list[Piece] = []
    for part in parts:
        pieces += reader.add(part)
    pieces += reader.finish(cut)
    calls = [piece.call for piece in pieces if piece.call is not None]
    text, reasoning = (
        "".join(each.text for each in pieces if each.kind is kind) for kind in (PieceKind.TEXT, PieceKind.REASONING)
    )
    return text, reasoning, calls


def split(text: str, dice: random.Random) -> list[str]:
    places = sorted(dice.sample(range(1, len(text)), dice.randint(0, min(12, len(text) - 1))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("parser", sorted(CALLS))
def test_a_call_is_the_same_however_its_text_is_cut(parser: str) -> None:
    dice = random.Random(parser)
    answer = "Let me see. " + marked(parser, CALLS[parser])
    whole = read(reader(parser), [answer])
    text, reasoning, calls = whole
    assert (text, reasoning, len(calls)) == ("Let me see. ", "", 1)
    assert calls[0].name == "weather"
    assert json.loads(calls[0].arguments) == WANTED
    assert read(reader(parser), list(answer)) == whole
    for _ in range(50):
        assert read(reader(parser), split(answer, dice)) == whole


@pytest.mark.parametrize("parser", sorted(set(CALLS) - {"mistral"}))
def test_calls_follow_each_other_with_text_between(parser: str) -> None:
    one = marked(parser, CALLS[parser])
    text, reasoning, calls = read(reader(parser, "reasoning"), list(f"think</think>first{one}then{one}"))
    assert (text, reasoning) == ("firstthen", "think")
    assert [call.name for call in calls] == ["weather", "weather"]


@pytest.mark.parametrize("parser", sorted(CALLS))
def test_an_answer_cut_anywhere_invents_nothing(parser: str) -> None:
    answer = "Let me see. " + marked(parser, CALLS[parser])
    (call,) = read(reader(parser), [answer])[2]
    for end in range(len(answer)):
        cut = answer[:end]
        whole = read(reader(parser), [cut], cut=True)
        text, reasoning, calls = whole
        assert not reasoning
        assert calls in ([], [call])
        if not calls:
            assert text == cut
        assert read(reader(parser), list(cut), cut=True) == whole


@pytest.mark.parametrize("parser", sorted(set(CALLS) - {"glm47", "laguna"}))
@pytest.mark.parametrize("garbage", ["", "{", "no call at all", '{"name": 5, "arguments": {}}', "[1, 2]", "null"])
def test_what_is_no_call_becomes_text(parser: str, garbage: str) -> None:
    answer = "a" + marked(parser, garbage)
    whole = read(reader(parser), [answer])
    assert whole == read(reader(parser), list(answer))
    text, _, calls = whole
    assert calls == [] and text == "a" + import_module(f"mlx_lm.tool_parsers.{parser}").tool_call_start + garbage


def test_white_space_around_calls_is_no_text() -> None:
    one = '<tool_call>{"name": "now"}</tool_call>'
    for answer, text in (
        (f"\n{one}\n{one}\n", ""),
        (f"so \n{one}\nand\n{one}", "so \n\nand\n"),
        (" \n", " \n"),
        ("\n\n a ", "\n\n a "),
    ):
        assert read(reader("json_tools"), [answer])[0] == text
        assert read(reader("json_tools"), list(answer))[0] == text


@pytest.mark.parametrize("arguments", ['{"x": "\\ud800"}', '{"x": NaN}', '{"x": Infinity}'])
def test_arguments_that_cannot_be_sent_are_text(arguments: str) -> None:
    call = '<tool_call>{"name": "now", "arguments": ' + arguments + "}"
    assert read(reader("json_tools"), [call + "</tool_call>"]) == (call, "", [])


def test_an_answer_may_end_with_the_beginning_of_a_marker() -> None:
    assert read(reader("json_tools"), ["1 <", " 2 <t"]) == ("1 < 2 <t", "", [])


def test_reasoning_that_never_ends_stays_reasoning() -> None:
    assert read(reader("json_tools", "reasoning"), list("still thinking </th"), cut=True) == (
        "",
        "still thinking </th",
        [],
    )


def test_a_call_at_the_end_needs_no_end_marker_unless_it_was_cut() -> None:
    open_call = '<tool_call>{"name": "now"}'
    assert read(reader("json_tools"), [open_call]) == ("", "", [ToolCall("now", "{}")])
    assert read(reader("json_tools"), [open_call], cut=True) == (open_call, "", [])


def test_arguments_written_as_a_string_are_read_and_ids_of_the_model_are_passed_on() -> None:
    call = '<tool_call>{"name": "now", "id": "c1", "arguments": "{\\"a\\": \\"é\\"}"}</tool_call>'
    assert read(reader("json_tools"), [call])[2] == [ToolCall("now", '{"a": "é"}', "c1")]
