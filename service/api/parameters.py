"""What requests to the routes in other servers' shapes have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from service.api.schemas import INTEGRAL, MAX_STOPS, Number, StopString, Text, Whole, as_list

MAX_TOOLS = 256
MAX_NAME_CHARS = 128

Temperature = Annotated[Number, Field(ge=0, le=10)]
TopP = Annotated[Number, Field(gt=0, le=1)]
MinP = Annotated[Number, Field(ge=0, le=1)]
Seed = Annotated[Whole, Field(ge=0), INTEGRAL]
DraftTokens = Annotated[Whole, Field(ge=0, le=64), INTEGRAL]
Name = Annotated[Text, Field(min_length=1, max_length=MAX_NAME_CHARS)]
"""Of a tool or a format."""
Effort = Annotated[Text, Field(min_length=1, max_length=16)]
"""Of reasoning."""
Schema = dict[str, Any]
"""A JSON schema."""
OptionalStops = Annotated[
    list[StopString] | None,
    Field(max_length=MAX_STOPS),
    BeforeValidator(as_list, json_schema_input_type=StopString | list[StopString] | None),
]
"""One string or several."""
