"""Hooks of `schemathesis`, which loads this file by SCHEMATHESIS_HOOKS.

4.32.5 changes a part of a valid body, and takes the body for invalid even where another branch of the document allows it: the
type of one tool for that of another kind, null for a boolean that may be null. Such requests are left out.
"""

from __future__ import annotations

import jsonschema_rs
import schemathesis
from schemathesis.core.parameters import ParameterLocation
from schemathesis.generation import GenerationMode

JSON = "application/json"


@schemathesis.hook
def filter_case(context: schemathesis.HookContext, case: schemathesis.Case) -> bool:
    """Whether a request is made: not one whose one invalid part is said to be its body, where the document allows that body."""
    parts = {} if case.meta is None else case.meta.components
    invalid = {place for place, part in parts.items() if part.mode is GenerationMode.NEGATIVE}
    if invalid != {ParameterLocation.BODY} or case.media_type != JSON or not isinstance(case.body, dict):
        return True
    body = case.operation.definition.raw["requestBody"]["content"][JSON]["schema"]
    schema = {**body, "components": case.operation.schema.raw_schema["components"]}
    return not jsonschema_rs.is_valid(schema, case.body)
