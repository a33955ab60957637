"""One database: many readers, one writer.

All writes of the process go through one thread. Writes of the training loop take precedence over those of the recorder.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, create_engine, inspect, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from service.core import Outdated, RedraftError, StoreError
from service.store.backends import postgres
from service.store.backends.backend import Backend, plain, shown, sqlite_path
from service.store.backends.postgres import Postgres
from service.store.backends.sqlite import Sqlite
from service.store.permissions import make_private, private_folder

T = TypeVar("T")

log = logging.getLogger(__name__)

REVISION = "0017"
"""The newest migration, which this code requires."""


def migrations() -> Path:
    """The folder of the migrations: next to the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "_migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


def upgrade(url: str) -> None:
    """Upgrades a database to the newest revision. An SQLite database is created if it does not exist, with files
    private to this user (0600); a PostgreSQL database must exist. Several processes may call this at once. Raises
    StoreError."""
    path = sqlite_path(url)
    try:
        if path is not None:
            private_folder(path.parent)
            os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o600))
            # SQLite gives the write-ahead log and the shared-memory file the database's own permissions.
            make_private(path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm"))
        else:
            postgres.check(url)
        found = revision(url)
        if found != REVISION:
            _migrate(url)
            if found is not None:
                log.info("upgraded the database from revision %s to %s", found, REVISION)
    except (SQLAlchemyError, sqlite3.Error, OSError, ImportError) as error:
        raise StoreError(f"the database cannot be upgraded: {plain(error)}") from error


def _migrate(url: str) -> None:
    # Imported here because Alembic takes as long to import as SQLAlchemy.
    from alembic import command
    from alembic.config import Config
    from alembic.util.exc import CommandError

    config = Config()
    config.set_main_option("script_location", str(migrations()))
    # Alembic's configuration interpolates percent signs.
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise StoreError(f"the database has another, probably newer version: {plain(error)}") from error


def revision(url: str) -> str | None:
    """The database's revision, None if it has none yet. Raises StoreError."""
    path = sqlite_path(url)
    if path is not None and not path.is_file():
        return None
    try:
        engine = postgres.make_engine(url, NullPool) if path is None else create_engine(url)
    except (SQLAlchemyError, ImportError) as error:
        raise StoreError(f"the database cannot be opened: {plain(error)}") from error
    try:
        with engine.connect() as connection:
            if not inspect(connection).has_table("alembic_version"):
                return None
            return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    except SQLAlchemyError as error:
        raise StoreError(f"the database cannot be read: {plain(error)}") from error
    finally:
        engine.dispose()


def describe(url: str) -> str:
    """The database and its revision, for display. Raises StoreError if it cannot be used."""
    try:
        if sqlite_path(url) is None:
            postgres.check(url)
    except SQLAlchemyError as error:
        raise StoreError(f"the database cannot be read: {plain(error)}") from error
    found = revision(url)
    return f"{shown(url)}, {'not set up yet' if found is None else f'at revision {found}'}"


@dataclass(order=True)
class _Job:
    priority: int
    order: int
    work: Callable[[Connection], Any] = field(compare=False)
    future: Future[Any] = field(compare=False)
    scrub: bool = field(compare=False, default=False)
    shared: bool = field(compare=False, default=False)
    by_member: bool = field(compare=False, default=True)


class Database:
    """An open database at the revision this code requires. Raises StoreError otherwise.

    read_only: for processes that must not write (the training child); `write` is refused. member: the token of this
    process (store.processes.members) once it has joined.
    """

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        found = revision(url)
        if found != REVISION:
            state = "has not been set up" if found is None else f"is at revision {found}, this version needs {REVISION}"
            raise StoreError(f"the database {state}: run `redraft db upgrade`")
        self.url = url
        self.read_only = read_only
        self.member: str | None = None
        path = sqlite_path(url)
        self.kind = "SQLite" if path is not None else "PostgreSQL"
        self.backend: Backend = (
            Postgres(url, read_only=read_only) if path is None else Sqlite(path, read_only=read_only)
        )
        self._jobs: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._order = itertools.count()
        self._closed = False
        self._gate = threading.Lock()
        self._writer: threading.Thread | None = None
        if not read_only:
            self._writer = threading.Thread(target=self._run, name="redraft-writer", daemon=True)
            self._writer.start()

    @contextlib.contextmanager
    def read(self) -> Generator[Connection]:
        """A short read transaction on one snapshot, from any thread. Raises StoreError."""
        if self._closed:
            raise StoreError("the database is closed")
        try:
            with self.backend.readers.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise StoreError(f"reading the database failed: {plain(error)}") from error

    def write(
        self,
        work: Callable[[Connection], T],
        *,
        urgent: bool = True,
        scrub: bool = False,
        shared: bool = False,
        by_member: bool = True,
    ) -> Future[T]:
        """Runs `work` in one write transaction on the writer's thread; it is committed when the future has its result.

        `work` is repeated if nothing was committed and a retry may succeed: after conflicts with other writers or a
        lost connection. It must change nothing but the database. urgent: runs before writes that are not. scrub: also
        removes deleted data from SQLite's write-ahead log; StoreError, with the deletion committed, if a reader blocks
        that for too long. shared: may run concurrently with such writes of other processes; all other writes are
        exclusive. by_member: refused once this process has joined and was then removed. Exceptions from `work` are set
        on the future, SQL errors as StoreError; Outdated if a newer version has upgraded the database in the meantime.
        """
        future: Future[T] = Future()
        with self._gate:
            if self._closed or self._writer is None:
                future.set_exception(
                    StoreError("the database is closed" if self._closed else "the database is open for reading only")
                )
                return future
            self._jobs.put(_Job(0 if urgent else 1, next(self._order), work, future, scrub, shared, by_member))
        return future

    def write_own_row(self, work: Callable[[Connection], T]) -> T:
        """Runs `work`, which changes only this process's own row, without waiting for other writes of any process. Also
        allowed for non-members. Raises what `write` raises; on SQLite it is an ordinary write."""
        if self.kind == "SQLite" or self._closed:
            return self.write(work, shared=True, by_member=False).result()
        try:
            with self.backend.writers.connect() as connection, connection.begin():
                self._check(connection, by_member=False)
                return work(connection)
        except SQLAlchemyError as error:
            raise StoreError(f"writing to the database failed: {plain(error)}") from error

    def close(self) -> None:
        """Completes queued writes, then refuses new ones. Idempotent."""
        with self._gate:
            if self._closed:
                return
            self._closed = True
            if self._writer is not None:
                self._jobs.put(_Job(2, next(self._order), lambda connection: None, Future()))
        if self._writer is not None:
            self._writer.join()
        self.backend.close()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job.priority == 2:
                return
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                result = self._transact(job)
                if job.scrub and result:
                    self.backend.scrub()
            except RedraftError as error:
                job.future.set_exception(error)
            except SQLAlchemyError as error:
                job.future.set_exception(StoreError(f"writing to the database failed: {plain(error)}"))
            except Exception as error:  # noqa: BLE001  (passed to the caller that waits for the write)
                job.future.set_exception(error)
            else:
                job.future.set_result(result)

    def _transact(self, job: _Job) -> Any:
        started_at = time.monotonic()
        for attempt in itertools.count():
            sent: tuple[str, Any] | None = None
            try:
                with self.backend.writers.connect() as connection, connection.begin() as transaction:
                    self.backend.begin(connection, job.shared)
                    self._check(connection, by_member=job.by_member)
                    result = job.work(connection)
                    if (name := self.backend.transaction(connection)) is not None:
                        sent = name, result
                    transaction.commit()
                    return result
            except DBAPIError as error:
                # If a COMMIT got no answer, ask the server for its outcome: the work must not run twice.
                if sent is not None and error.connection_invalidated and self.backend.committed(sent[0]):
                    return sent[1]
                pause = self.backend.pause(error, attempt, time.monotonic() - started_at)
                if pause is None:
                    raise
                time.sleep(pause)
        raise AssertionError("unreachable")

    def _check(self, connection: Connection, *, by_member: bool) -> None:
        """Raises Outdated or StoreError if this process may not write."""
        token = self.member if by_member else None
        found, joined = connection.execute(_MAY_WRITE, {"token": token}).one()
        if found != REVISION:
            raise Outdated(
                f"the database was upgraded to revision {found}, this version requires {REVISION}: restart with the new version"
            )
        if token is not None and not joined:
            raise StoreError("this process missed its lease and was removed from the database's members")


_MAY_WRITE = text(
    "SELECT version_num, EXISTS (SELECT 1 FROM members WHERE token = CAST(:token AS VARCHAR(32))) FROM alembic_version"
)


def integrity(database: Database) -> str:
    """`ok`, or what is wrong with SQLite's pages or PostgreSQL's answer."""
    with database.read() as connection:
        return database.backend.integrity(connection)


def size_bytes(database: Database) -> int:
    """Size on disk in bytes."""
    with database.read() as connection:
        return database.backend.size(connection)
