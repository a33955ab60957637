"""Hooks of `schemathesis`, which loads this file by SCHEMATHESIS_HOOKS.

4.32.5 changes a part of a valid body, and takes the body for invalid even where another branch of the document allows it: the
type of one tool for that of another kind, null for a boolean that may be null. Such requests are left out. So are valid ones
with fields whose bounds depend on other fields or on the server's settings, which a JSON schema does not express.
"""

from __future__ import annotations

import jsonschema_rs
import schemathesis
from schemathesis.core.parameters import ParameterLocation
from schemathesis.generation import GenerationMode

JSON = "application/json"
SERVED = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
ANSWERS = 12
"""The most that run and wait at once on the server that is asked."""


@schemathesis.hook
def filter_case(context: schemathesis.HookContext, case: schemathesis.Case) -> bool:
    """Whether a request is made: not one whose one invalid part is said to be its body, where the document allows that body,
    and no valid one that `_bounded_by_others` names."""
    parts = {} if case.meta is None else case.meta.components
    invalid = {place for place, part in parts.items() if part.mode is GenerationMode.NEGATIVE}
    if not invalid and isinstance(case.body, dict) and _bounded_by_others(case.body):
        return False
    if invalid != {ParameterLocation.BODY} or case.media_type != JSON or not isinstance(case.body, dict):
        return True
    body = case.operation.definition.raw["requestBody"]["content"][JSON]["schema"]
    schema = {**body, "components": case.operation.schema.raw_schema["components"]}
    return not jsonschema_rs.is_valid(schema, case.body)


def _bounded_by_others(body: dict[str, object]) -> bool:
    """Whether fields are within their own bounds, and perhaps beyond those that other fields and settings give them; or whether
    no item of an input is of a type that is served, since some must be."""
    least, answers = body.get("min_tokens"), body.get("n")
    limits = [body.get(name) for name in ("max_tokens", "max_completion_tokens")]
    most = min((limit for limit in limits if isinstance(limit, int | float)), default=0)
    too_long = isinstance(least, int | float) and least > most
    items = body.get("input")
    unserved = isinstance(items, list) and not any(isinstance(item, dict) and _served(item) for item in items)
    return too_long or unserved or (isinstance(answers, int | float) and answers > ANSWERS)


def _served(item: dict[str, object]) -> bool:
    """Whether an item of an input is read; others are ignored by name."""
    return item.get("type") in SERVED or "role" in item
