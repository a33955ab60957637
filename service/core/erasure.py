"""What an operator may have erased, and what came of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol, TypeAlias

from service.core.errors import BadRequest

_PREFIX = re.compile(r"^(chatcmpl-|cmpl-|resp_|msg_)")
"""Of ids in answers of OpenAI's and Anthropic's routes."""


def request_id(name: str) -> str:
    """A request's own id, of the id that a route's answer has."""
    return _PREFIX.sub("", name)


class Tagged(Protocol):
    """What tells whose a text is, as a Prompt has it."""

    @property
    def api_key(self) -> str | None:
        """Name of the key that it was asked for with."""
        ...

    @property
    def client(self) -> str | None:
        """The client's own tag."""
        ...

    @property
    def domain(self) -> str | None:
        """The domain's."""
        ...


@dataclass(frozen=True, slots=True)
class Selection:
    """Generations to erase or to copy: those that match all that is given, or everything. ids: of generations, also with the
    prefix that they have in a route's answers. api_key: name of the key that they were asked for with. before: created before
    this moment, of local time where it names no other. Raises BadRequest where nothing is given, or something besides
    `everything`."""

    ids: frozenset[str] | None = None
    api_key: str | None = None
    client: str | None = None
    domain: str | None = None
    before: datetime | None = None
    everything: bool = False

    def __post_init__(self) -> None:
        given = any(each is not None for each in (self.ids, self.api_key, self.client, self.domain, self.before))
        if given is self.everything:
            raise BadRequest("say which generations (ids, api_key, client, domain, before), or everything, not both")
        if self.ids is not None:
            object.__setattr__(self, "ids", frozenset(request_id(name) for name in self.ids))
        if self.before is not None:
            try:
                # SQLite would compare the digits and pass over the time zone.
                object.__setattr__(self, "before", self.before.astimezone(UTC))
            except (OverflowError, ValueError):
                # Beyond the years that have numbers: before all that was recorded, or after it.
                end = datetime.min if self.before.year == 1 else datetime.max
                object.__setattr__(self, "before", end.replace(tzinfo=UTC))

    def given(self) -> dict[str, object]:
        """What says which generations, by name, as JSON can hold it; `everything` always."""
        said: dict[str, object] = {
            "ids": None if self.ids is None else sorted(self.ids),
            "api_key": self.api_key,
            "client": self.client,
            "domain": self.domain,
            "before": None if self.before is None else self.before.isoformat(),
        }
        return {name: value for name, value in said.items() if value is not None} | {"everything": self.everything}

    def covers(self, id: str, tags: Tagged, created: datetime) -> bool:
        """Whether a generation with these tags is selected that is not in the log yet. created: when it ended; for a request
        under way, now."""
        return (
            (self.ids is None or id in self.ids)
            and (self.api_key is None or tags.api_key == self.api_key)
            and (self.client is None or tags.client == self.client)
            and (self.domain is None or tags.domain == self.domain)
            and (self.before is None or created < self.before)
        )


Forget: TypeAlias = Callable[[Selection], object]
"""Has one place forget the texts of a selection; when it returns they are gone from there and do not come back. A place that
cannot tell whose texts it keeps forgets all."""


@dataclass(frozen=True, slots=True)
class Erased:
    """generations: how many were deleted. adapters: those that learnt one of them, or were trained on top of one that did.
    revoked: those that may not serve any more since now. Both by id, ascending."""

    generations: int
    adapters: tuple[int, ...]
    revoked: tuple[int, ...]
