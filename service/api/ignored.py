"""What a body holds and its answer does not follow, named for the response's header."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import cast

from fastapi import Response

from service.api.bodies import ClientModel, IgnoredMark, is_neutral
from service.api.printing import printable

IGNORED = "x-redraft-ignored"
"""Header of a response: the names of what was sent and ignored."""
MAX_HEADER_CHARS = 2048


@dataclass(frozen=True, slots=True)
class Unfollowed:
    """Places in a body, such as `messages.cache_control`: names joined by dots, without the numbers of entries. known: fields
    that are accepted on purpose. unknown: fields that this server never heard of; those with neutral values are in `absent`
    instead."""

    known: list[str] = field(default_factory=list[str])
    unknown: list[str] = field(default_factory=list[str])
    absent: list[str] = field(default_factory=list[str])


def paths_of(body: ClientModel) -> Unfollowed:
    """What a body holds beyond what is served, each place once."""
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
    """The response with these names in its header, after those that are there: each once, and no more than a header may
    hold."""
    known = response.headers.get(IGNORED)
    written = known.split(", ") if known else []
    left_out = 0
    # A header's value must not begin or end with a space, and a comma divides names.
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
