"""Calls with parameters between tags: what the grammar lets a model write, and what that is read as."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from typing import Any, cast

import fastjsonschema
import pytest
from mlx_lm.tool_parsers import qwen3_coder
from mlx_lm.utils import load_tokenizer

from service.core import BadRequest, Constraint, Grammar, GrammarKind, PieceKind, Reasoning
from service.models.calls import FORMATS, Markers, forced_calls, free_calls
from service.models.parameter_schemas import forms
from service.models.tagged_calls import GLM, MINIMAX
from service.models.text import TextEncoder
from service.models.tokens import token_table
from service.models.xml_calls import XmlCalls
from tests.support.qwen import write_tokenizer
from tests.support.tool_formats import CALLS, TOOLS, WANTED

ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}
TREE = {"type": "object", "properties": {"left": {"$ref": "#/$defs/Tree"}}, "additionalProperties": False}
AWKWARD = [
    "",
    "null",
    "5",
    "true",
    '{"a": 1}',
    ' "a" ',
    "\n",
    "a\n\nb\n",
    "<a> & </parameter> <b",
    "</parameter",
    "é€😀",
    "x\\y/z",
]
"""Strings that look like something else."""


def nullable(*schemas: object) -> dict[str, Any]:
    return {"anyOf": [*schemas, {"type": "null"}]}


GOOD: dict[str, tuple[object, list[Any]]] = {
    "string": ({"type": "string"}, AWKWARD),
    "integer": ({"type": "integer"}, [5, -7, 0, 10**20]),
    "number": ({"type": "number"}, [5, -0.25]),
    "boolean": ({"type": "boolean"}, [True, False]),
    "null": ({"type": "null"}, [None]),
    "bounds": ({"type": "integer", "minimum": 3, "maximum": 12}, [3, 12]),
    "array": ({"type": "array", "items": {"type": "string"}}, [[], ["a", "<b>\n</parameter>"]]),
    "object": (ITEM, [{"name": "a\nb", "count": 2}, {"name": "</parameter>"}]),
    "reference": ({"$ref": "#/$defs/Item"}, [{"name": "a"}]),
    "recursive": ({"$ref": "#/$defs/Tree"}, [{}, {"left": {"left": {}}}]),
    "list of references": ({"type": "array", "items": {"$ref": "#/$defs/Item"}}, [[{"name": "a"}, {"name": "b"}]]),
    "enum of strings": ({"type": "string", "enum": ["red", "red\nish", "null", "5"]}, ["red", "red\nish", "null", "5"]),
    "mixed enum": ({"enum": ["1", 2, "2x", None, True, ["a"]]}, ["1", 2, "2x", None, True, ["a"]]),
    "const": ({"const": "a b"}, ["a b"]),
    "number const": ({"const": 1.5}, [1.5]),
    "string or null": (nullable({"type": "string"}), [None, "a", "nulls", ""]),
    "list of types": ({"type": ["string", "null"]}, [None, "a"]),
    "integer or null": (nullable({"type": "integer"}), [None, 4]),
    "string or integer": ({"type": ["string", "integer"]}, [4, "4 apples", "1.5", "- 4", " 5", ""]),
    "string or bounded integer": (
        {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 10}]},
        [10, "- 4", " 5", "four"],
    ),
    "string or object": ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Item"}]}, [{"name": "a"}, "a {", "5"]),
    "strings or lists of them": (
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        [["a"], "a [b]"],
    ),
    "enum or null": (nullable({"$ref": "#/$defs/Colour"}), ["red", None]),
    "all of one": ({"allOf": [{"$ref": "#/$defs/Colour"}], "description": "x"}, ["red"]),
    "pattern": ({"type": "string", "pattern": "^[a-c/]+$"}, ["abc", "a/b"]),
    "pattern anywhere": ({"type": "string", "pattern": "[0-9]{2}"}, ["x 12 y", "12"]),
    "pattern of alternatives": ({"type": "string", "pattern": "^a|b$|(c|d)"}, ["ax", "xb", "xcx"]),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é€😀"]),
    "pattern or null": (nullable({"type": "string", "pattern": "^[0-9]-[0-9]$"}), ["1-2", None]),
    "anything": ({}, ["a", 5, None, {"a": [1]}, True, "5 a"]),
}
"""Schemas of a parameter, and values that can be written and read."""
BAD: dict[str, list[str]] = {
    "integer": ["five", "5.5", "", '"5"'],
    "boolean": ["True", "yes"],
    "bounds": ["2", "13"],
    "object": ["{}", '{"name": "a", "more": 1}', "a"],
    "enum of strings": ["green", "RED", ""],
    "mixed enum": ["1x", "false", "3"],
    "integer or null": ["a", "None"],
    "string or bounded integer": ["9", "9 lives"],
    "string or object": ['{"a": 1}', "{"],
    "pattern": ["abd", "", "abc\n"],
    "pattern anywhere": ["1 2"],
    "pattern of alternatives": ["xa", "bx"],
    "lengths": ["a", "abcd"],
    "pattern or null": ["1-", "nul"],
    "string": ["a\n</parameter>b", "a</parameter>\n<parameter=x>\nb"],
}
"""Texts that these schemas do not allow, or that would be read as something else."""
MARKERS = ("<tool_call>", "</tool_call>")
OURS = cast("XmlCalls", FORMATS[qwen3_coder.parse_tool_call])


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    folder = tmp_path_factory.mktemp("qwen")
    write_tokenizer(folder, tool_parser_type="qwen3_coder")
    return TextEncoder(load_tokenizer(folder))


def tool(properties: Mapping[str, object], required: list[str] | None = None, **more: object) -> dict[str, Any]:
    definitions = {"Item": ITEM, "Tree": TREE, "Colour": {"type": "string", "enum": ["red", "green"]}}
    schema = {"type": "object", "properties": properties, "required": required or [], "$defs": definitions, **more}
    return {"type": "function", "function": {"name": "act", "parameters": schema}}


def forced(encoder: TextEncoder, *tools: dict[str, Any], several: bool = False) -> Constraint:
    return encoder.constraint(encoder.call_grammar(tools, several=several), Reasoning.CLOSED)


def text_of(arguments: Mapping[str, object], name: str = "act") -> str:
    """As Qwen's chat template writes a call."""
    texts = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in arguments.items()
    }
    parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def tokens_of(encoder: TextEncoder, text: str) -> list[int]:
    """The markers around the call as their tokens, and the letters of markers within it as letters."""
    tokenizer, letters = encoder._tokenizer, encoder._grammars._tokenizer
    assert letters is not None, "a grammar was compiled before"
    first, last = (tokenizer.convert_tokens_to_ids(name) for name in MARKERS)
    return [first, *letters.tokenize_str(text.removeprefix(MARKERS[0]).removesuffix(MARKERS[1])), last]


def follows(encoder: TextEncoder, constraint: Constraint, text: str) -> bool:
    """Whether the answer may be this text and end with it."""
    tokens = tokens_of(encoder, text)
    masks = constraint.masks(tokens)
    (end,) = encoder._tokenizer.eos_token_ids
    return len(masks) == len(tokens) + 1 and bool(masks[-1][end >> 3] >> (end & 7) & 1)


def read(encoder: TextEncoder, tools: list[dict[str, Any]], text: str) -> list[Any]:
    """Arguments of the calls in an answer, which are the same however the answer comes."""
    found: list[list[Any]] = []
    for parts in ([text], list(text)):
        reader = encoder.answer_reader(tools, Reasoning.CLOSED)
        pieces = [piece for part in parts for piece in reader.add(part)] + reader.finish(cut=False)
        assert {piece.kind for piece in pieces} == {PieceKind.CALL}, text
        found.append([json.loads(piece.call.arguments) for piece in pieces if piece.call is not None])
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("name", GOOD)
def test_values_are_written_and_read_back(encoder: TextEncoder, name: str) -> None:
    schema, values = GOOD[name]
    one = tool({"a": schema, "after": {"type": "string"}}, ["a"])
    constraint = forced(encoder, one)
    for value in values:
        text = text_of({"a": value})
        assert follows(encoder, constraint, text), text
        assert read(encoder, [one], text) == [{"a": value}]
        both = text_of({"a": value, "after": "</parameter>"})
        assert follows(encoder, constraint, both), both
        assert read(encoder, [one], both) == [{"a": value, "after": "</parameter>"}]


@pytest.mark.parametrize("name", BAD)
def test_other_texts_are_not_written(encoder: TextEncoder, name: str) -> None:
    one = tool({"a": GOOD[name][0]}, ["a"])
    constraint = forced(encoder, one)
    for text in BAD[name]:
        assert not follows(encoder, constraint, text_of({"a": text})), text


def walk(encoder: TextEncoder, constraint: Constraint, dice: random.Random) -> str | None:
    """A random answer; None: it has no end after 400 tokens."""
    (end,) = encoder._tokenizer.eos_token_ids
    output = b""
    favoured = (b"\n", b"<", b"</", b"/", b'"', b"}", b"]", b"null", b"{", b"5", b"-")
    for _ in range(400):
        mask = constraint.masks(())[0]
        allowed = [id for id in range(encoder.vocabulary) if mask[id >> 3] >> (id & 7) & 1]
        likely = [
            id
            for id in allowed
            if id == end or encoder.token_bytes(id) in favoured or ord(">") in encoder.token_bytes(id)
        ]
        closing = constraint.forced(1)
        token = closing[0] if closing else dice.choice(likely if likely and dice.random() < 0.6 else allowed)
        if token == end:
            return output.decode()
        output += encoder.token_bytes(token)
        if dice.random() < 0.3:  # the end of a value, which chance alone hardly finds
            constraint.advance([token])
            for token in tokens_of(encoder, "\n</parameter>\n")[1:-1]:
                if len(constraint.masks([token])) == 1:
                    break
                output += encoder.token_bytes(token)
                constraint.advance([token])
            continue
        constraint.advance([token])
    assert not constraint.failed
    return None


@pytest.mark.parametrize("name", GOOD)
def test_random_answers_have_valid_arguments(encoder: TextEncoder, name: str) -> None:
    one = tool({"a": GOOD[name][0], "b": {"type": "string"}}, ["a"], additionalProperties=False)
    constraint, ended = forced(encoder, one), 0
    validate = cast("Any", fastjsonschema.compile(one["function"]["parameters"]))
    for seed in range(40):
        if (text := walk(encoder, constraint.copy(), random.Random(seed))) is not None:
            for arguments in read(encoder, [one], text):
                validate(arguments)
            ended += 1
    assert ended >= 5


def test_parameters_come_in_order_and_only_optional_ones_are_left_out(encoder: TextEncoder) -> None:
    number = {"type": "integer"}
    one = tool({"a": number, "b": number, "c": number}, ["a", "c", "d"])
    constraint = forced(encoder, one)
    for arguments, good in (
        ({"a": 1, "b": 2, "c": 3, "d": 4}, True),
        ({"a": 1, "c": 3, "d": "x"}, True),
        ({"a": 1, "d": "x"}, False),
        ({"c": 3, "a": 1, "d": "x"}, False),
        ({"a": 1, "c": 3, "d": 4, "e": 5}, False),
        ({}, False),
    ):
        assert follows(encoder, constraint, text_of(arguments)) == good, arguments


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"type": None, "properties": None, "required": None, "additionalProperties": None, "anyOf": None},
    ],
)
def test_a_function_without_parameters(encoder: TextEncoder, parameters: dict[str, Any] | None) -> None:
    one: dict[str, Any] = {"type": "function", "function": {"name": "act"}}
    if parameters is not None:
        one["function"]["parameters"] = parameters
    assert follows(encoder, forced(encoder, one), text_of({}))
    assert not follows(encoder, forced(encoder, one), text_of({"a": "b"}))
    assert read(encoder, [one], text_of({})) == [{}]


def test_additional_parameters_that_a_schema_speaks_of(encoder: TextEncoder) -> None:
    one = tool({"a": {"type": "string"}}, additionalProperties={"type": "integer"})
    constraint = forced(encoder, one)
    assert follows(encoder, constraint, text_of({"a": "x", "größe": 5, "other": 6}))
    assert read(encoder, [one], text_of({"a": "5", "größe": 5})) == [{"a": "5", "größe": 5}]
    assert not follows(encoder, constraint, text_of({"b": "x"}))
    twice = text_of({"a": "x"}).replace("</function>", "<parameter=a>\n5\n</parameter>\n</function>")
    assert not follows(encoder, constraint, twice)


def test_several_calls_of_several_tools(encoder: TextEncoder) -> None:
    first, second = tool({"a": {"type": "string"}}, ["a"]), {"type": "function", "function": {"name": "now"}}
    both = f"{text_of({'a': 'x'})}\n{text_of({}, 'now')}"
    for several in (False, True):
        constraint = forced(encoder, first, second, several=several)
        tokens = [
            *tokens_of(encoder, text_of({"a": "x"})),
            *encoder.encode_text("\n"),
            *tokens_of(encoder, text_of({}, "now")),
        ]
        assert (len(constraint.masks(tokens)) == len(tokens) + 1) == several
        assert follows(encoder, constraint, text_of({}, "now"))
        assert not follows(encoder, constraint, text_of({}, "other"))
    assert read(encoder, [first, second], both) == [{"a": "x"}, {}]


def test_a_marker_within_a_string_is_not_written(encoder: TextEncoder) -> None:
    """What reads the answer finds the end of the call there."""
    for schema in ({"type": "string"}, {"type": "string", "enum": ["</tool_call>", "other"]}):
        constraint = forced(encoder, tool({"a": schema}, ["a"]))
        assert not follows(encoder, constraint, text_of({"a": "</tool_call>"}))
        assert follows(encoder, constraint, text_of({"a": "other"}))


def test_strict_tools_in_free_answers(encoder: TextEncoder) -> None:
    strict, loose = tool({"a": {"type": "integer"}}, ["a"]), tool({"a": {"type": "integer"}}, ["a"])
    loose["function"]["name"] = "loose"
    constraint = encoder.constraint(encoder.free_call_grammar([strict, loose], {"act"}), Reasoning.CLOSED)
    for text, good in (
        (text_of({"a": 5}), True),
        (text_of({"a": "five"}), False),
        (text_of({}), False),
        (text_of({"any": "thing\n", "other": "5"}, "loose"), True),
        (text_of({}, "loose"), True),
        (text_of({}, "unknown"), False),
        (text_of({}, "loose").replace("</function>", "text</function>"), False),
    ):
        assert follows(encoder, constraint, text) == good, text
    assert len(constraint.masks(encoder.encode_text("text alone <function=act>"))) > len("text alone") // 3


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "anyOf"),
        ({"properties": {"a": {"type": "string", "not": {"const": "x"}}}}, "not"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "refers to nothing"),
        ({"properties": {"a": {"$ref": "https://example.org/a"}}}, "does not refer"),
        ({"properties": {"a>b": {"type": "string"}}}, "cannot be a name"),
        ({"properties": {"a": {"type": "text"}}}, "not a type"),
        ({"properties": {"a": False}, "required": ["a"]}, "no value of it is valid"),
        ({"properties": {"a": {"const": "\n</parameter>"}}}, "end tag"),
        ({"properties": {"a": {"type": "string", "pattern": "\\"}}}, "backslash"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, "cannot be compiled"),
        (
            {
                "properties": {
                    "a": {"type": "string", "pattern": 'a/ | "'},
                    "b": {"type": "string", "maxLength": '1}/ | "'},
                }
            },
            "invalid literal",
        ),
        ({"properties": {"a": 5}}, "an object or a boolean"),
        ({"properties": ["a"]}, "schema is invalid"),
        ({"$ref": "#"}, "schema is invalid"),
        ({"type": "array"}, "not an object"),
    ],
)
def test_schemas_that_cannot_be_followed_are_refused(
    encoder: TextEncoder, parameters: dict[str, Any], reason: str
) -> None:
    one = {"type": "function", "function": {"name": "act", "parameters": parameters}}
    with pytest.raises(BadRequest, match=reason):
        forced(encoder, one)


def test_alternatives_that_multiply_are_refused() -> None:
    chain = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}
    document = {"$defs": {**chain, "a40": {"type": "string"}}}
    with pytest.raises(ValueError, match="alternatives"):
        forms({"$ref": "#/$defs/a0"}, document)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("<function=act><parameter=a>5</parameter><parameter=b>x</parameter></function>", {"a": 5, "b": "x"}),
        (
            "\n<function=act>\n<parameter=b>\nx</parameter>\n<parameter=a>\n5\n</parameter>\n</function>\n",
            {"a": 5, "b": "x"},
        ),
        ("\n<function=act>\n<parameter=a>\n5.0\n</parameter>\n</function>\n", {"a": 5}),
        ("\n<function=act>\n<parameter=c>\nTrue\n</parameter>\n</function>\n", {"c": True}),
    ],
)
def test_answers_that_no_grammar_binds_are_read_as_before(
    encoder: TextEncoder, call: str, arguments: dict[str, Any]
) -> None:
    one = tool({"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "boolean"}})
    assert read(encoder, [one], f"<tool_call>{call}</tool_call>") == [arguments]


def test_a_number_beyond_floats_is_the_largest(encoder: TextEncoder) -> None:
    """JSON bounds no number, and infinity cannot be sent."""
    one = tool({"a": {"type": "number"}, "b": {"type": ["string", "number"]}})
    assert follows(encoder, forced(encoder, one), text_of({"a": "-1e999"}))
    text = text_of({"a": "-1e999", "b": "1e999"})
    assert read(encoder, [one], text) == [{"a": -sys.float_info.max, "b": sys.float_info.max}]


def test_another_format_is_an_entry_of_the_table(encoder: TextEncoder) -> None:
    minimax = XmlCalls(
        call='\n<invoke name="{}">\n',
        parameter='<parameter name="{}">',
        value_end="</parameter>",
        separator="\n",
        call_end="</invoke>\n",
        lenient=MINIMAX.parse,
    )
    glm = XmlCalls(
        call="{}\n",
        parameter="<arg_key>{}</arg_key>\n<arg_value>",
        value_end="</arg_value>",
        separator="\n",
        call_end="",
        lenient=GLM.parse,
    )
    markers = Markers.of(*MARKERS, token_table(encoder._tokenizer), encoder.vocabulary)
    for format, parser in ((minimax, "minimax_m2"), (glm, "glm47"), (OURS, "qwen3_coder")):
        assert format.parse_exactly(CALLS[parser], TOOLS) == [{"name": "weather", "arguments": WANTED}]
        for text in (
            forced_calls(format, markers, TOOLS, several=True),
            free_calls(format, markers, TOOLS, {"weather"}),
        ):
            constraint = encoder.constraint(Grammar(GrammarKind.LARK, text, "f"), Reasoning.CLOSED)
            assert follows(encoder, constraint, f"<tool_call>{CALLS[parser]}</tool_call>"), parser
            assert not follows(encoder, constraint, f"<tool_call>{CALLS[parser].replace('2', 'two')}</tool_call>")
