"""Tool calls with parameters between tags, parsed leniently regarding white space, and with types taken from the schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from service.models.grammar_schemas import without_nulls
from service.models.parameter_schemas import parameter_schema, parameters_of, read_value

ALIASES: Mapping[str, Sequence[str]] = {
    "string": ("str", "text", "varchar", "char", "enum"),
    "integer": ("int", "long", "short", "uint"),
    "number": ("float", "double", "num", "decimal"),
    "boolean": ("bool",),
    "array": ("list", "arr", "tuple"),
    "object": ("dict", "map"),
}
"""Types outside JSON schema that occur in tool descriptions."""
WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
"""Lower-case words that models write for JSON's literals."""


@dataclass(frozen=True)
class TaggedCalls:
    """A tool call format. head: the text before the parameters, with the group `name`. parameter: one parameter, with the
    groups `key` and `value`. tail: the text after them. value: strips what the format writes around a parameter's text. known:
    the name alone does not identify a call, so it must be a tool's."""

    head: re.Pattern[str]
    parameter: re.Pattern[str]
    tail: re.Pattern[str]
    value: Callable[[str], str] = str.strip
    known: bool = False

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The calls in the text between two markers. Raises ValueError if it contains anything else."""
        calls: list[dict[str, Any]] = []
        at = 0
        while not calls or text[at:].strip():
            call, at = self._call(text, at, tools)
            calls.append(call)
        return calls

    def _call(self, text: str, at: int, tools: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], int]:
        head = self.head.match(text, at)
        if head is None:
            raise ValueError("no call")
        name, at = head["name"].strip().strip("\"'"), head.end()
        document = parameters_by_name(tools, name)
        if document is None and self.known:
            raise ValueError("no tool has this name")
        if self.known and text.startswith("{", at + len(text[at:]) - len(text[at:].lstrip())):
            return {"name": name, "arguments": json.loads(text[at:])}, len(text)
        arguments: dict[str, Any] = {}
        while (found := self.parameter.match(text, at)) is not None:
            key = found["key"].strip().strip("\"'")
            if key in arguments:
                raise ValueError("a parameter is given twice")
            arguments[key] = read_loosely(self.value(found["value"]), key, document)
            at = found.end()
        tail = self.tail.match(text, at)
        if tail is None:
            raise ValueError("the call does not end")
        return {"name": name, "arguments": arguments}, tail.end()


def parameters_by_name(tools: Any, name: str) -> object:
    """The schema of a tool's parameters; None: there is no such tool."""
    functions = (tool["function"] for tool in tools or ())
    return next((without_nulls(each.get("parameters") or {}) for each in functions if each["name"] == name), None)


def read_loosely(text: str, key: str, document: object) -> Any:
    """The value of a parameter by its schema, even if it is not written as JSON. Raises ValueError if it is no value that the
    schema allows."""
    try:
        schema = parameter_schema(parameters_of(document), key) if document else True
    except (ValueError, TypeError, AttributeError):
        schema = True
    schema = _with_known_type(schema)
    word = WORDS.get(text.strip().lower(), text.strip())
    for written in (text, word, _whole(word)):
        try:
            return read_value(written, schema, document)
        except (ValueError, TypeError, AttributeError) as error:
            refusal = error
    if not _can_be_read(schema, document):
        return read_value(text, True, document)
    raise ValueError("a value of the wrong type") from refusal


def _with_known_type(schema: object) -> object:
    if not isinstance(schema, Mapping):
        return schema
    found = cast("Mapping[str, Any]", schema)
    kind = found.get("type")
    if not isinstance(kind, str):
        return found
    known = next((name for name, others in ALIASES.items() if kind.lower() in others), None)
    return {**found, "type": known} if known is not None else found


def _can_be_read(schema: object, document: object) -> bool:
    """Whether a schema is valid; its references may be unresolvable."""
    try:
        read_value("", {"anyOf": [schema, {"type": "string"}]}, document)
    except (ValueError, TypeError, AttributeError):
        return False
    return True


def _whole(text: str) -> str:
    """A number without a zero fraction, which integers of JSON schema may have."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return str(int(value)) if isinstance(value, float) and value.is_integer() else text


def _between_lines(text: str) -> str:
    """Without the line breaks that the format writes around a value."""
    return text.removeprefix("\n").removesuffix("\n")


def _cdata(text: str) -> str:
    found = re.fullmatch(r"\s*<!\[CDATA\[(.*?)\]\]>\s*", text, re.DOTALL)
    return found[1] if found is not None else text.strip()


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)


QWEN = TaggedCalls(
    head=_pattern(r"\s*<function\s*=\s*(?P<name>[^<>\n]+?)\s*>"),
    parameter=_pattern(r"\s*<parameter\s*=\s*(?P<key>[^<>\n]+?)\s*>(?P<value>.*?)</parameter>"),
    tail=_pattern(r"\s*</function>"),
    value=_between_lines,
)
GLM = TaggedCalls(
    head=_pattern(r"\s*(?P<name>[\w.:/-]+)"),
    parameter=_pattern(r"(?:\\n|\s)*<arg_key>(?P<key>.*?)</arg_key>(?:\\n|\s)*<arg_value>(?P<value>.*?)</arg_value>"),
    tail=_pattern(r"\s*\Z"),
    known=True,
)
LONGCAT = TaggedCalls(
    head=GLM.head,
    parameter=_pattern(GLM.parameter.pattern.replace("arg_", "longcat_arg_")),
    tail=GLM.tail,
    known=True,
)
MINIMAX = TaggedCalls(
    head=_pattern(r"\s*<invoke\s+name\s*=\s*(?P<name>[^<>]+?)\s*>"),
    parameter=_pattern(r"\s*<parameter\s+name\s*=\s*(?P<key>[^<>]+?)\s*>(?P<value>.*?)</parameter>"),
    tail=_pattern(r"\s*</invoke>"),
)
MINICPM = TaggedCalls(
    head=_pattern(r"\s*(?P<name>\"[^\"\n]*\"|'[^'\n]*'|[^\s\"'<>]+)\s*>"),
    parameter=_pattern(r"\s*<param\s+name\s*=\s*(?P<key>[^<>]+?)\s*>(?P<value>.*?)</param>"),
    tail=_pattern(r"\s*\Z"),
    value=_cdata,
)
ATEM = TaggedCalls(
    head=_pattern(r"\s*<atem:invoke\b[^<>]*?\bname=(?P<name>\"[^\"\n]+\")\s*>"),
    parameter=_pattern(
        r"\s*<atem:parameter\b[^<>]*?\bname=(?P<key>\"[^\"\n]+\")[^<>]*?>(?P<value>.*?)</atem:parameter>"
    ),
    tail=_pattern(r"\s*</atem:invoke>"),
)
TAGGED: Mapping[str, TaggedCalls] = {
    "glm47": GLM,
    "laguna": GLM,
    "longcat": LONGCAT,
    "minimax_m2": MINIMAX,
    "minicpm5": MINICPM,
    "muse_spark": ATEM,
}
"""By mlx-lm's parser of the format."""
