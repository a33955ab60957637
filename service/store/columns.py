"""Column types that differ between databases."""

from __future__ import annotations

import re

from sqlalchemy import BigInteger, Dialect, Integer, String, Text, TypeDecorator
from sqlalchemy.types import TypeEngine

Serial = BigInteger().with_variant(Integer(), "sqlite")
"""Numbers that are never reused: PostgreSQL's Integer ends at 2 billion, SQLite's holds 64 bits."""
_ESCAPED = re.compile("\x10([0\x10])")


class FreeText(TypeDecorator[str]):
    """Text from clients and models, which may contain NUL. PostgreSQL's text cannot: there U+0010 followed by 0
    represents NUL, and a double U+0010 represents itself. For the same reason no length is declared there."""

    impl = Text
    cache_ok = True

    def __init__(self, length: int | None = None) -> None:
        super().__init__()
        self.length = length

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[str]:
        """PostgreSQL's text; elsewhere text of the declared length."""
        return Text() if self.length is None or dialect.name == "postgresql" else String(self.length)

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """The value in PostgreSQL's encoding."""
        if value is None or dialect.name != "postgresql":
            return value
        return value.replace("\x10", "\x10\x10").replace("\0", "\x10" + "0")

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        """The original value."""
        if value is None or dialect.name != "postgresql":
            return value
        return _ESCAPED.sub(lambda found: "\0" if found[1] == "0" else "\x10", value)
