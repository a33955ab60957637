"""JSON schemas of tool parameters: the alternatives of a schema, self-contained copies, and parsing a value written between
tags."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import unquote

TYPES = ("null", "boolean", "number", "string", "array", "object")
"""The types that a schema without `type` allows. Integers are numbers."""
ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$defs",
        "definitions",
    }
    | {"format", "contentEncoding", "contentMediaType"}
)
"""Keywords that do not constrain the value."""
MAX_FORMS = 1000
"""Maximum schemas visited for one parameter, because nested alternatives multiply."""

Schema = dict[str, Any]


def forms(schema: object, document: object) -> list[Schema]:
    """The alternatives of a schema, flattened: each has one `type`, or an `enum` of the values that its type allows.

    `$ref`, `anyOf`, `oneOf`, `allOf`, `const` and lists of types are resolved. Keywords of `allOf` that contradict each other
    stay in an `allOf`. document: the root for references.

    Raises ValueError for an unresolvable reference, an unknown type, and too many alternatives.
    """
    found: list[Schema] = []
    left: list[tuple[object, frozenset[str]]] = [(schema, frozenset())]
    visited = 0
    while left:
        node, passed = left.pop()
        if (visited := visited + 1) > MAX_FORMS:
            raise ValueError(f"it has more than {MAX_FORMS} alternatives")
        if node is False:
            continue
        one = _object(node)
        for part in cast("list[object]", one.pop("allOf", [])):
            one = _both(one, part)
        if isinstance(ref := one.pop("$ref", None), str):
            if ref not in passed:
                left.append((_both(resolve(ref, document), one), passed | {ref}))
            continue
        if (keyword := next((name for name in ("anyOf", "oneOf") if name in one), None)) is not None:
            options = cast("list[object]", one.pop(keyword))
            left += [(_both(one, option), passed) for option in reversed(options)]
            continue
        found += _typed(one)
    return found


def _typed(schema: Schema) -> list[Schema]:
    kind = schema.get("type", TYPES)
    types: list[str] = [kind] if isinstance(kind, str) else list(kind)
    if unknown := set(types) - {*TYPES, "integer"}:
        raise ValueError(f"{sorted(unknown)[0]!r} is not a type")
    if "const" in schema:
        schema = _both(schema, {"enum": [schema["const"]]})
        del schema["const"]
    if "enum" in schema:
        return [{**schema, "enum": [value for value in schema["enum"] if types_of(value) & set(types)]}]
    return [{**schema, "type": each} for each in types]


def _object(schema: object) -> Schema:
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise ValueError("a schema is an object or a boolean")
    return dict(cast("Mapping[str, Any]", schema))


def _both(one: object, other: object) -> Any:
    """A schema of the values that both allow, preferring annotations of the first. False: there are none."""
    if one is False or other is False:
        return False
    merged, conflicts = _object(one), Schema()
    for keyword, value in _object(other).items():
        if keyword not in merged:
            merged[keyword] = value
        elif keyword == "type":
            merged["type"] = _common_types(merged["type"], value)
        elif keyword == "allOf":
            merged["allOf"] = [*merged["allOf"], *value]
        elif keyword not in ANNOTATIONS and merged[keyword] != value:
            conflicts[keyword] = value
    if conflicts:
        merged["allOf"] = [*merged.get("allOf", []), conflicts]
    return merged


def _common_types(one: Any, other: Any) -> list[str]:
    ours, theirs = ([kind] if isinstance(kind, str) else list(kind) for kind in (one, other))
    common = [kind for kind in ours if kind in theirs or (kind == "integer" and "number" in theirs)]
    return common + [kind for kind in theirs if kind == "integer" and "number" in ours and kind not in common]


def types_of(value: object) -> set[str]:
    """The JSON schema types of a Python value."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def resolve(reference: str, document: object) -> Any:
    """The target of a JSON pointer after `#`. Raises ValueError if there is none."""
    node: Any = document
    if reference != "#" and not reference.startswith("#/"):
        raise ValueError(f"{reference!r} does not refer into the same schema")
    for part in unquote(reference[1:]).split("/")[1:]:
        try:
            key = part.replace("~1", "/").replace("~0", "~")
            node = node[int(key)] if isinstance(node, list) else node[key]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{reference!r} refers to nothing") from error
    return node


def self_contained(schema: object, document: object) -> Schema:
    """The schema as a separate document, with a definition for each reference that it needs. Raises ValueError for an
    unresolvable reference."""
    names: dict[str, str] = {}
    waiting: list[str] = []

    def copy(node: Any) -> Any:
        if isinstance(node, list):
            return [copy(each) for each in cast("list[Any]", node)]
        if not isinstance(node, dict):
            return node
        found = cast("Schema", node)
        copied = {key: value if key in ("enum", "const") else copy(value) for key, value in found.items()}
        if isinstance(reference := found.get("$ref"), str):
            if reference not in names:
                names[reference] = f"ref{len(names)}"
                waiting.append(reference)
            copied["$ref"] = f"#/$defs/{names[reference]}"
        return copied

    whole: Schema = copy(_object(schema))
    definitions: Schema = {}
    while waiting:
        reference = waiting.pop()
        definitions[names[reference]] = copy(resolve(reference, document))
    return {**whole, "$defs": {**whole.get("$defs", {}), **definitions}} if definitions else whole


def parameters_of(document: object) -> Schema:
    """The schema of a function's parameters, without outer references. Raises ValueError if there is none."""
    schema, passed = document, set[str]()
    while isinstance(schema, Mapping):
        found = dict(cast("Mapping[str, Any]", schema))
        reference = found.pop("$ref", None)
        if not isinstance(reference, str):
            return found
        if reference in passed:
            break
        passed.add(reference)
        schema = {**resolve(reference, document), **found}
    raise ValueError("their schema is invalid")


def parameter_schema(schema: Schema, name: str) -> object:
    """The part of the parameters' schema about one parameter."""
    properties: Schema = schema.get("properties") or {}
    return properties[name] if name in properties else schema.get("additionalProperties", True)


def read_value(text: str, schema: object, document: object) -> Any:
    """The value of a text between tags. Raises ValueError for broken JSON, or a type that is not allowed."""
    found = forms(schema, document)
    values = [value for form in found for value in form.get("enum", ())]
    for value in sorted(values, key=lambda value: isinstance(value, str)):
        if written(value) == text:
            return value
    types = {form["type"] for form in found if "enum" not in form}.union(*map(types_of, values))
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        value = text
    # Surrounding white space belongs to the string.
    is_json = not isinstance(value, str) and ("string" not in types or text == text.strip())
    if is_json and types & types_of(value):
        return value
    if "string" not in types:
        raise ValueError("a value of the wrong type")
    return text


def written(value: object) -> str:
    """A value as a model writes it between tags: strings unchanged, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    """The number, limited to the range of floats: JSON allows larger numbers but has no infinity."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))
