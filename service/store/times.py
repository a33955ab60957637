"""The clock that rows are dated by."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import Connection, func, select


def utc(moment: datetime) -> datetime:
    """A stored time in UTC: SQLite drops time zones, PostgreSQL uses the connection's."""
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)


def time_of(connection: Connection) -> datetime:
    """The database's time in UTC: PostgreSQL's own; for SQLite this machine's."""
    if connection.dialect.name == "postgresql":
        return connection.execute(select(func.clock_timestamp())).scalar_one().astimezone(UTC)
    return datetime.now(UTC)
