"""PostgreSQL through psycopg 3: a shared server whose connections can break.

Write transactions read before they write and assume a single writer. So each transaction holds an advisory lock of the
database exclusively; recorders, which only add generations, share it.
"""

from __future__ import annotations

import itertools
import random
import time
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import NullPool, Pool, QueuePool

from service.core import StoreError
from service.store.backends.backend import parsed, plain

OLDEST = 13
"""The oldest supported version: it can tell whether a transaction was committed (pg_xact_status)."""
CONNECT_SECONDS = 5
POOL = 4
"""Connections that stay open; as many again are opened on demand. The server's limit, 100 by default, is for all processes."""
RETRY_SECONDS = 10.0
LONGEST_PAUSE = 0.5
LOCK_SECONDS = 10
"""Maximum wait of a transaction for other writers."""
IDLE_SECONDS = 15
"""Time after which the server ends a write transaction of a silent process, which may be stopped or on a dead host.
Meanwhile all others wait for its lock, even to renew their leases, which last longer (processes.members)."""
MIGRATION_IDLE_SECONDS = 60
"""The same for a migration, which computes between its statements."""
CONFLICTS = {"40001", "40P01", "55P03"}
"""SQLSTATEs of transactions aborted because of another one: serialization_failure, deadlock_detected, lock_not_available."""
TAKEN = "23505"
"""SQLSTATE unique_violation. All code that could cause one reads first, so another writer interfered: on a retry it
sees that row."""
WRITING = 0x7265647261667421
"""The advisory lock of processes that write or migrate the database."""


class Postgres:
    """backend.Backend over a PostgreSQL database. read_only: no transaction may write."""

    def __init__(self, url: str, *, read_only: bool) -> None:
        self._engine = make_engine(url)
        self.readers = self._engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        # Each statement sees everything committed before it: after the wait for the lock, all other writes.
        self.writers = self._engine.execution_options(isolation_level="READ COMMITTED", postgresql_readonly=read_only)

    def begin(self, connection: Connection, shared: bool) -> None:
        """Takes the lock, which the end of the transaction releases."""
        lock = "pg_advisory_xact_lock_shared" if shared else "pg_advisory_xact_lock"
        _take(connection, lock, lock_timeout=LOCK_SECONDS, idle_in_transaction_session_timeout=IDLE_SECONDS)

    def pause(self, error: DBAPIError, attempt: int, waited: float) -> float | None:
        """Retries after conflicts with other writers and lost connections."""
        state = _state(error)
        again = attempt < 2 if state == TAKEN else state in CONFLICTS or _lost(error)
        if not again or waited > RETRY_SECONDS:
            return None
        # Random, so that conflicting transactions do not meet again.
        return random.uniform(0.5, 1.0) * _backoff(attempt)

    def transaction(self, connection: Connection) -> str | None:
        """Its number; None: it has written nothing."""
        return connection.execute(text("SELECT CAST(pg_current_xact_id_if_assigned() AS text)")).scalar()

    def committed(self, transaction: str) -> bool:
        """The server's answer, once it responds and the transaction is over."""
        status = text("SELECT pg_xact_status(CAST(CAST(:number AS text) AS xid8))")
        end = time.monotonic() + RETRY_SECONDS
        for attempt in itertools.count():
            with suppress(SQLAlchemyError), self.readers.connect() as connection:
                found = connection.execute(status, {"number": transaction}).scalar()
                if found in {"committed", "aborted"}:
                    return found == "committed"
            if time.monotonic() > end:
                break
            time.sleep(_backoff(attempt))
        raise StoreError(
            "the connection was lost during a commit, and the database cannot tell whether the write was committed"
        )

    def scrub(self) -> None:
        """Does nothing: deleted rows cannot be read any more, and autovacuum removes them."""

    def integrity(self, connection: Connection) -> str:
        """Checks that the server answers; checking its pages is left to the operator (pg_amcheck)."""
        return "ok" if connection.execute(text("SELECT 1")).scalar() == 1 else "no answer"

    def size(self, connection: Connection) -> int:
        """Bytes of the whole database."""
        return connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one()

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()


def make_engine(url: str, poolclass: type[Pool] = QueuePool) -> Engine:
    """Connections compatible with poolers in transaction mode: no prepared statements, no session settings. URL
    parameters (`?sslmode=...`) are passed to libpq. Raises StoreError without a driver."""
    found = parsed(url)
    libpq = {
        "application_name": "redraft",
        "client_encoding": "utf8",
        "connect_timeout": str(CONNECT_SECONDS),
        # Detects a dead server within half a minute instead of a quarter of an hour.
        "keepalives_idle": "15",
        "keepalives_interval": "5",
        "keepalives_count": "3",
        "tcp_user_timeout": "30000",
    }
    sizes: dict[str, Any] = {} if poolclass is NullPool else {"pool_size": POOL, "max_overflow": POOL}
    try:
        return create_engine(
            found.set(query={**libpq, **found.query}),
            poolclass=poolclass,
            pool_pre_ping=True,
            connect_args={"prepare_threshold": None},
            use_native_hstore=False,
            # Keeps prompts out of errors.
            hide_parameters=True,
            **sizes,
        )
    except ImportError as error:
        raise StoreError(f"PostgreSQL needs a driver: pip install 'redraft[postgres]' ({plain(error)})") from error


def check(url: str) -> None:
    """Raises StoreError if a database cannot hold the log: an old server, or an encoding other than UTF-8."""
    engine = make_engine(url, NullPool)
    with engine.connect() as connection:
        version = int(connection.execute(text("SHOW server_version_num")).scalar_one()) // 10_000
        encoding = connection.execute(text("SHOW server_encoding")).scalar()
    if version < OLDEST:
        raise StoreError(f"PostgreSQL is version {version}, but {OLDEST} or later is required")
    if encoding != "UTF8":
        raise StoreError(f"the database's encoding is {encoding}: create one with CREATE DATABASE ... ENCODING 'UTF8'")


def begin_migration(connection: Connection) -> None:
    """Waits without a limit for other migrations and writers, then runs exclusively."""
    _take(connection, "pg_advisory_xact_lock", idle_in_transaction_session_timeout=MIGRATION_IDLE_SECONDS)


def _take(connection: Connection, lock: str, **seconds: float) -> None:
    """Takes the lock with limits that, like the lock, end with this transaction, as poolers require."""
    limits = "".join(f"set_config('{name}', '{value}s', true), " for name, value in seconds.items())
    connection.execute(text(f"SELECT {limits}{lock}(:key)"), {"key": WRITING})


def _state(error: DBAPIError) -> str | None:
    return getattr(error.orig, "sqlstate", None)


def _lost(error: DBAPIError) -> bool:
    """Whether there is no connection any more."""
    not_made = isinstance(error, OperationalError) and error.statement is None
    return error.connection_invalidated or not_made


def _backoff(attempt: int) -> float:
    return min(0.01 * 2**attempt, LONGEST_PAUSE)
