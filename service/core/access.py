"""Who may call: API keys, and what each of them allows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum


class Access(IntEnum):
    """What a route asks for, and what a caller has; each includes those before it."""

    PUBLIC = 0
    """Everybody."""
    CLIENT = 1
    """May generate text."""
    LOCAL = 2
    """May also train, switch adapters and read figures, but neither read nor erase recorded texts: what callers without a key
    have while no key was ever made."""
    OPERATOR = 3
    """May do everything: read and erase recorded texts too."""

    @property
    def role(self) -> str:
        """The name that commands and rows have for it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key, without its secret. name: unique for ever. Revoked keys open nothing."""

    name: str
    access: Access
    created_at: datetime
    revoked_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. key: the name of the key that it came with, or that its session was opened with; None without."""

    access: Access
    key: str | None = None


ANYBODY = Caller(Access.PUBLIC)
"""Who sent no key where keys are asked for."""
LOCAL = Caller(Access.LOCAL)
"""A caller without a key where none is asked for: on a loopback address, as long as no key was ever made."""
OWNER = Caller(Access.OPERATOR)
"""A caller with the token of the server's home folder, as long as no key was ever made."""
