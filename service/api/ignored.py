"""Parts of a body that its answer does not follow, named in a response header."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import cast

from fastapi import Response

from service.api.bodies import ClientModel, IgnoredMark, is_neutral
from service.api.printing import printable

IGNORED = "x-redraft-ignored"
"""Response header: the names of ignored fields."""
MAX_HEADER_CHARS = 2048


@dataclass(frozen=True, slots=True)
class Unfollowed:
    """Locations in a body, such as `messages.cache_control`: names joined by dots, without list indices. known: fields
    accepted on purpose. unknown: fields that this server does not know; those with neutral values are in `absent`
    instead."""

    known: list[str] = field(default_factory=list[str])
    unknown: list[str] = field(default_factory=list[str])
    absent: list[str] = field(default_factory=list[str])


def paths_of(body: ClientModel) -> Unfollowed:
    """The fields of a body beyond those served, each location once."""
    found = Unfollowed()
    for place, path in _walk(body, "", found):
        if path not in place:
            place.append(path)
    return found


def _walk(model: ClientModel, before: str, found: Unfollowed) -> Iterator[tuple[list[str], str]]:
    for name, info in type(model).model_fields.items():
        if name not in model.model_fields_set:
            continue
        value, path = getattr(model, name), f"{before}{info.alias or name}"
        if any(isinstance(mark, IgnoredMark) for mark in info.metadata):
            if not is_neutral(value):
                yield found.known, path
            continue
        for inner in cast("list[object]", value) if isinstance(value, list) else [value]:
            if isinstance(inner, ClientModel):
                yield from _walk(inner, f"{path}.", found)
    if model.extras_are_labels:
        return
    for name, value in (model.model_extra or {}).items():
        yield found.absent if is_neutral(value) else found.unknown, f"{before}{printable(name)}"


def with_ignored(response: Response, names: Iterable[str]) -> Response:
    """The response with these names in its header, after existing ones: each once, up to the header's maximum size."""
    known = response.headers.get(IGNORED)
    written = known.split(", ") if known else []
    left_out = 0
    # A header value must not start or end with a space, and a comma separates names.
    for name in dict.fromkeys(name.replace(",", "\\x2c").replace(" ", "\\x20") or '""' for name in names):
        if name in written:
            continue
        if sum(map(len, written)) + 2 * len(written) + len(name) > MAX_HEADER_CHARS:
            left_out += 1
            continue
        written.append(name)
    if left_out:
        written.append(f"and {left_out} more")
    if written:
        response.headers[IGNORED] = ", ".join(written)
    return response
