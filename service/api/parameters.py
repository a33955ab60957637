"""Field types shared by the routes in other servers' shapes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from service.api.bodies import NEUTRAL
from service.api.schemas import INTEGRAL, GivenStop, GivenStops, Number, StopStrings, Text, Whole, as_list


def minus_one_is_none(value: object) -> object:
    """vLLM and llama.cpp write -1 for none."""
    return None if value == -1 and not isinstance(value, bool) else value


MAX_TOOLS = 256
MAX_NAME_CHARS = 128

Temperature = Annotated[Number, Field(ge=0, le=10)]
TopP = Annotated[Number, Field(ge=0, le=1)]
"""0: only the most likely token."""
MinP = Annotated[Number, Field(ge=0, le=1)]
NewSeed = Annotated[Whole, INTEGRAL]
Seed = Annotated[NewSeed | None, BeforeValidator(minus_one_is_none, json_schema_input_type=NewSeed | None)]
"""-1: none."""
Name = Annotated[Text, Field(min_length=1, max_length=MAX_NAME_CHARS)]
"""Of a tool or a format."""
Effort = Annotated[Text, Field(min_length=1, max_length=16)]
"""Of reasoning."""
Schema = dict[str, Any]
"""A JSON schema."""
PastArguments = Text | dict[str, Any] | None
"""Of a call that the assistant made before: JSON as text, which may be broken, or the object itself."""
PLAIN_FORMAT = {"anyOf": [NEUTRAL, {"type": "object", "required": ["type"], "properties": {"type": {"const": "text"}}}]}
"""For the OpenAPI document: a format that leaves the answer free."""
FREE_CALLS = {"anyOf": [NEUTRAL, {"enum": ["auto", "none"]}]}
"""For the OpenAPI document: a tool choice that forces no call."""


def one_of_them(*absent: dict[str, Any]) -> dict[str, Any]:
    """For the OpenAPI document: a body may have one of several fields. absent: {field: schema of its values that
    request nothing} for each of them."""
    rest = [[other for other in absent if other is not given] for given in absent]
    return {
        "anyOf": [{"properties": {name: schema for one in others for name, schema in one.items()}} for others in rest]
    }


OptionalStops = Annotated[
    StopStrings | None, BeforeValidator(as_list, json_schema_input_type=GivenStop | GivenStops | None)
]
"""One string or several."""
