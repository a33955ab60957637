"""The selection of an erasure, and its result."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol, TypeAlias

from service.core.errors import BadRequest

_PREFIX = re.compile(r"^(chatcmpl-|cmpl-|resp_|msg_)")
"""Prefixes of ids in answers of OpenAI's and Anthropic's routes."""


def request_id(name: str) -> str:
    """The request id within the id of a route's answer."""
    return _PREFIX.sub("", name)


class Tagged(Protocol):
    """The tags that identify the owner of a text, as a Prompt has them."""

    @property
    def api_key(self) -> str | None:
        """Name of the API key of the request."""
        ...

    @property
    def client(self) -> str | None:
        """The client's tag."""
        ...

    @property
    def domain(self) -> str | None:
        """The domain's tag."""
        ...


@dataclass(frozen=True, slots=True)
class Selection:
    """Generations to erase or copy: those that match all given criteria, or everything. ids: of generations, with or without
    the prefix of a route's answers. api_key: name of the key of the request. before: created before this time, local unless it
    has a time zone. Raises BadRequest if nothing is given, or something in addition to `everything`."""

    ids: frozenset[str] | None = None
    api_key: str | None = None
    client: str | None = None
    domain: str | None = None
    before: datetime | None = None
    everything: bool = False

    def __post_init__(self) -> None:
        given = any(each is not None for each in (self.ids, self.api_key, self.client, self.domain, self.before))
        if given is self.everything:
            raise BadRequest("give either criteria (ids, api_key, client, domain, before) or everything, not both")
        if self.ids is not None:
            object.__setattr__(self, "ids", frozenset(request_id(name) for name in self.ids))
        if self.before is not None:
            try:
                # SQLite would compare the digits and ignore the time zone.
                object.__setattr__(self, "before", self.before.astimezone(UTC))
            except (OverflowError, ValueError):
                # Outside the supported years: before or after everything recorded.
                end = datetime.min if self.before.year == 1 else datetime.max
                object.__setattr__(self, "before", end.replace(tzinfo=UTC))

    def given(self) -> dict[str, object]:
        """The given criteria by name, JSON-serialisable; `everything` is always included."""
        said: dict[str, object] = {
            "ids": None if self.ids is None else sorted(self.ids),
            "api_key": self.api_key,
            "client": self.client,
            "domain": self.domain,
            "before": None if self.before is None else self.before.isoformat(),
        }
        return {name: value for name, value in said.items() if value is not None} | {"everything": self.everything}

    def covers(self, id: str, tags: Tagged, created: datetime) -> bool:
        """Whether a generation that is not in the log yet is selected, given its tags. created: when it ended; for an
        unfinished request, now."""
        return (
            (self.ids is None or id in self.ids)
            and (self.api_key is None or tags.api_key == self.api_key)
            and (self.client is None or tags.client == self.client)
            and (self.domain is None or tags.domain == self.domain)
            and (self.before is None or created < self.before)
        )


Forget: TypeAlias = Callable[[Selection], object]
"""Drops the texts of a selection from one component. When it returns, they are gone and do not come back. A component that
cannot tell whose texts it keeps drops all of them."""


@dataclass(frozen=True, slots=True)
class Erased:
    """generations: number deleted. adapters: those that learned from one of them, and their descendants. revoked: those that
    may no longer serve. Both by id, ascending."""

    generations: int
    adapters: tuple[int, ...]
    revoked: tuple[int, ...]
