"""The interface to the supported databases, and their URLs."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from service.core import StoreError

PSYCOPG = "postgresql+psycopg"


class Backend(Protocol):
    """An open database. readers: connections with read-only transactions on one snapshot."""

    @property
    def readers(self) -> Engine:
        """Connections for reading."""
        ...

    @property
    def writers(self) -> Engine:
        """Connections for writing."""
        ...

    def begin(self, connection: Connection, shared: bool) -> None:
        """At the start of a write transaction: waits until no other process writes. shared: does not wait for other
        shared writes."""
        ...

    def pause(self, error: DBAPIError, attempt: int, waited: float) -> float | None:
        """Seconds to wait before an uncommitted write transaction is repeated; None: do not repeat. attempt: number of
        earlier failures. waited: seconds since the first attempt began."""
        ...

    def transaction(self, connection: Connection) -> str | None:
        """An identifier of the current transaction for `committed`; None: it may be repeated in any case."""
        ...

    def committed(self, transaction: str) -> bool:
        """Whether a transaction was committed although its connection was lost. Raises StoreError if that cannot be
        determined."""
        ...

    def scrub(self) -> None:
        """Removes deleted data from the files, as far as the database supports it."""
        ...

    def integrity(self, connection: Connection) -> str:
        """ "ok", or what is wrong."""
        ...

    def size(self, connection: Connection) -> int:
        """Bytes on disk."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


def parsed(url: str) -> URL:
    """Parses a database's URL; PostgreSQL URLs select psycopg 3, however they are written. Raises StoreError."""
    try:
        found = make_url(url)
    except (ArgumentError, ValueError):
        # The URL is left out of the error because it may contain a password.
        raise StoreError(
            "the database's URL (store.url) is not one, such as sqlite:////folder/redraft.db or "
            "postgresql://user@host/redraft (special characters of a password as in %40)"
        ) from None
    if found.drivername in {"postgres", "postgresql", PSYCOPG}:
        if "@" in (found.host or ""):
            raise StoreError(
                "the host in the database's URL (store.url) contains an @: write an @ in a password as %40"
            )
        return found.set(drivername=PSYCOPG)
    if found.get_backend_name() == "sqlite":
        return found
    raise StoreError(f"the database (store.url) may be sqlite:// or postgresql://, not {found.drivername}://")


def shown(url: str) -> str:
    """The database for display: a file's path, or the URL without its password. Raises StoreError."""
    if (path := sqlite_path(url)) is not None:
        return str(path)
    found = parsed(url)
    return found.difference_update_query([name for name in found.query if "pass" in name.lower()]).render_as_string(
        hide_password=True
    )


def sqlite_path(url: str) -> Path | None:
    """The file of an SQLite database, None for PostgreSQL. Raises StoreError."""
    found = parsed(url)
    if found.get_backend_name() != "sqlite":
        return None
    if not found.database or found.database == ":memory:":
        raise StoreError("the database must be a file, because several processes read it")
    return Path(found.database)


def plain(error: BaseException) -> str:
    """The first line of a driver's message."""
    lines = str(getattr(error, "orig", None) or error).splitlines()
    return lines[0] if lines else type(error).__name__
