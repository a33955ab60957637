"""Request bodies of client programs: which values count as absent, and which fields are accepted without being served.

Client programs send fields that this server does not know, and fields of other servers with values that request
nothing. Neither causes an error: see ClientModel. A value that would change the answer but is not served is refused:
see NotServed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

NEUTRAL_VALUES: tuple[object, ...] = (None, False, "", [], {})
NEUTRAL: dict[str, Any] = {"enum": list(NEUTRAL_VALUES)}
"""For the OpenAPI document: values that count as absent."""
NOT_SERVED = "not_served"
"""Type of a validation error whose message is a complete sentence about an unsupported feature."""


def is_neutral(value: object) -> bool:
    """Whether an optional field with this value counts as absent."""
    return any(_same(value, neutral) for neutral in NEUTRAL_VALUES)


def not_served(sentence: str) -> PydanticCustomError:
    """The error that a validator raises for something this server does not support."""
    return PydanticCustomError(NOT_SERVED, "{sentence}", {"sentence": sentence})


def _same(value: object, other: object) -> bool:
    """Equality of JSON, where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


@dataclass(frozen=True, eq=False)
class NotServed:
    """Metadata of a field that other servers know and this one does not serve. Only values that request nothing are
    accepted: the neutral ones, 0, and `default`, the other servers' default (if that is true, neither false nor 0).
    sentence: what is not served; "": the field by its name. Instances never compare equal, because typing merges equal
    annotations and takes 1 for true."""

    sentence: str = ""
    default: object = 0

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self._accepted)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": self._harmless}

    @property
    def _harmless(self) -> list[object]:
        if self.default is True:
            return [True, *(value for value in NEUTRAL_VALUES if value is not False)]
        return [*NEUTRAL_VALUES, 0] if _same(self.default, 0) else [*NEUTRAL_VALUES, 0, self.default]

    def _accepted(self, value: object, info: ValidationInfo) -> None:
        if not any(_same(value, harmless) for harmless in self._harmless):
            but = " but as true" if self.default is True else ""
            raise not_served(self.sentence or f"{info.field_name} is not served{but}")


class IgnoredMark:
    """Metadata of Ignored."""


Unserved = Annotated[Any, NotServed()]
Ignored = Annotated[
    Any, IgnoredMark(), Field(description="Accepted and ignored; named in the header x-redraft-ignored.")
]
"""A field that well-known clients always send and that has no effect here."""


class ClientModel(BaseModel):
    """Base of bodies sent by client programs. Unknown fields are kept as extras, for `ignored.paths_of`. An optional
    field whose value is neutral and otherwise invalid counts as absent. Errors must not quote bodies."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    extras_are_labels: ClassVar[bool] = False
    """Fields that the model does not name are the client's own labels and are not reported as ignored."""

    @model_validator(mode="wrap")
    @classmethod
    def _without_neutral(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """A valid value is used as it is: an empty list of tools, `false` for a flag. Only fields that would be refused
        are examined again."""
        try:
            return handler(value)
        except ValidationError as error:
            if not isinstance(value, dict):
                raise
            body = cast("dict[str, object]", value)
            found = [item for item in error.errors(include_url=False, include_input=False) if item["loc"]]
            wrong = {item["loc"][0] for item in found}
            # If `false` requests something unsupported, it does not count as absent.
            refused = {item["loc"][0] for item in found if item["type"] == NOT_SERVED}
            absent = {name for name in cls._optional() & wrong - refused if is_neutral(body.get(name))}
            if not absent:
                raise
        return handler({name: given for name, given in body.items() if name not in absent})

    @classmethod
    def _optional(cls) -> set[str]:
        """Names of optional fields, as clients write them."""
        return {field.alias or name for name, field in cls.model_fields.items() if not field.is_required()}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """States in the OpenAPI document that optional fields may be neutral."""
        schema = handler(core)
        whole = handler.resolve_ref_schema(schema)
        properties = cast("dict[str, dict[str, Any]]", whole.get("properties", {}))
        said = {field.alias or name: field.metadata for name, field in cls.model_fields.items()}
        for name in cls._optional() & properties.keys():
            if not any(isinstance(mark, NotServed) for mark in said[name]):
                properties[name] = _or_neutral(properties[name])
        return schema


def _or_neutral(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a field that may also be neutral."""
    kept = {key: value for key, value in schema.items() if key in {"title", "description", "default", "examples"}}
    rest = {key: value for key, value in schema.items() if key not in kept}
    if not rest:
        return dict(schema)
    choices = rest["anyOf"] if list(rest) == ["anyOf"] else [rest]
    return {"anyOf": [*(choice for choice in choices if choice != {"type": "null"}), NEUTRAL], **kept}
