"""Column types that differ between databases."""

from __future__ import annotations

import re

from sqlalchemy import BigInteger, Dialect, Integer, String, Text, TypeDecorator
from sqlalchemy.types import TypeEngine

Serial = BigInteger().with_variant(Integer(), "sqlite")
"""Numbers that are never given again: PostgreSQL's Integer ends at 2 billion, SQLite's holds 64 bits."""
_ESCAPED = re.compile("\x10([0\x10])")


class FreeText(TypeDecorator[str]):
    """Text as clients and models send it, NUL included, which PostgreSQL's text cannot hold: there U+0010 and a 0 stand for it,
    and U+0010 twice for itself. So no length is declared there either."""

    impl = Text
    cache_ok = True

    def __init__(self, length: int | None = None) -> None:
        super().__init__()
        self.length = length

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[str]:
        """PostgreSQL's text, elsewhere text of the length."""
        return Text() if self.length is None or dialect.name == "postgresql" else String(self.length)

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """As PostgreSQL gets it."""
        if value is None or dialect.name != "postgresql":
            return value
        return value.replace("\x10", "\x10\x10").replace("\0", "\x10" + "0")

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        """As it was."""
        if value is None or dialect.name != "postgresql":
            return value
        return _ESCAPED.sub(lambda found: "\0" if found[1] == "0" else "\x10", value)
