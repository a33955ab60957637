"""One database: many readers, one writer.

"database is locked" is not cured by WAL and a timeout alone: a transaction that reads and then writes fails at once. Here
all writing of the process goes through one thread, every write transaction begins IMMEDIATE, and what the lifecycle writes
goes ahead of what the recorder writes.
"""

from __future__ import annotations

import contextlib
import itertools
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

from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from service.core import RedraftError, StoreError
from service.store.files import make_private, private_folder

T = TypeVar("T")

REVISION = "0009"
"""The newest migration: the revision this code is written for."""
BUSY_SECONDS = 5.0
RETRIES = 5
WAL_PAUSE = 0.05


def migrations() -> Path:
    """Where the migrations are: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "_migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


def upgrade(url: str) -> None:
    """Create the database where there is none and bring it to the newest revision; SQLite's files are this user's alone
    (0600). Raises StoreError."""
    path = sqlite_path(url)
    try:
        if path is not None:
            private_folder(path.parent)
            os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o600))
            # SQLite gives the log and the shared memory beside a database the database's own permissions.
            make_private(path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm"))
        if revision(url) != REVISION:
            _migrate(url)
    except (SQLAlchemyError, sqlite3.Error, OSError, ImportError) as error:
        raise StoreError(f"the database cannot be brought up to date: {_plain(error)}") from error


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
        raise StoreError(f"the database is of another, probably newer version: {_plain(error)}") from error


def revision(url: str) -> str | None:
    """The database's revision, None where it has none yet."""
    if (path := sqlite_path(url)) is not None and not path.is_file():
        return None
    try:
        engine = create_engine(url)
    except (SQLAlchemyError, ImportError) as error:
        raise StoreError(f"the database cannot be opened: {_plain(error)}") from error
    try:
        with engine.connect() as connection:
            if not inspect(connection).has_table("alembic_version"):
                return None
            return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    except SQLAlchemyError as error:
        raise StoreError(f"the database cannot be read: {_plain(error)}") from error
    finally:
        engine.dispose()


def shown(url: str) -> str:
    """The database as it may be shown: a file's path, or the URL without its password. Raises StoreError."""
    path = sqlite_path(url)
    return str(path) if path is not None else make_url(url).render_as_string(hide_password=True)


def sqlite_path(url: str) -> Path | None:
    """The file of an SQLite database, None for other kinds. Raises StoreError."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StoreError("the database's URL (store.url) is not one, such as sqlite:////folder/redraft.db") from error
    if parsed.get_backend_name() != "sqlite":
        return None
    if not parsed.database or parsed.database == ":memory:":
        raise StoreError("the database must be a file: several processes read it")
    return Path(parsed.database)


def _plain(error: BaseException) -> str:
    return str(getattr(error, "orig", None) or error).splitlines()[0]


@dataclass(order=True)
class _Job:
    priority: int
    order: int
    work: Callable[[Connection], Any] = field(compare=False)
    future: Future[Any] = field(compare=False)
    scrub: bool = field(compare=False, default=False)


class Database:
    """An open database at the revision this code knows. Raises StoreError otherwise.

    read_only: another process writes it (the training child); `write` is refused.
    """

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        found = revision(url)
        if found != REVISION:
            state = "has not been set up" if found is None else f"is at revision {found}, this version needs {REVISION}"
            raise StoreError(f"the database {state}: run `redraft db upgrade`")
        self.url = url
        self.read_only = read_only
        if not read_only and (path := sqlite_path(url)) is not None:
            _write_ahead(path)
        self._engine = _engine(url, read_only)
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
        """A short read transaction, from any thread. Raises StoreError."""
        try:
            with self._engine.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise StoreError(f"reading the database failed: {_plain(error)}") from error

    def write(self, work: Callable[[Connection], T], *, urgent: bool = True, scrub: bool = False) -> Future[T]:
        """Run `work` in one write transaction on the writer's thread; it is committed when the future has its result.

        urgent goes ahead of what is not. scrub: what `work` deletes leaves the write-ahead log too; StoreError, with the
        deletion committed, where a reader keeps it busy for too long. What `work` raises comes out of the future, SQL errors as
        StoreError.
        """
        future: Future[T] = Future()
        with self._gate:
            if self._closed or self._writer is None:
                future.set_exception(
                    StoreError("the database is closed" if self._closed else "opened for reading only")
                )
                return future
            self._jobs.put(_Job(0 if urgent else 1, next(self._order), work, future, scrub))
        return future

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
        self._engine.dispose()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job.priority == 2:
                return
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                result = self._transact(job.work)
                if job.scrub and result:
                    self._empty_log()
            except RedraftError as error:
                job.future.set_exception(error)
            except SQLAlchemyError as error:
                job.future.set_exception(StoreError(f"writing to the database failed: {_plain(error)}"))
            except Exception as error:  # noqa: BLE001  (who waits for the write gets it)
                job.future.set_exception(error)
            else:
                job.future.set_result(result)

    def _transact(self, work: Callable[[Connection], T]) -> T:
        for attempt in range(RETRIES):
            try:
                with self._engine.connect().execution_options(redraft_write=True) as connection, connection.begin():
                    return work(connection)
            except OperationalError as error:
                # Another process may hold the lock for longer than the timeout (a backup, a shell).
                if "locked" not in str(error.orig) or attempt == RETRIES - 1:
                    raise
                time.sleep(0.05 * 2**attempt)
        raise AssertionError("unreachable")

    def _empty_log(self) -> None:
        """The log keeps pages as they were before a deletion, until it is written into the database and cut. Raises StoreError
        where it could not be."""
        if sqlite_path(self.url) is None:
            return
        try:
            with self._engine.connect() as connection:
                ((busy, *_),) = connection.connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"deleted, but the write-ahead log could not be cut: {error}") from error
        if busy:
            raise StoreError("deleted, but the write-ahead log still holds it, for somebody reads it: delete again")


def _write_ahead(path: Path) -> None:
    """Make it a WAL database, which it then stays. SQLite does not wait for a lock here, whatever the timeout: whoever
    holds one (a backup, a shell) is waited for by hand. Raises StoreError."""
    connection = sqlite3.connect(path, timeout=0.0)
    try:
        for attempt in itertools.count():
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.Error as error:
                if "locked" not in str(error) or attempt * WAL_PAUSE >= BUSY_SECONDS:
                    raise StoreError(f"the database cannot be opened for writing: {_plain(error)}") from error
                time.sleep(WAL_PAUSE)
    finally:
        connection.close()


def _engine(url: str, read_only: bool) -> Engine:
    path = sqlite_path(url)
    if path is None:
        return create_engine(url, pool_pre_ping=True)

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


def integrity(database: Database) -> str:
    """SQLite's own check: "ok", or what is wrong. Other databases: that they answer."""
    with database.read() as connection:
        if connection.dialect.name != "sqlite":
            return "ok" if connection.execute(text("SELECT 1")).scalar() == 1 else "no answer"
        return "; ".join(str(row[0]) for row in connection.execute(text("PRAGMA integrity_check")))
