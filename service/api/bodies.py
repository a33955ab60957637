"""Bodies that clients send: what is absent in them, and what is accepted without being served.

A client's program sends fields that this server never heard of, and fields of other servers with values that ask for nothing.
Neither keeps it from being answered: see ClientModel. What would change the answer and is not served is refused: see NotServed.
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
"""In the document: values that are as good as absent."""
NOT_SERVED = "not_served"
"""Kind of a problem whose message is a whole sentence that says what is not served."""


def is_neutral(value: object) -> bool:
    """Whether an optional field with this value is absent."""
    return any(_same(value, neutral) for neutral in NEUTRAL_VALUES)


def not_served(sentence: str) -> PydanticCustomError:
    """What a validator raises for something that this server does not do."""
    return PydanticCustomError(NOT_SERVED, "{sentence}", {"sentence": sentence})


def _same(value: object, other: object) -> bool:
    """Equality of JSON, where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


@dataclass(frozen=True, eq=False)
class NotServed:
    """Metadata of a field that other servers know and this one does not serve. Only values that ask for nothing are accepted:
    the neutral ones, 0, and `default`, what other servers do without it (where that is true, neither false nor 0). sentence:
    what is not served; "": the field by its name. Two of them are never equal: typing keeps one annotation for equal ones, and
    takes 1 for true."""

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
"""A field that well-known clients always send and that changes nothing here."""


class ClientModel(BaseModel):
    """Base of what clients' programs send. Unknown fields are kept as extras, for `ignored.paths_of`. An optional field whose
    value is neutral and means nothing of its own is absent. Errors must not quote bodies."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    extras_are_labels: ClassVar[bool] = False
    """Fields that the model does not name are the client's own labels, and none of them is ignored."""

    @model_validator(mode="wrap")
    @classmethod
    def _without_neutral(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """What is valid as it stands is read so: an empty list of tools, `false` where a flag is wanted. Only fields that would
        be refused are looked at again."""
        try:
            return handler(value)
        except ValidationError as error:
            if not isinstance(value, dict):
                raise
            body = cast("dict[str, object]", value)
            found = [item for item in error.errors(include_url=False, include_input=False) if item["loc"]]
            wrong = {item["loc"][0] for item in found}
            # Where `false` asks for what is not served, it is not absent.
            refused = {item["loc"][0] for item in found if item["type"] == NOT_SERVED}
            absent = {name for name in cls._optional() & wrong - refused if is_neutral(body.get(name))}
            if not absent:
                raise
        return handler({name: given for name, given in body.items() if name not in absent})

    @classmethod
    def _optional(cls) -> set[str]:
        """Names, as clients write them, of fields that may be absent."""
        return {field.alias or name for name, field in cls.model_fields.items() if not field.is_required()}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The document says that optional fields may be neutral."""
        schema = handler(core)
        whole = handler.resolve_ref_schema(schema)
        properties = cast("dict[str, dict[str, Any]]", whole.get("properties", {}))
        said = {field.alias or name: field.metadata for name, field in cls.model_fields.items()}
        for name in cls._optional() & properties.keys():
            if not any(isinstance(mark, NotServed) for mark in said[name]):
                properties[name] = _or_neutral(properties[name])
        return schema


def _or_neutral(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a field that may be neutral besides."""
    kept = {key: value for key, value in schema.items() if key in {"title", "description", "default", "examples"}}
    rest = {key: value for key, value in schema.items() if key not in kept}
    if not rest:
        return dict(schema)
    choices = rest["anyOf"] if list(rest) == ["anyOf"] else [rest]
    return {"anyOf": [*(choice for choice in choices if choice != {"type": "null"}), NEUTRAL], **kept}
