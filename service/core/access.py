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
    """Who may generate."""
    OPERATOR = 2
    """Who may train, switch adapters, read what was recorded, and erase."""

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
LOCAL = Caller(Access.OPERATOR)
"""Everybody where no keys are asked for: on a loopback address, as long as no key was ever made."""
