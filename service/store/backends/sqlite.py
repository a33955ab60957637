"""SQLite: one file, one writer at a time.

WAL and a timeout do not prevent "database is locked": a transaction that reads and then writes fails at once. So every
write transaction begins IMMEDIATE.
"""

from __future__ import annotations

import itertools
import sqlite3
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool

from service.core import StoreError
from service.store.backends.backend import plain

BUSY_SECONDS = 5.0
RETRIES = 5
WAL_PAUSE = 0.05


class Sqlite:
    """backend.Backend over a file. read_only: another process writes it."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        if not read_only:
            _write_ahead(path)
        self.readers = _engine(path, read_only)
        self.writers = self.readers.execution_options(redraft_write=True)

    def begin(self, connection: Connection, shared: bool) -> None:
        """BEGIN IMMEDIATE has already waited for the lock."""

    def pause(self, error: DBAPIError, attempt: int, waited: float) -> float | None:
        """Another process (a backup, a shell) may hold the lock for longer than the timeout."""
        if "locked" not in str(error.orig) or attempt >= RETRIES - 1:
            return None
        return 0.05 * 2**attempt

    def transaction(self, connection: Connection) -> str | None:
        """None: there is no connection to lose."""
        return None

    def committed(self, transaction: str) -> bool:
        """Never called, because `transaction` returns None."""
        raise AssertionError("unreachable")

    def scrub(self) -> None:
        """The write-ahead log keeps deleted pages until it is checkpointed and truncated. Raises StoreError if that fails."""
        try:
            with self.readers.connect() as connection:
                ((busy, *_),) = connection.connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"deleted, but the write-ahead log could not be cut: {error}") from error
        if busy:
            raise StoreError("deleted, but the write-ahead log still holds it, for somebody reads it: delete again")

    def integrity(self, connection: Connection) -> str:
        """SQLite's own check of all pages."""
        return "; ".join(str(row[0]) for row in connection.execute(text("PRAGMA integrity_check")))

    def size(self, connection: Connection) -> int:
        """Bytes of the file, its log left out."""
        pages = connection.execute(text("PRAGMA page_count")).scalar_one()
        return pages * connection.execute(text("PRAGMA page_size")).scalar_one()

    def close(self) -> None:
        """Close all connections."""
        self.readers.dispose()


def _write_ahead(path: Path) -> None:
    """Switches the database to WAL mode permanently. SQLite ignores the timeout here, so this function retries while
    another process (a backup, a shell) holds a lock. Raises StoreError."""
    connection = sqlite3.connect(path, timeout=0.0)
    try:
        for attempt in itertools.count():
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.Error as error:
                if "locked" not in str(error) or attempt * WAL_PAUSE >= BUSY_SECONDS:
                    raise StoreError(f"the database cannot be opened for writing: {plain(error)}") from error
                time.sleep(WAL_PAUSE)
    finally:
        connection.close()


def _engine(path: Path, read_only: bool) -> Engine:
    def connect() -> sqlite3.Connection:
        mode = "ro" if read_only else "rw"
        return sqlite3.connect(
            f"{path.resolve().as_uri()}?mode={mode}",
            uri=True,
            timeout=BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool, pool_size=8, max_overflow=8)

    @event.listens_for(engine, "connect")
    def configure(connection: Any, record: object) -> None:
        for pragma in ("foreign_keys=ON", "synchronous=NORMAL", "secure_delete=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # The driver's own transaction handling is off (isolation_level None): a writer takes its lock before it reads.
        writing = connection.get_execution_options().get("redraft_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")

    return engine
