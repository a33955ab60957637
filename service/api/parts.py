"""Parts of a message's content: text is served; images, sounds and files are not."""

from __future__ import annotations

import re
from typing import Annotated, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field

from service.api.bodies import ClientModel, not_served
from service.api.printing import printable
from service.api.schemas import Text

MEDIA = {
    "image|screenshot": "images are",
    "audio": "audio is",
    "video": "videos are",
    "document": "documents are",
    "file|upload": "files are",
}
"""Content other than text, by a word in the part's type: every client uses its own names."""
_MEDIA = "|".join(MEDIA)


def media_of(kind: str) -> str | None:
    """The content implied by a type's name, with its verb; None: text, as far as the name tells."""
    return next((what for words, what in MEDIA.items() if re.search(words, kind)), None)


def not_served_as(kind: str, name: str) -> str:
    """The sentence for an unsupported type. name: of the field with this type."""
    media = None if name.startswith("tool") else media_of(kind)
    verb = "are" if name.endswith("s") else "is"
    return f"{media or f'{name} of type {printable(kind)} {verb}'} not served"


def _textual(kind: str) -> str:
    if (media := media_of(kind)) is not None:
        raise not_served(f"{media} not served")
    return kind


def _as_part(value: object) -> object:
    """A value as TextPart expects it: a bare text and an assistant's refusal are text."""
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        return value
    part = cast("dict[str, object]", value)
    kind = part.get("type")
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return {"text": part["refusal"]}
    if isinstance(kind, str) and kind not in {"", "text", "input_text", "output_text"} and "text" not in part:
        raise not_served(not_served_as(kind, "content"))
    return part


PartType = Annotated[Text, AfterValidator(_textual), Field(json_schema_extra={"not": {"pattern": _MEDIA}})]


class TextPart(ClientModel):
    """A part of a message's content. Its text is read, whatever its type; images, audio, videos, documents and files
    are not served."""

    type: PartType = "text"
    text: Text


class RefusalPart(ClientModel):
    """An assistant's refusal, read as text."""

    type: Literal["refusal"]
    refusal: Text


AS_PART = BeforeValidator(_as_part, json_schema_input_type=Text | TextPart | RefusalPart)
Part = Annotated[TextPart, AS_PART]
"""A part, or a bare text."""
