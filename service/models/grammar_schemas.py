"""JSON schemas in a grammar as llguidance takes it: what it does not enforce of them, and forms of them that it compiles."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

_IN_LARK = re.compile(r"%json\s*")
_UNKNOWN = re.compile(r"Unimplemented keys: (\[.*\])")
_OVERLAP = re.compile(r"patternProperty regexes /(.*)/ are not disjoint", re.DOTALL)
_COUNTS = ("minProperties", "maxProperties")
MAX_MERGES = 64
"""Pairs of overlapping patterns of one grammar that are joined."""


def all_schemas(grammar: str) -> Iterator[Mapping[str, Any]]:
    """Every JSON object of the schemas in a grammar: of JSON, or of Lark with JSON in it."""
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
    """Keywords of JSON schema that answers under a grammar may violate, in alphabetical order. warnings: llguidance's. A format
    that it does not know is an annotation, which JSON schema does not ask to enforce."""
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
    """Whether a keyword with this value restricts anything: `uniqueItems` by true, schemas by anything else."""
    return value is not None and value is not (name != "uniqueItems")


def merged_patterns(grammar: str, error: str) -> str | None:
    """A grammar without an overlap of `patternProperties` that llguidance complains of, which does not compile it; None where
    the error is another. Names under either pattern then have values that are valid under both schemas."""
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


def _rewritten(grammar: str, change: Callable[[dict[str, Any]], None]) -> str:
    """The grammar with every JSON object of its schemas changed in place."""
    parts, end = list[str](), 0
    for start, stop, document in _documents(grammar):
        left: list[object] = [document]
        while left:
            match left.pop():
                case dict() as found:
                    items = cast("dict[str, Any]", found)
                    change(items)
                    left += items.values()
                case list() as found:
                    left += cast("list[object]", found)
                case _:
                    pass
        parts += [grammar[end:start], json.dumps(document)]
        end = stop
    return "".join([*parts, grammar[end:]])


def _documents(grammar: str) -> Iterator[tuple[int, int, object]]:
    """JSON documents in a grammar, with where they begin and end."""
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
            # The letters are of a text, not of a schema.
            at += 1
            continue
        yield at, end, cast("object", document)
        at = max(end, 1)
