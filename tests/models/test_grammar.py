"""Grammars compiled for a tokenizer: which tokens may follow, what is forced, what is refused."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from service.core import BadRequest, Grammar, GrammarKind, LibraryPanic
from service.models import grammar as grammar_module
from service.models.calls import JsonCalls, Markers, forced_calls, free_calls
from service.models.grammar import MAX_CHARS, Grammars, TokenConstraint
from service.models.text import TextEncoder
from service.models.tokens import token_table
from tests.support.panicking import panic, panicking_tokenizer

MakeModel = Callable[..., Path]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def json_grammar(schema: dict[str, Any]) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), "response_format")


def choice_grammar(choices: list[str]) -> Grammar:
    return Grammar(GrammarKind.CHOICE, json.dumps(choices), "structured_outputs.choice")


def regex_grammar(regex: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, regex, "structured_outputs.regex")


def lark_grammar(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text, "structured_outputs.grammar")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    from tests.support.tiny_server import write_pair

    return TextEncoder(load_tokenizer(write_pair(tmp_path_factory.mktemp("pair"))[0]))


@pytest.fixture(scope="module")
def grammars(encoder: TextEncoder) -> Grammars:
    tokenizer = encoder._tokenizer
    return Grammars(tokenizer, encoder.vocabulary, tokenizer.eos_token_ids)


def allowed(mask: bytes, encoder: TextEncoder) -> set[bytes]:
    return {encoder.token_bytes(token) for token in range(encoder.vocabulary) if mask[token >> 3] >> (token & 7) & 1}


def follow(constraint: TokenConstraint, tokens: Sequence[int]) -> bool:
    """Whether these tokens are allowed one after the other."""
    return len(constraint.masks(tokens)) == len(tokens) + 1


def test_masks_follow_the_grammar_and_leave_no_trace(encoder: TextEncoder, grammars: Grammars) -> None:
    constraint = grammars.constraint(json_grammar(PERSON))
    text = encoder.encode_text('{"name": "é", "age": 5}')
    masks = constraint.masks(text)
    assert len(masks) == len(text) + 1
    assert allowed(masks[0], encoder) == {b"{"}
    assert allowed(masks[-1], encoder) == {b"</s>"}
    assert constraint.masks(text) == masks
    (end,) = encoder._tokenizer.eos_token_ids
    assert constraint.masks([*text, end, text[0]]) == masks
    assert len(constraint.masks(encoder.encode_text('{"other"'))) == 3
    constraint.advance(text[:5])
    assert constraint.masks(text[5:]) == masks[5:]
    assert constraint.copy().masks(text) == masks


def test_what_must_come_is_forced(encoder: TextEncoder, grammars: Grammars) -> None:
    constraint = grammars.constraint(json_grammar(PERSON))
    assert constraint.forced(100) == list(encoder.encode_text('{"name": "'))
    assert constraint.forced(3) == list(encoder.encode_text('{"n'))
    constraint.advance(encoder.encode_text('{"name": "x'))
    assert constraint.forced(100) == []
    constraint.advance(encoder.encode_text('"'))
    assert constraint.forced(100) == list(encoder.encode_text(', "age": '))


def test_reasoning_before_it_is_free(encoder: TextEncoder, grammars: Grammars) -> None:
    end = encoder.encode_text("</think>")
    constraint = grammars.constraint(choice_grammar(["yes", "no"]), closing=end)
    free = constraint.masks(())[0]
    assert len(allowed(free, encoder)) == encoder.vocabulary - 1 and constraint.forced(9) == []
    assert b"</s>" not in allowed(free, encoder)
    tokens = encoder.encode_text("hm </think>yes")
    masks = constraint.masks(tokens)
    assert len(masks) == len(tokens) + 1 and masks[len(tokens) - 4] == free
    assert allowed(masks[len(tokens) - 3], encoder) == {b"y", b"n"}
    assert constraint.masks(()) == [free]
    constraint.advance(tokens[:-2])
    assert allowed(constraint.masks(())[0], encoder) == {b"e"}
    assert constraint.forced(9) == list(encoder.encode_text("es"))


def test_reasoning_may_begin_first(encoder: TextEncoder, grammars: Grammars) -> None:
    opening, end = 5, encoder.encode_text("</think>")
    constraint = grammars.constraint(choice_grammar(["yes", "no"]), opening, end)
    start = allowed(constraint.masks(())[0], encoder)
    assert start == {b"y", b"n", encoder.token_bytes(opening)} and constraint.forced(9) == []
    thinking = [opening, *encoder.encode_text("hm</think>no")]
    assert follow(constraint, thinking) and follow(constraint, encoder.encode_text("yes"))
    assert allowed(constraint.masks(())[0], encoder) == start
    constraint.advance(encoder.encode_text("y"))
    assert allowed(constraint.masks(())[0], encoder) == {b"e"}


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (regex_grammar("[0-9]{3}-[a-f]+"), "123-abc", "12-"),
        (choice_grammar(["red", 'say "blue"', "grün\n"]), 'say "blue"', "blue"),
        (lark_grammar('start: "a" NUMBER\nNUMBER: /[0-9]+/'), "a42", "b"),
        (json_grammar({"type": "object"}), '{"a": [1, null, "x"]}', "[1]"),
        (json_grammar({"enum": ["é", 3]}), '"é"', '"e"'),
    ],
)
def test_every_kind_of_grammar(encoder: TextEncoder, grammars: Grammars, wanted: Grammar, good: str, bad: str) -> None:
    assert follow(grammars.constraint(wanted), encoder.encode_text(good))
    assert not follow(grammars.constraint(wanted), encoder.encode_text(bad))


@pytest.mark.parametrize("seed", range(20))
def test_random_walks_end_in_valid_json(encoder: TextEncoder, grammars: Grammars, seed: int) -> None:
    rng = random.Random(seed)
    constraint = grammars.constraint(json_grammar(PERSON))
    output: list[int] = []
    while len(output) < 400:
        mask = constraint.masks(())[0]
        choices = [token for token in range(encoder.vocabulary) if mask[token >> 3] >> (token & 7) & 1]
        closing = [token for token in choices if encoder.token_bytes(token) in (b'"', b"}", b"</s>")]
        token = rng.choice(closing if closing and rng.random() < 0.3 else choices)
        if encoder.token_bytes(token) == b"</s>":
            break
        output.append(token)
        constraint.advance([token])
    value = json.loads(b"".join(map(encoder.token_bytes, output)))
    assert sorted(value) == ["age", "name"] and isinstance(value["age"], int)
    assert not constraint.failed


def nested(depth: int) -> dict[str, Any]:
    return (
        {"type": "object", "properties": {f"p{i}": nested(depth - 1) for i in range(4)}}
        if depth
        else {"type": "string"}
    )


HOSTILE: dict[str, Callable[[], Grammar]] = {
    "too long": lambda: json_grammar({"type": "string", "pattern": "a" * MAX_CHARS}),
    "one megabyte": lambda: json_grammar({"enum": [f"value {i}" for i in range(80_000)]}),
    "exponential regex": lambda: regex_grammar("(a|aa|aaa){1000}" * 20),
    "no regex": lambda: regex_grammar("(unclosed"),
    "no grammar": lambda: lark_grammar("start: undefined_rule"),
    "remote reference": lambda: json_grammar({"$ref": "http://example.com/a"}),
    "overlapping patterns apart": lambda: json_grammar(
        {"allOf": [{"type": "object", "patternProperties": {name: {"type": "string"}}} for name in ("^a", "^ab")]}
    ),
    "recursive without end": lambda: json_grammar({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "impossible": lambda: json_grammar({"type": "string", "enum": [5]}),
    "no schema": lambda: json_grammar({"type": "nothing"}),
    "a million states": lambda: json_grammar({"type": "integer", "multipleOf": 1_000_003}),
    "the same in Lark": lambda: lark_grammar('start: %json {"type": "integer", "multi\\u0070leOf": 1000003}'),
    "many multiples": lambda: json_grammar(
        {"enum": [], "properties": {str(i): {"multipleOf": 999} for i in range(99)}}
    ),
    "a chain of alternatives": lambda: json_grammar(chain(1500, lambda link: {"anyOf": [link, {"type": "null"}]})),
}


def chain(links: int, wrapped: Callable[[object], object]) -> dict[str, object]:
    """A schema in which so many definitions refer to the next one each."""
    definitions = {f"a{i}": wrapped({"$ref": f"#/$defs/a{i + 1}"}) for i in range(links)}
    return {"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{links}": {"type": "integer"}}}


@pytest.mark.parametrize(
    "grammar",
    [
        lambda: json_grammar(chain(1700, lambda link: {"type": "object", "properties": {"a": link}})),
        lambda: json_grammar(chain(3500, lambda link: link)),
        lambda: lark_grammar("\n".join(["start: a0", *(f'a{i}: a{i + 1} "x"' for i in range(5000)), 'a5000: "y"'])),
    ],
    ids=["properties", "references", "rules"],
)
def test_long_chains_of_references_do_not_overflow_the_stack(
    grammars: Grammars, grammar: Callable[[], Grammar]
) -> None:
    constraint = grammars.constraint(grammar())
    assert any(constraint.copy().masks(())[0])


def test_what_is_compiled_is_had_while_others_compile(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars.constraint(choice_grammar(["warm"]))
    going, compile_ = threading.Event(), grammar_module._compile  # pyright: ignore[reportPrivateUsage]

    def slow(*given: Any) -> Any:
        going.wait(60)
        return compile_(*given)

    monkeypatch.setattr(grammar_module, "_compile", slow)
    monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", 0.2)
    for text in ("one", "two", "three"):
        with pytest.raises(BadRequest, match="cannot be compiled"):
            grammars.constraint(choice_grammar([text]))
    assert any(grammars.constraint(choice_grammar(["warm"])).masks(())[0])
    going.set()
    monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", 60.0)
    assert any(grammars.constraint(choice_grammar(["three"])).masks(())[0])


def test_what_takes_too_long_gives_its_place_to_others(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as may go on where nobody waits for them; then nothing new is compiled until one of them has ended."""
    going, compile_ = threading.Event(), grammar_module._compile  # pyright: ignore[reportPrivateUsage]

    def endless(tokenizer: Any, grammar: str, field: str) -> Any:
        if "endless" in grammar:
            going.wait(60)
        return compile_(tokenizer, grammar, field)

    monkeypatch.setattr(grammar_module, "_compile", endless)
    for number in range(grammar_module.MAX_ABANDONED):
        monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", 0.05)
        with pytest.raises(BadRequest, match="cannot be compiled within"):
            grammars.constraint(choice_grammar([f"endless {number}"]))
        if number < grammar_module.MAX_ABANDONED - 1:
            monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", 60.0)
            assert any(grammars.constraint(choice_grammar([f"quick {number}"])).masks(())[0])
    monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", 60.0)
    with pytest.raises(BadRequest, match="other grammars take too long"):
        grammars.constraint(choice_grammar(["one too many"]))
    going.set()
    end = time.monotonic() + 30
    while grammars._abandoned and time.monotonic() < end:
        time.sleep(0.01)
    assert any(grammars.constraint(choice_grammar(["one too many"])).masks(())[0])
    for _ in range(grammar_module.COMPILING):
        assert grammars._compiling.acquire(blocking=False)
    assert not grammars._compiling.acquire(blocking=False)
    grammars._compiling.release(grammar_module.COMPILING)


UNENFORCED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"type": "string", "format": "password"}, ()),
    ({"type": "string", "format": "no such format", "contentMediaType": "image/png"}, ()),
    ({"type": "array", "uniqueItems": True}, ("uniqueItems",)),
    ({"type": "array", "uniqueItems": False}, ()),
    ({"type": "array", "contains": {"type": "string"}, "minContains": 1}, ("contains", "minContains")),
    ({"type": "object", "properties": {"uniqueItems": {"not": {"type": "string"}}}}, ("not",)),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, ("propertyNames",)),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, ("dependentRequired",)),
    ({"type": "object", "unevaluatedProperties": False}, ("unevaluatedProperties",)),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, ("if", "then")),
    ({"type": "object", "properties": {"a": {}}, "maxProperties": 3}, ("maxProperties",)),
    ({"type": "string", "pattern": "^(?!-)a", "minLength": 1}, ("pattern",)),
    ({"type": "string", "pattern": r"\bword\b"}, ("pattern",)),
    ({"type": "string", "pattern": r"(a|b)\1", "not": {"const": "aa"}}, ("not", "pattern")),
    ({"type": "object", "patternProperties": {"^(?!x)": {"type": "string"}}}, ("patternProperties",)),
    ({"type": "object", "properties": {"pattern": {"const": {"pattern": "(?=a)"}}}}, ()),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ("oneOf",)),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ()),
    (PERSON, ()),
]


@pytest.mark.parametrize(("schema", "names"), UNENFORCED, ids=[json.dumps(schema) for schema, _ in UNENFORCED])
def test_what_is_not_enforced_is_named(grammars: Grammars, schema: dict[str, Any], names: tuple[str, ...]) -> None:
    """By itself, deep in another schema, and in the arguments of a tool."""
    assert grammars.constraint(json_grammar(schema)).unenforced == names
    deep = {"type": "object", "properties": {"a": {"type": "array", "items": {"anyOf": [schema, {"type": "null"}]}}}}
    constraint = grammars.constraint(json_grammar(deep))
    assert constraint.unenforced == names == constraint.copy().unenforced
    lark = f'start: "letters of no schema: %json {{ " %json {json.dumps({**schema, "x-guidance": grammar_module.JSON_STYLE})}'
    assert grammars.constraint(lark_grammar(lark)).unenforced == names


def test_what_else_a_schema_says_holds_without_its_pattern(encoder: TextEncoder, grammars: Grammars) -> None:
    patterns = {"^(?!x)": {"type": "string"}, "^y": {"type": "integer"}}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^(?=b)", "maxLength": 3}},
        "patternProperties": {"^b": {"type": "object", "patternProperties": patterns, "additionalProperties": False}},
        "additionalProperties": False,
    }
    constraint = grammars.constraint(json_grammar(schema))
    assert constraint.unenforced == ("pattern", "patternProperties")
    for text in ('{"a": "xyz"}', '{"b": {"c": "d", "y": 5}}'):
        assert follow(constraint, encoder.encode_text(text)), text
    for text in ('{"a": "wxyz"', '{"c"', '{"b": {"c": 5', '{"b": {"y": "d"'):
        assert not follow(constraint, encoder.encode_text(text)), text


NULLS: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "object", "properties": None, "required": None}, '{"a": 5}', "["),
    (
        {"type": "object", "properties": {"a": {"type": "string", "enum": None, "pattern": None}}},
        '{"a": "b"}',
        '{"a": 5',
    ),
    ({"type": "array", "items": None, "maxItems": None}, "[5]", "{"),
    ({"enum": [None, {"required": None}], "title": None, "items": None}, '{"required": null}', "{}"),
    ({"properties": {"default": {"type": "string", "pattern": None}}}, '{"default": "a"}', '{"default": 5'),
    ({"const": None, "format": None, "type": None}, "null", '"'),
    ({"type": "string", "$schema": "https://json-schema.org/draft-07/schema#"}, '"a"', "5"),
    ({"type": "string", "$schema": "http://json-schema.org/schema#"}, '"a"', "5"),
    ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, '"ab"', '"a"'),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2.0}, "[1, 2]", "[1]"),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), NULLS, ids=[json.dumps(schema) for schema, _, _ in NULLS])
def test_schemas_are_read_as_other_programs_write_them(
    encoder: TextEncoder, grammars: Grammars, schema: dict[str, Any], valid: str, invalid: str
) -> None:
    for wanted in (json_grammar(schema), lark_grammar(f"start: %json {json.dumps(schema)}")):
        constraint = grammars.constraint(wanted)
        assert follow(constraint, encoder.encode_text(valid))
        assert not follow(constraint, encoder.encode_text(invalid))
        assert constraint.unenforced == ()


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "string", "pattern": "[a"}, "regex parse error: unclosed character class"),
        ({"type": "string", "pattern": "a{3,2}"}, "invalid repetition count range"),
        ({"type": "nothing"}, "Invalid type: nothing"),
    ],
)
def test_the_reason_is_whole_where_nothing_compiles(grammars: Grammars, schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(reason)):
        grammars.constraint(json_grammar(schema))


A_STRING, SHORT, AN_INTEGER = {"type": "string"}, {"type": "string", "maxLength": 3}, {"type": "integer"}


@pytest.mark.parametrize(
    ("patterns", "valid", "invalid"),
    [
        ({"^a": A_STRING, "b$": A_STRING}, ['{"ab": "x", "a": "y", "b": "z"}'], ['{"ab": 1', '{"c"']),
        ({"^a": A_STRING, "b$": SHORT}, ['{"ab": "xyz"}'], ['{"ab": "wxyz"', '{"b": "wxyz"', '{"ab": 1']),
        ({"^a": A_STRING, "b$": SHORT, "^.b": SHORT}, ['{"abb": "xyz"}'], ['{"abb": "wxyz"', '{"ab": 1']),
        ({"^a": A_STRING, "^ab": A_STRING, "^c": AN_INTEGER}, ['{"abc": "x", "c": 5}'], ['{"c": "x"', '{"a": 5']),
    ],
)
def test_overlapping_patterns_of_names(
    encoder: TextEncoder, grammars: Grammars, patterns: dict[str, Any], valid: list[str], invalid: list[str]
) -> None:
    schema = {"type": "object", "patternProperties": patterns, "additionalProperties": False}
    constraint = grammars.constraint(json_grammar(schema))
    for text in valid:
        assert follow(constraint, encoder.encode_text(text)), text
    for text in invalid:
        assert not follow(constraint, encoder.encode_text(text)), text
    lark = f"start: %json {json.dumps({**schema, 'x-guidance': grammar_module.JSON_STYLE})}"
    assert follow(grammars.constraint(lark_grammar(lark)), encoder.encode_text(valid[0]))


@pytest.mark.parametrize("count", [600, 5000])
def test_choices_by_the_thousand(encoder: TextEncoder, grammars: Grammars, count: int) -> None:
    words = [f"choice {i * 7919 % 100_003} \u00e9" for i in range(count)]
    (end,) = encoder._tokenizer.eos_token_ids
    for constraint, quote in (
        (grammars.constraint(choice_grammar(words)), ""),
        (grammars.constraint(json_grammar({"enum": words})), '"'),
    ):
        tokens = encoder.encode_text(f"{quote}{words[-1]}{quote}")
        assert follow(constraint, tokens) and constraint.masks(tokens)[-1][end >> 3] >> (end & 7) & 1
        assert not follow(constraint, encoder.encode_text(f"{quote}choice x"))


@pytest.mark.parametrize("choices", [["a", "ab", "b"], ["", "a"], [""], ["q", "q"], ['"', "\\", "\n/"]])
def test_choices_of_every_kind(encoder: TextEncoder, grammars: Grammars, choices: list[str]) -> None:
    constraint = grammars.constraint(choice_grammar(choices))
    (end,) = encoder._tokenizer.eos_token_ids
    for choice in choices:
        tokens = encoder.encode_text(choice)
        assert follow(constraint, tokens) and constraint.masks(tokens)[-1][end >> 3] >> (end & 7) & 1, choice
    assert not follow(constraint, encoder.encode_text("c"))


def test_a_thread_that_cannot_start_takes_no_place_for_ever(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", 60.0)
    with monkeypatch.context() as failing:
        failing.setattr(threading.Thread, "start", fail)
        for _ in range(grammar_module.COMPILING):
            with pytest.raises(RuntimeError):
                grammars.constraint(choice_grammar(["a"]))
    assert grammars._compiling.acquire(blocking=False)
    grammars._compiling.release()
    assert any(grammars.constraint(choice_grammar(["a"])).masks(())[0])


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_compiled_is_refused_within_a_second(grammars: Grammars, name: str) -> None:
    grammars.constraint(choice_grammar(["warm"]))
    started = time.monotonic()
    with pytest.raises(BadRequest, match=r"compiled|longer than"):
        grammars.constraint(HOSTILE[name]())
    assert time.monotonic() - started < 1.0


def test_a_limit_met_by_a_proposal_alone_leaves_the_answer_as_it_was(
    encoder: TextEncoder, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = grammars.constraint(choice_grammar(["abcdef"]))
    constraint.advance(encoder.encode_text("a"))
    before = constraint.masks(())
    monkeypatch.setattr(constraint, "_matcher", Failing(constraint._matcher, 3))
    assert len(constraint.masks(encoder.encode_text("bcde"))) < 5
    assert not constraint.failed
    assert constraint.masks(()) == before and follow(constraint, encoder.encode_text("bcdef"))


class Failing:
    """A matcher that meets a limit after so many tokens."""

    def __init__(self, matcher: Any, count: int) -> None:
        self._matcher, self._left = matcher, count

    def consume_token(self, token: int) -> bool:
        self._left -= 1
        return self._matcher.consume_token(token)

    def is_error(self) -> bool:
        return self._left <= 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


def test_what_is_too_much_on_the_way_ends_the_answer_and_holds_nobody_up(
    encoder: TextEncoder, grammars: Grammars
) -> None:
    constraint = grammars.constraint(json_grammar({"type": "string", "pattern": "^(([a-z]{1,999}){1,999}){1,999}$"}))
    rng = random.Random(0)
    longest = 0.0
    for _ in range(200):
        started = time.monotonic()
        mask = constraint.masks(())[0]
        longest = max(longest, time.monotonic() - started)
        if constraint.failed:
            break
        constraint.advance([rng.choice([t for t in range(encoder.vocabulary) if mask[t >> 3] >> (t & 7) & 1])])
    assert longest < 0.1
    assert not constraint.failed or allowed(constraint.masks(())[0], encoder) == {b"</s>"}


def test_grammars_stay_compiled(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = json_grammar(nested(2))
    grammars.constraint(schema)
    monkeypatch.setattr(grammar_module, "_compile", None)
    grammars.constraint(schema)


def test_forced_calls_follow_schemas_with_references(encoder: TextEncoder, grammars: Grammars) -> None:
    item = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    order = {
        "$defs": {"Item": item},
        "type": "object",
        "properties": {"item": {"$ref": "#/$defs/Item"}},
        "required": ["item"],
    }
    tools = [{"function": {"name": "order", "parameters": order}}, {"function": {"name": "now"}}]
    first = '<call>\n{"name": "order", "arguments": {"item": {"n": 3}}}\n</call>'
    second = '<call>\n{"name": "now", "arguments": {}}\n</call>'
    markers = Markers("<call>", "</call>", ('"<call>"',), ('"</call>"',))
    for several, otherwise in ((False, None), (True, None), (True, json_grammar(item))):
        text = forced_calls(JsonCalls(), markers, tools, several=several, otherwise=otherwise)
        constraint = grammars.constraint(lark_grammar(text))
        assert follow(constraint, encoder.encode_text(first)) and follow(constraint, encoder.encode_text(second))
        assert follow(constraint, encoder.encode_text(f"{first}\n{second}")) == several
        assert follow(constraint, encoder.encode_text('{"n": 4}')) == (otherwise is not None)
    with pytest.raises(BadRequest, match="tool_choice"):
        forced_calls(JsonCalls(), markers, tools, several=True, otherwise=regex_grammar("a"))


@pytest.mark.parametrize("special", [False, True], ids=["a text", "a special token"])
def test_arguments_of_strict_tools_are_valid_wherever_a_call_begins(make_model: MakeModel, special: bool) -> None:
    name = "target" if not special else "marked"
    ends = ("</s>", "<s>", *(("<call>", "</call>") if special else ()))
    tokenizer = load_tokenizer(make_model(name, special=ends))
    encoder = TextEncoder(tokenizer)
    number = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    tools = [{"function": {"name": tool, "parameters": number}} for tool in ("strict", "loose")]
    markers = Markers.of("<call>", "</call>", token_table(tokenizer), encoder.vocabulary)
    text = free_calls(JsonCalls(), markers, tools, {"strict"})
    constraint = Grammars(tokenizer, encoder.vocabulary, tokenizer.eos_token_ids).constraint(lark_grammar(text))

    def call(tool: str, arguments: str) -> str:
        return f'<call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</call>'

    good, bad = call("strict", '{"n": 3}'), call("strict", '{"n": "3"}')
    for answer in (
        "",
        "no call, <cal or {",
        good,
        f"first {good} and {good} then",
        call("loose", '{"any": ["thing"]}'),
    ):
        tokens = encoder.encode_text(answer)
        assert follow(constraint, tokens), answer
        assert b"</s>" in allowed(constraint.masks(tokens)[-1], encoder), "it may end here"
    for answer in (
        bad,
        f"text {good} {bad}",
        call("other", "{}"),
        call("loose", "[]"),
        "a <call> of text",
        good[:-1] + "x",
    ):
        assert not follow(constraint, encoder.encode_text(answer)), answer
    cut = encoder.encode_text(good)[:-1]
    assert b"</s>" not in allowed(constraint.masks(cut)[-1], encoder), "not within a call"


def test_forced_text_that_makes_the_tokenizer_panic_is_not_proposed(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread asks for it."""
    constraint = grammars.constraint(choice_grammar(["abcdef"]))
    assert constraint.forced(9)
    monkeypatch.setattr(constraint, "_tokenizer", panicking_tokenizer())
    assert constraint.forced(9) == []
    assert any(constraint.masks(())[0])


def test_a_panic_while_a_grammar_compiles_is_an_error(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_(*given: Any) -> None:
        panic()

    monkeypatch.setattr(grammar_module, "_compile", compile_)
    with pytest.raises(LibraryPanic):
        grammars.constraint(choice_grammar(["never compiled before"]))
