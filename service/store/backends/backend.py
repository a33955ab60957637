"""What differs between the databases that Redraft runs on, and their URLs."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from service.core import StoreError

PSYCOPG = "postgresql+psycopg"


class Backend(Protocol):
    """An open database. readers: connections whose transactions only read, and see one snapshot."""

    @property
    def readers(self) -> Engine:
        """Connections for reading."""
        ...

    @property
    def writers(self) -> Engine:
        """Connections for writing."""
        ...

    def begin(self, connection: Connection, shared: bool) -> None:
        """At the beginning of a write transaction: wait until no other writes. shared: but for others that are."""
        ...

    def pause(self, error: DBAPIError, attempt: int, waited: float) -> float | None:
        """Seconds after which a write transaction that was not committed may run again; None: not at all. attempt: how many
        failed before it. waited: seconds since the first of them began."""
        ...

    def transaction(self, connection: Connection) -> str | None:
        """The name by which `committed` knows the transaction under way; None: it may run again in any case."""
        ...

    def committed(self, transaction: str) -> bool:
        """Whether a transaction was committed whose connection was lost meanwhile. Raises StoreError where that cannot be
        known."""
        ...

    def scrub(self) -> None:
        """Remove from the files what was deleted, as far as that is done here."""
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
    """A database's URL; PostgreSQL's is for psycopg 3, however it is written. Raises StoreError."""
    try:
        found = make_url(url)
    except (ArgumentError, ValueError):
        # Its text stays out of the error: it may hold a password.
        raise StoreError(
            "the database's URL (store.url) is not one, such as sqlite:////folder/redraft.db or "
            "postgresql://user@host/redraft (special characters of a password as in %40)"
        ) from None
    if found.drivername in {"postgres", "postgresql", PSYCOPG}:
        if "@" in (found.host or ""):
            raise StoreError("the host in the database's URL (store.url) holds an @: write a password's own as %40")
        return found.set(drivername=PSYCOPG)
    if found.get_backend_name() == "sqlite":
        return found
    raise StoreError(f"the database (store.url) may be sqlite:// or postgresql://, not {found.drivername}://")


def shown(url: str) -> str:
    """The database as it may be shown: a file's path, or the URL without its passwords. Raises StoreError."""
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
        raise StoreError("the database must be a file: several processes read it")
    return Path(found.database)


def plain(error: BaseException) -> str:
    """The first line of a driver's message."""
    lines = str(getattr(error, "orig", None) or error).splitlines()
    return lines[0] if lines else type(error).__name__
