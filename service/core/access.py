"""API keys and access levels."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum


class Access(IntEnum):
    """What a route requires, and what a caller has. Each level includes the lower ones."""

    PUBLIC = 0
    """No key required."""
    CLIENT = 1
    """May generate text."""
    LOCAL = 2
    """May also train, switch adapters and read figures, but neither read nor erase recorded texts. Callers without a key have
    this level while no key was ever created."""
    OPERATOR = 3
    """May do everything, including reading and erasing recorded texts."""

    @property
    def role(self) -> str:
        """The level's name in commands and database rows."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its secret. name: unique for ever. Revoked keys grant nothing."""

    name: str
    access: Access
    created_at: datetime
    revoked_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. key: the name of the key that it came with, or with which its session was opened; None
    without."""

    access: Access
    key: str | None = None


ANYBODY = Caller(Access.PUBLIC)
"""A caller without a key on a server that requires keys."""
LOCAL = Caller(Access.LOCAL)
"""A caller without a key on a server that requires none: on a loopback address, while no key was ever created."""
OWNER = Caller(Access.OPERATOR)
"""A caller with the token of the server's home folder, while no key was ever created."""
