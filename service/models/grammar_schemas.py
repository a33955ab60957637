"""JSON schemas within llguidance grammars: what llguidance does not enforce, and rewrites that it can compile."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

_IN_LARK = re.compile(r"%json\s*")
_UNKNOWN = re.compile(r"Unimplemented keys: (\[.*\])")
_OVERLAP = re.compile(r"patternProperty regexes /(.*)/ are not disjoint", re.DOTALL)
_COUNTS = ("minProperties", "maxProperties")
_DIALECT = re.compile(r"http://json-schema\.org/draft-0\d/schema#?|https://json-schema\.org/draft/20\d\d-\d\d/schema#?")
_LOOKS_AROUND = re.compile(r"look-?around|backreference")
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values map names to schemas; the names are not keywords."""
_VALUES = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are not schemas."""
_INTEGERS = frozenset({"minLength", "maxLength", "minItems", "maxItems", *_COUNTS})
_MAY_BE_NULL = frozenset({"const", "default"})
MAX_MERGES = 64
"""Maximum pairs of overlapping patterns of one grammar that are merged."""
MAX_PATTERNS = 64
"""Maximum different patterns of one grammar that are tried individually."""


def all_schemas(grammar: str) -> Iterator[Mapping[str, Any]]:
    """Every JSON object in the schemas of a grammar, which is JSON, or Lark with JSON in it."""
    left: list[object] = [document for _, _, document in _documents(grammar)]
    while left:
        match left.pop():
            case dict() as found:
                items = cast("dict[str, object]", found)
                yield items
                left += items.values()
            case list() as found:
                left += cast("list[object]", found)
            case _:
                pass


def unenforced(grammar: str, warnings: Sequence[str]) -> tuple[str, ...]:
    """Keywords of JSON schema that answers under a grammar may violate, in alphabetical order. warnings: llguidance's. An
    unknown format is an annotation, which JSON schema does not require to be enforced."""
    names: set[str] = set()
    for warning in warnings:
        if found := _UNKNOWN.match(warning):
            names |= set(json.loads(found[1]))
        elif warning.startswith("oneOf"):
            names.add("oneOf")
        elif warning.startswith("min/maxProperties"):
            names |= set(_COUNTS)
    if not names:
        return ()
    asked = (names & {name for name, value in schema.items() if _asks(name, value)} for schema in all_schemas(grammar))
    return tuple(sorted(set[str]().union(*asked)))


def _asks(name: str, value: object) -> bool:
    """Whether a keyword with this value restricts anything: `uniqueItems` only if true, other keywords unless true."""
    return value is not None and value is not (name != "uniqueItems")


def merged_patterns(grammar: str, error: str) -> str | None:
    """A grammar without an overlap of `patternProperties` that llguidance reports and refuses to compile; None if the error is
    a different one. Names matching both patterns then need values valid under both schemas."""
    found = _OVERLAP.search(error)
    if found is None:
        return None
    parts = found[1].split("/ and /")
    pairs = [("/ and /".join(parts[:i]), "/ and /".join(parts[i:])) for i in range(1, len(parts))]
    changed = False

    def merge(schema: dict[str, Any]) -> None:
        nonlocal changed
        patterns = schema.get("patternProperties")
        if not isinstance(patterns, dict):
            return
        known = cast("dict[str, Any]", patterns)
        for one, other in pairs:
            if one in known and other in known:
                first, second = known.pop(one), known.pop(other)
                known[f"(?:{one})|(?:{other})"] = first if first == second else {"allOf": [first, second]}
                changed = True

    rewritten = _rewritten(grammar, merge)
    return rewritten if changed else None


def readable(grammar: str, refusal: Callable[[str], str]) -> tuple[str, tuple[str, ...]]:
    """A grammar that llguidance can read, and the keywords whose patterns were dropped, in alphabetical order.

    Its schemas have no null keywords, no dialect unknown to llguidance, and no bound such as 2.0, which is an integer in JSON
    schema. Patterns with look-around or backreferences are dropped, because no grammar can follow them. refusal: why a regex
    does not compile, or "" if it does.
    """
    refused: dict[str, bool] = {}
    names: set[str] = set()

    def looks_around(pattern: object) -> bool:
        if not isinstance(pattern, str) or (pattern not in refused and len(refused) >= MAX_PATTERNS):
            return False
        if pattern not in refused:
            refused[pattern] = bool(_LOOKS_AROUND.search(refusal(pattern)))
        return refused[pattern]

    def change(schema: dict[str, Any]) -> None:
        _drop_nulls(schema)
        for bound in _INTEGERS & schema.keys():
            if isinstance(schema[bound], float) and schema[bound].is_integer():
                schema[bound] = int(schema[bound])
        if isinstance(dialect := schema.get("$schema"), str) and not _DIALECT.fullmatch(dialect):
            del schema["$schema"]
        if looks_around(schema.get("pattern")):
            del schema["pattern"]
            names.add("pattern")
        if not isinstance(patterns := schema.get("patternProperties"), dict):
            return
        known = cast("dict[str, Any]", patterns)
        if dropped := [known.pop(pattern) for pattern in list(known) if looks_around(pattern)]:
            names.add("patternProperties")
            if schema.get("additionalProperties") is False:
                schema["additionalProperties"] = {"anyOf": dropped}

    return _rewritten(grammar, change), tuple(sorted(names))


def without_nulls(schema: object) -> Any:
    """A schema without null keywords, which some programs write for unset options."""
    copied = copy.deepcopy(schema)
    _change_schemas(copied, _drop_nulls)
    return copied


def _drop_nulls(schema: dict[str, Any]) -> None:
    for name in [name for name, value in schema.items() if value is None and name not in _MAY_BE_NULL]:
        del schema[name]


def _rewritten(grammar: str, change: Callable[[dict[str, Any]], None]) -> str:
    """The grammar with each of its schemas changed in place."""
    parts, end = list[str](), 0
    for start, stop, document in _documents(grammar):
        _change_schemas(document, change)
        parts += [grammar[end:start], json.dumps(document)]
        end = stop
    return "".join([*parts, grammar[end:]])


def _change_schemas(document: object, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a schema and its subschemas in place, each before its parts."""
    left: list[tuple[object, bool]] = [(document, True)]
    while left:
        node, is_schema = left.pop()
        if isinstance(node, list):
            left += [(each, is_schema) for each in cast("list[object]", node)]
        elif isinstance(node, dict):
            items = cast("dict[str, Any]", node)
            if is_schema:
                change(items)
                left += [(value, name not in _BY_NAME) for name, value in items.items() if name not in _VALUES]
            else:
                left += [(value, True) for value in items.values()]


def _documents(grammar: str) -> Iterator[tuple[int, int, object]]:
    """JSON documents in a grammar, with their start and end positions."""
    decoder, at = json.JSONDecoder(), 0
    while at <= len(grammar):
        if at or not grammar.startswith("{"):
            found = _IN_LARK.search(grammar, at)
            if found is None:
                return
            at = found.end()
        try:
            document, end = decoder.raw_decode(grammar, at)
        except ValueError:
            # These letters belong to a text, not to a schema.
            at += 1
            continue
        yield at, end, cast("object", document)
        at = max(end, 1)
