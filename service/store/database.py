"""One database: many readers, one writer.

All writing of the process goes through one thread, and what the lifecycle writes goes ahead of what the recorder writes.
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
"""The newest migration: the revision this code is written for."""


def migrations() -> Path:
    """Where the migrations are: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "_migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


def upgrade(url: str) -> None:
    """Bring a database to the newest revision. SQLite's is created where there is none, its files this user's alone (0600); in
    PostgreSQL the database has to be there. Several processes may do so at once. Raises StoreError."""
    path = sqlite_path(url)
    try:
        if path is not None:
            private_folder(path.parent)
            os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o600))
            # SQLite gives the log and the shared memory beside a database the database's own permissions.
            make_private(path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm"))
        else:
            postgres.check(url)
        found = revision(url)
        if found != REVISION:
            _migrate(url)
            if found is not None:
                log.info("the database was brought from revision %s to %s", found, REVISION)
    except (SQLAlchemyError, sqlite3.Error, OSError, ImportError) as error:
        raise StoreError(f"the database cannot be brought up to date: {plain(error)}") from error


def _migrate(url: str) -> None:
    # Here alone: importing Alembic takes as long as importing SQLAlchemy.
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
        raise StoreError(f"the database is of another, probably newer version: {plain(error)}") from error


def revision(url: str) -> str | None:
    """The database's revision, None where it has none yet. Raises StoreError."""
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
    """The database and its revision, to be shown. Raises StoreError where it cannot be used."""
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
    """An open database at the revision this code knows. Raises StoreError otherwise.

    read_only: another process writes it (the training child); `write` is refused. member: the token of this process
    (store.processes.members), once it has joined those that share the database.
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
        """Run `work` in one write transaction on the writer's thread; it is committed when the future has its result.

        `work` runs again where nothing of it was committed and it may do better: it met other writers, or the connection was
        lost. It changes nothing but the database. urgent goes ahead of what is not. scrub: what `work` deletes leaves SQLite's
        write-ahead log too; StoreError, with the deletion committed, where a reader keeps that busy for too long. shared: other
        processes may do such writes meanwhile; all others are alone. by_member: refused once this process, which had joined,
        was given up. What `work` raises comes out of the future, SQL errors as StoreError; Outdated where a newer version has
        upgraded the database meanwhile.
        """
        future: Future[T] = Future()
        with self._gate:
            if self._closed or self._writer is None:
                future.set_exception(
                    StoreError("the database is closed" if self._closed else "opened for reading only")
                )
                return future
            self._jobs.put(_Job(0 if urgent else 1, next(self._order), work, future, scrub, shared, by_member))
        return future

    def write_own_row(self, work: Callable[[Connection], T]) -> T:
        """Run `work`, which changes nothing but this process's own row, without waiting for other writes, of this process or
        another. By who is no member too. Raises what `write` does; on SQLite it is a write like others."""
        if self.kind == "SQLite" or self._closed:
            return self.write(work, shared=True, by_member=False).result()
        try:
            with self.backend.writers.connect() as connection, connection.begin():
                self._check(connection, by_member=False)
                return work(connection)
        except SQLAlchemyError as error:
            raise StoreError(f"writing to the database failed: {plain(error)}") from error

    def close(self) -> None:
        """Write what is queued, then refuse. Idempotent."""
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
            except Exception as error:  # noqa: BLE001  (who waits for the write gets it)
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
                # What became of a COMMIT that nothing answered is asked for: it must not run twice.
                if sent is not None and error.connection_invalidated and self.backend.committed(sent[0]):
                    return sent[1]
                pause = self.backend.pause(error, attempt, time.monotonic() - started_at)
                if pause is None:
                    raise
                time.sleep(pause)
        raise AssertionError("unreachable")

    def _check(self, connection: Connection, *, by_member: bool) -> None:
        """Raises Outdated, StoreError where this process may not write."""
        token = self.member if by_member else None
        found, joined = connection.execute(_MAY_WRITE, {"token": token}).one()
        if found != REVISION:
            raise Outdated(
                f"the database was upgraded to revision {found}, this version knows {REVISION}: restart with that"
            )
        if token is not None and not joined:
            raise StoreError("this process did not answer for too long, and others of the database have given it up")


_MAY_WRITE = text(
    "SELECT version_num, EXISTS (SELECT 1 FROM members WHERE token = CAST(:token AS VARCHAR(32))) FROM alembic_version"
)


def integrity(database: Database) -> str:
    """`ok`, or what is wrong: with SQLite's pages, or with PostgreSQL's answer."""
    with database.read() as connection:
        return database.backend.integrity(connection)


def size_bytes(database: Database) -> int:
    """What it takes on disk."""
    with database.read() as connection:
        return database.backend.size(connection)
