"""Tool calls with parameters between tags: a grammar that generates them, and a parser for that format."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from service.core import BadRequest
from service.models.call_syntax import ToolParser
from service.models.grammar_schemas import without_nulls
from service.models.parameter_schemas import (
    ANNOTATIONS,
    Schema,
    forms,
    parameter_schema,
    parameters_of,
    read_value,
    self_contained,
    written,
)
from service.models.tagged_calls import parameters_by_name

NAME = re.compile(r"[^<>\"\s](?:[^<>\"\n]*[^<>\"\s])?")
"""Names that are possible in a tag."""
FIRST = {
    "null": "null",
    "boolean": "true|false",
    "integer": "-?[0-9]",
    "number": "-?[0-9]",
    "array": r"\[",
    "object": r"\{",
}
"""The beginning of JSON values by type, as a regex."""
COMBINING = frozenset({"allOf", "not", "if", "$dynamicRef"})
"""Keywords that may constrain a value of any type, and are not resolved."""
OBJECT_LIMITS = (
    COMBINING
    | {"anyOf", "oneOf", "patternProperties", "propertyNames", "minProperties", "maxProperties"}
    | {"dependentRequired", "dependentSchemas", "dependencies"}
)
"""Keywords that cannot be enforced when parameters are written one by one."""
STRING_LIMITS = frozenset({"pattern", "minLength", "maxLength"})
PATTERN_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""A regex's escapes, classes and other characters."""


@dataclass(frozen=True)
class XmlCalls:
    """A tool call format. The text between a call's markers is `call`, each parameter, then `call_end`. A parameter is
    `parameter`, its value, `value_end` and `separator`. `{}` stands for the name in `call` and in `parameter`.

    Strings are written unchanged, other values as JSON. If a schema allows strings and other types, a text that is JSON of one
    of the other types is parsed as that value.
    """

    call: str
    parameter: str
    value_end: str
    separator: str
    call_end: str
    lenient: ToolParser
    """A parser for answers that deviate from the format."""

    def rules(
        self, tools: Sequence[Mapping[str, Any]], style: Mapping[str, Any], end: str, bound: Collection[str]
    ) -> list[str]:
        """Lark rules `call_0`, `call_1` and so on: calls of these tools, without the surrounding markers.

        Parameters come in the order of the schema. Tools that are not in `bound` take any parameters. style: how JSON is
        written. end: the text of the marker after a call.

        Raises BadRequest for a tool whose parameters cannot be written so that they satisfy its schema.
        """
        forbidden = (end, self.value_end, self._next_parameter)
        rules = [
            "VALUE: /(?s:.*)/ & ~HOLDS_AN_END",
            f"HOLDS_AN_END: /(?s:.*)/ ({' | '.join(map(_literal, forbidden))}) /(?s:.*)/",
            f"free[lazy]: VALUE {_literal(self.value_end)}",
        ]
        for i, tool in enumerate(tools):
            function = tool["function"]
            name = function["name"]
            try:
                bare = {"additionalProperties": True}
                document = without_nulls(function.get("parameters") or {}) if name in bound else bare
                rules += _Call(self, f"call_{i}", name, document, style, forbidden).rules()
            except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
                reason = str(error) if isinstance(error, ValueError) else "their schema is invalid or nested too deeply"
                message = f"the parameters of {name} cannot be bound in this model's format for calls: {reason}"
                raise BadRequest(message, field="tools") from error
        return rules

    def parse(self, text: str, tools: Any) -> Any:
        """The calls in the text between two markers, as mlx-lm's parsers return them. Types are those of the tool's schema."""
        try:
            return self.parse_exactly(text, tools)
        except (ValueError, TypeError, AttributeError):
            return self.lenient(text, tools)

    def parse_exactly(self, text: str, tools: Any) -> list[dict[str, Any]]:
        """The calls in a text that is exactly in the format. Raises ValueError, and TypeError or AttributeError if a tool's
        schema is invalid."""
        calls: list[dict[str, Any]] = []
        at = 0
        while not calls or text[at:].strip():
            call, at = self._parsed(text, at, tools)
            calls.append(call)
        return calls

    def _parsed(self, text: str, at: int, tools: Any) -> tuple[dict[str, Any], int]:
        head = self._head.match(text, at)
        if head is None:
            raise ValueError("no call")
        name, at = head[1], head.end()
        document = parameters_by_name(tools, name) or {}
        schema = parameters_of(document)
        arguments: dict[str, Any] = {}
        while (found := self._parameter.match(text, at)) is not None:
            key, value = found.groups()
            if self._next_parameter in value:
                raise ValueError("a parameter does not end")
            arguments[key] = read_value(value, parameter_schema(schema, key), document)
            at = found.end()
        end = self._end.match(text, at)
        if end is None:
            raise ValueError("the call does not end")
        return {"name": name, "arguments": arguments}, end.end()

    @property
    def _next_parameter(self) -> str:
        """The text that ends a value even if a part of `value_end` is missing."""
        return self.value_end.strip() + self.separator + self.parameter.partition("{}")[0]

    @cached_property
    def _head(self) -> re.Pattern[str]:
        before, _, after = self.call.partition("{}")
        return re.compile(rf"\s*{re.escape(before.lstrip())}({NAME.pattern}?){re.escape(after)}")

    @cached_property
    def _end(self) -> re.Pattern[str]:
        return re.compile(rf"\s*{re.escape(self.call_end.strip())}")

    @cached_property
    def _parameter(self) -> re.Pattern[str]:
        before, _, after = self.parameter.partition("{}")
        parts = rf"{re.escape(before)}({NAME.pattern}?){re.escape(after)}(.*?){re.escape(self.value_end)}\s*"
        return re.compile(parts, re.DOTALL)


@dataclass(frozen=True)
class _Call:
    """The rules of one tool's call."""

    format: XmlCalls
    rule: str
    name: str
    document: object
    """The tool's `parameters`."""
    style: Mapping[str, Any]
    forbidden: Sequence[str]

    def rules(self) -> list[str]:
        schema = parameters_of(self.document)
        if limits := sorted(schema.keys() & OBJECT_LIMITS):
            raise ValueError(f"they have {limits[0]}")
        if "object" not in schema.get("type", "object"):
            raise ValueError("they are not an object")
        parts, rules = [_literal(self.format.call.replace("{}", _name(self.name)))], list[str]()
        properties: Schema = schema.get("properties") or {}
        required: list[str] = schema.get("required") or []
        for j, key in enumerate(dict.fromkeys([*properties, *required])):
            rule, needed = f"{self.rule}_{j}", key in required
            before = _literal(self.format.parameter.replace("{}", _name(key)))
            written = self._parameter_rules(rule, before, parameter_schema(schema, key))
            if not written and needed:
                raise ValueError(f"{key} is required, and no value of it is valid")
            if written:
                rules += written
                parts.append(rule if needed else f"{rule}?")
        # A schema that does not mention additional parameters allows them, but a model could only invent them.
        more = schema.get("additionalProperties", False)
        rule, (before, _, after) = f"{self.rule}_more", self.format.parameter.partition("{}")
        tag = f"{_literal(before)} {rule.upper()} {_literal(after)}"
        if written := self._parameter_rules(rule, tag, more):
            known = f" & ~({' | '.join(map(_literal, properties))})" if properties else ""
            rules += [f"{rule.upper()}: /{NAME.pattern}/{known}", *written]
            parts.append(f"{rule}*")
        if self.format.call_end:
            parts.append(_literal(self.format.call_end))
        return [f"{self.rule}: {' '.join(parts)}", *rules]

    def _parameter_rules(self, rule: str, tag: str, schema: object) -> list[str]:
        """Rules of a parameter after its tag, as Lark; empty if no value is valid."""
        values = self._value_rules(rule, schema)
        separator = f" {_literal(self.format.separator)}" if self.format.separator else ""
        return [f"{rule}: {tag} {rule}_value{separator}", *values] if values else []

    def _value_rules(self, rule: str, schema: object) -> list[str]:
        """Rules of a value followed by its end tag.

        A text and its end tag are one lexeme, because llguidance's lexer takes the longest match and does not backtrack.
        """
        end, found = _literal(self.format.value_end), forms(schema, self.document)
        values = [value for form in found for value in form.get("enum", ())]
        strings = [form for form in found if "enum" not in form and form["type"] == "string"]
        others = [form for form in found if "enum" not in form and form["type"] != "string"]
        if not strings and not any(isinstance(value, str) for value in values):
            if not values and not others:
                return []
            return [f"{rule}_value: {rule}_json {end}", f"{rule}_json: %json {self._json(schema)}"]
        for form in found:
            if (limits := sorted(form.keys() & COMBINING)) and ("enum" in form or form["type"] == "string"):
                raise ValueError(f"a string has {limits[0]}")
        texts = dict.fromkeys(map(written, values))
        options = [
            _literal(text + self.format.value_end) for text in texts if not any(f in text for f in self.forbidden)
        ]
        bound = [form for form in others if form.keys() - ANNOTATIONS - STRING_LIMITS - {"type"}]
        # Texts that could begin JSON of a bound schema are left to that schema.
        json_first = "|".join(dict.fromkeys(FIRST[form["type"]] for form in bound))
        without_json = [f"~/({json_first})(?s:.*)/"] if json_first else []
        rules: list[str] = []
        for k, form in enumerate(strings):
            text = " & ".join(["VALUE", *without_json, *_string_limits(form)])
            if text == "VALUE":
                options.append("free")
                continue
            terminal = f"{rule.upper()}_{k}"
            rules += [f"{terminal}: {text}", f"{rule}_text_{k}[lazy]: {terminal} {end}"]
            options.append(f"{rule}_text_{k}")
        # A free text may be the JSON of an unbounded form.
        as_json = bound if any(not _string_limits(form) for form in strings) else others
        if as_json:
            options.append(f"{rule}_json {end}")
            rules.append(f"{rule}_json: %json {self._json({'anyOf': as_json})}")
        if not options:
            raise ValueError("a string has an end tag in each of its values")
        return [f"{rule}_value: {' | '.join(options)}", *rules]

    def _json(self, schema: object) -> str:
        whole = self_contained(schema, self.document) | {"x-guidance": self.style}
        return json.dumps(whole)


def _name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot be a name in a tag")
    return name


def _literal(text: str) -> str:
    """A text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def _string_limits(form: Schema) -> list[str]:
    """Lark terminals for the constraints of a string's schema."""
    limits: list[str] = []
    if "pattern" in form:
        limits.append(f"({' | '.join(f'/{each}/' for each in _searched(form['pattern']))})")
    if "minLength" in form or "maxLength" in form:
        longest = int(form["maxLength"]) if "maxLength" in form else ""
        limits.append(f"/(?s:.){{{int(form.get('minLength', 0))},{longest}}}/")
    return limits


def _searched(pattern: str) -> Iterator[str]:
    """Regexes for whole texts; one of them matches where the pattern is found in a text."""
    alternatives, depth = [list[str]()], 0
    for part in PATTERN_PARTS.findall(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            alternatives.append([])
        elif part == "\\":
            raise ValueError("a pattern ends with a backslash")
        else:
            alternatives[-1].append(part)
    for parts in alternatives:
        first, last = parts[:1] == ["^"], parts[-1:] == ["$"]
        inner = "".join(map(_in_slashes, parts[first : len(parts) - last]))
        yield f"{'' if first else '(?s:.*)'}(?:{inner}){'' if last else '(?s:.*)'}"


def _in_slashes(part: str) -> str:
    """A part of a regex as it stands between slashes in Lark."""
    return re.sub(r"(\\.)|/|\n", lambda found: found[1] or ("\\/" if found[0] == "/" else "\\n"), part, flags=re.DOTALL)
