"""Answers split into text, reasoning and tool calls: every parser of mlx-lm, however the text is cut into parts."""

from __future__ import annotations

import json
import pkgutil
import random
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import mlx_lm.tool_parsers
import pytest

from service.core import Piece, PieceKind, ToolCall
from service.models.answer import AnswerReader, transitions_of
from service.models.call_syntax import syntax_of
from service.models.calls import FORMATS
from tests.support.tool_formats import CALLS, TOOLS, WANTED, marked


def test_every_installed_parser_is_tried() -> None:
    assert sorted(CALLS) == sorted(each.name for each in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__))


def reader(parser: str, start: str = "normal", tools: Sequence[Mapping[str, object]] = TOOLS) -> AnswerReader:
    module = import_module(f"mlx_lm.tool_parsers.{parser}")
    tokenizer: Any = SimpleNamespace(
        has_thinking=True,
        think_start="<think>",
        think_end="</think>",
        has_tool_calling=True,
        tool_call_start=module.tool_call_start,
        tool_call_end=module.tool_call_end,
        response_transitions={},
        structural_markers=(),
        tool_parser=module.parse_tool_call,
    )
    known = FORMATS.get(module.parse_tool_call)
    syntax = syntax_of(tokenizer, None if known is None else known.parse)
    return AnswerReader(transitions_of(tokenizer, tools=True), start, syntax, tools, "<think>")


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


@pytest.mark.parametrize("parser", sorted(CALLS))
@pytest.mark.parametrize("garbage", ["", "{", "no call at all", '{"name": 5, "arguments": {}}', "[1, 2]", "null"])
def test_what_is_no_call_becomes_text(parser: str, garbage: str) -> None:
    answer = "a" + marked(parser, garbage)
    whole = read(reader(parser), [answer])
    assert whole == read(reader(parser), list(answer))
    text, _, calls = whole
    assert (text, calls) == (answer, [])


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
    assert read(reader("json_tools"), [call + "</tool_call>"]) == (call + "</tool_call>", "", [])


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


# --------------------------------------------------------------------------------------------------- markers as mentions


@pytest.mark.parametrize("parser", sorted(CALLS))
def test_a_marker_that_is_mentioned_swallows_nothing(parser: str) -> None:
    call = marked(parser, CALLS[parser])
    start = import_module(f"mlx_lm.tool_parsers.{parser}").tool_call_start
    mention = f"A call begins with `{start}`, and {start} is all, <so to say>. "
    whole = read(reader(parser), [mention + call])
    assert whole == (mention, "", whole[2])
    assert [json.loads(call.arguments) for call in whole[2]] == [WANTED]
    assert read(reader(parser), list(mention + call)) == whole
    early = reader(parser)
    assert "".join(piece.text for piece in early.add(mention)) == mention, "the stream goes on"


@pytest.mark.parametrize("parser", sorted(CALLS))
def test_a_marker_that_is_mentioned_in_reasoning_does_not_end_it(parser: str) -> None:
    start = import_module(f"mlx_lm.tool_parsers.{parser}").tool_call_start
    thought = f"I could write {start}, or not."
    for parts in ([f"{thought}</think>No."], list(f"{thought}</think>No.")):
        assert read(reader(parser, "reasoning"), parts) == ("No.", thought, [])


@pytest.mark.parametrize(
    ("answer", "text", "reasoning"),
    [
        ("The tag <think> opens it, </think> ends it.", "The tag <think> opens it, </think> ends it.", ""),
        ("<think>a</think>The tag <think> is", "The tag <think> is", "a"),
        (" \n<think>a</think> b", " b", "a"),
        ("<think>a</think>\n<think>c</think>b", "b", "ac"),
        ("a <thi", "a <thi", ""),
    ],
)
def test_reasoning_is_opened_before_an_answer_says_anything(answer: str, text: str, reasoning: str) -> None:
    for parts in ([answer], list(answer)):
        found = read(reader("json_tools"), parts)
        assert (found[0].strip(), found[1], found[2]) == (text.strip(), reasoning, [])


def test_a_call_may_write_the_marker_behind_calls() -> None:
    arguments = {"text": "</tool_call> and <tool_call>{</tool_call>"}
    call = "<tool_call>" + json.dumps({"name": "now", "arguments": arguments}) + "</tool_call>"
    for parts in ([call], list(call)):
        text, _, calls = read(reader("json_tools"), [*parts, "so"])
        assert (text, [json.loads(call.arguments) for call in calls]) == ("so", [arguments])
    broken = '<tool_call>{"name": "now</tool_call> no'
    assert read(reader("json_tools"), list(broken)) == (broken, "", [])


# ------------------------------------------------------------------------------------------------------ what a call says


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', [{"a": 1}]),
        ('{"name": "f", "args": {"a": 1}}', [{"a": 1}]),
        ('{"name": "f", "input": {"a": 1}}', [{"a": 1}]),
        ('{"name": "f", "arguments": null, "parameters": {"a": 1}}', [{"a": 1}]),
        ('{"name": "f", "arguments": {"a": 1}, "parameters": {"a": 1}}', [{"a": 1}]),
        ('{"type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}', [{"a": 1}]),
        ('{"name": "f"}', [{}]),
        ('{"name": "f", "arguments": ""}', [{}]),
        ('{"name": "f", "arguments": {}}\n{"name": "f", "arguments": {"a": 1}}', [{}, {"a": 1}]),
        ('[{"name": "f", "arguments": {}}, {"name": "f"}]', [{}, {}]),
        ('{"name": "f", "arguments": []}', None),
        ('{"name": "f", "arguments": [1]}', None),
        ('{"name": "f", "arguments": 0}', None),
        ('{"name": "f", "arguments": false}', None),
        ('{"name": "f", "arguments": "no JSON"}', None),
        ('{"name": "f", "arguments": "[1]"}', None),
        ('{"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}', None),
        ('{"name": "f", "a": 1}', None),
        ('{"name": "", "arguments": {}}', None),
        ('{"name": "f", "arguments": {}} and more', None),
        ('{"name": "f", "arguments": {}}{"name": 5}', None),
    ],
)
def test_arguments_by_other_names_and_what_is_none(call: str, arguments: list[object] | None) -> None:
    answer = f"<tool_call>\n{call}\n</tool_call>"
    for parts in ([answer], list(answer)):
        text, _, calls = read(reader("json_tools"), parts)
        if arguments is None:
            assert (text, calls) == (answer, [])
        else:
            assert (text, [json.loads(call.arguments) for call in calls]) == ("", arguments)


@pytest.mark.parametrize(
    ("parser", "call"),
    [
        ("glm47", "weather today is nice"),
        ("glm47", "unheard_of"),
        ("longcat", "unheard_of"),
        ("qwen3_coder", "I write <function=weather></function>"),
        ("minimax_m2", 'I write <invoke name="weather"></invoke>'),
        ("minimax_m2", '<invoke name="weather"></invoke> and more'),
        ("pythonic", "Look: [weather(days=2)]"),
        ("function_gemma", "I call:weather{days:2}"),
        ("mistral", 'I write weather[ARGS]{"days": 2}'),
        ("glm47", "weather<arg_key>days</arg_key><arg_value>two</arg_value>"),
    ],
)
def test_nothing_is_made_up_and_nothing_is_left_out(parser: str, call: str) -> None:
    answer = marked(parser, call)
    for parts in ([answer], list(answer)):
        assert read(reader(parser), parts) == (answer, "", [])


@pytest.mark.parametrize(
    ("call", "names", "rest"),
    [
        ('[TOOL_CALLS]weather[ARGS]{"days": 2} Done.', ["weather"], " Done."),
        ('[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{"days": 2}[TOOL_CALLS]now[ARGS]{}', ["weather", "now"], ""),
        (
            '[TOOL_CALLS] [{"name": "weather", "arguments": {}}, {"name": "now", "arguments": {}}]\nSo',
            ["weather", "now"],
            "\nSo",
        ),
    ],
)
def test_calls_without_an_end_marker_and_what_follows(call: str, names: list[str], rest: str) -> None:
    for parts in ([call], list(call)):
        text, _, calls = read(reader("mistral"), parts)
        assert (text, [call.name for call in calls]) == (rest, names)


# ------------------------------------------------------------------------------------------------------ types by schema

TYPED = {
    "type": "object",
    "properties": {
        "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "text": {"type": "string"},
        "either": {"type": ["string", "null"]},
        "big": {"type": "integer"},
        "level": {"enum": [1, 2, 3]},
        "ref": {"$ref": "#/$defs/N"},
        "lost": {"$ref": "#/$defs/none"},
        "flag": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "integer"}},
        "set": {"type": "string", "enum": None, "anyOf": None},
        "word": {"type": "varchar"},
        "long": {"type": "long"},
        "date": {"type": "date"},
    },
    "$defs": {"N": {"type": "integer"}},
}
TAGS = {
    "qwen3_coder": ("\n<function=f>\n{}</function>\n", "<parameter={}>\n{}\n</parameter>\n"),
    "glm47": ("f\n{}", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
    "laguna": ("f\n{}", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
    "longcat": ("f\n{}", "<longcat_arg_key>{}</longcat_arg_key><longcat_arg_value>{}</longcat_arg_value>"),
    "minimax_m2": ('\n<invoke name="f">\n{}</invoke>\n', '<parameter name="{}">{}</parameter>\n'),
    "minicpm5": ('"f">{}', '<param name="{}">{}</param>'),
    "muse_spark": ('<atem:invoke name="f">{}</atem:invoke>', '<atem:parameter name="{}">{}</atem:parameter>'),
}
"""Formats with a tag for each parameter: a call, and a parameter."""


@pytest.mark.parametrize("parser", TAGS)
@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("count", "5", 5),
        ("count", "null", None),
        ("text", "null", "null"),
        ("text", "5", "5"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("either", "(1, 2)", "(1, 2)"),
        ("either", "{1}", "{1}"),
        ("either", "42", "42"),
        ("either", "null", None),
        ("big", "9007199254740993", 9007199254740993),
        ("big", "5.0", 5),
        ("level", "2", 2),
        ("ref", "7", 7),
        ("lost", "7", 7),
        ("flag", "True", True),
        ("list", "[1, 2]", [1, 2]),
        ("set", "5", "5"),
        ("word", "5", "5"),
        ("long", "5", 5),
        ("date", "2026-01-31", "2026-01-31"),
        ("other", "[1]", [1]),
        ("other", "(1, 2)", "(1, 2)"),
    ],
)
def test_parameters_in_tags_have_the_types_of_the_schema(parser: str, name: str, written: str, value: object) -> None:
    body, parameter = TAGS[parser]
    answer = marked(parser, body.format(parameter.format(name, written)))
    tools = [{"type": "function", "function": {"name": "f", "parameters": TYPED}}]
    text, _, calls = read(reader(parser, tools=tools), [answer])
    assert (text, [json.loads(call.arguments) for call in calls]) == ("", [{name: value}])


@pytest.mark.parametrize("parser", ["qwen3_coder", "minimax_m2", "muse_spark"])
def test_several_functions_between_markers_are_several_calls(parser: str) -> None:
    body, parameter = TAGS[parser]
    answer = marked(parser, body.format(parameter.format("text", "a")) + body.format(parameter.format("text", "b")))
    tools = [{"type": "function", "function": {"name": "f", "parameters": TYPED}}]
    text, _, calls = read(reader(parser, tools=tools), list(answer))
    assert (text, [json.loads(call.arguments) for call in calls]) == ("", [{"text": "a"}, {"text": "b"}])


@pytest.mark.parametrize("parser", TAGS)
def test_a_value_that_no_schema_allows_is_no_argument(parser: str) -> None:
    body, parameter = TAGS[parser]
    answer = marked(parser, body.format(parameter.format("big", "five")))
    tools = [{"type": "function", "function": {"name": "f", "parameters": TYPED}}]
    assert read(reader(parser, tools=tools), [answer]) == (answer, "", [])
