"""The processes that share a database: one row each, renewed while the process lives. A removed process cannot write anything.

SQLite allows one at a time. All times are the database's, because the clocks of several machines differ.
"""

from __future__ import annotations

import os
import secrets
import socket
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, delete, func, insert, select, update

from service.core import DatabaseTaken, Provenance
from service.store.database import Database
from service.store.tables import erasures, members
from service.store.times import time_of, utc

RENEW_SECONDS = 5.0
FOLLOW_SECONDS = 0.5
"""Interval at which a process looks for decisions of others."""
LEASE_SECONDS = 25.0
"""A process that has not renewed its row for this long is removed."""


class Role(StrEnum):
    """SERVER: serves, and may train. TRAINER: trains for the servers of its pair. COMMAND: writes while no server is
    running."""

    SERVER = "server"
    TRAINER = "trainer"
    COMMAND = "command"


@dataclass(frozen=True, slots=True)
class HostProcess:
    """machine: equal for processes that see each other's process ids, which equal host names do not guarantee."""

    host: str
    machine: str
    pid: int

    @classmethod
    def here(cls) -> HostProcess:
        """This process."""
        host = socket.gethostname()
        parts = [host]
        with suppress(OSError):
            parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
            parts.append(str(Path("/proc/self/ns/pid").readlink()))
        if len(parts) == 1:
            # macOS: the number of a network card.
            parts.append(f"{uuid.getnode():x}")
        return cls(host, " ".join(parts), os.getpid())

    def sees_the_end_of(self, other: HostProcess) -> bool:
        """Whether that process has certainly ended. One with this process's own id ran before it."""
        if other.machine != self.machine:
            return False
        if other.pid == self.pid:
            return True
        try:
            os.kill(other.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # another user's
            pass
        return False


class Members:
    """This process among those that share a database. time: the database's."""

    def __init__(
        self,
        database: Database,
        role: Role = Role.SERVER,
        process: HostProcess | None = None,
        time: Callable[[Connection], datetime] = time_of,
    ) -> None:
        self._db = database
        self._role = role
        self._process = process or HostProcess.here()
        self._time = time
        self._token = ""
        self._who: Provenance | None = None
        self._trains = False

    @property
    def token(self) -> str:
        """Names this process in the rows of what it does; "" before it has joined. Another one after it was given up and has
        joined again."""
        return self._token

    @property
    def shared(self) -> bool:
        """Whether other processes may be members too."""
        return self._db.kind != "SQLite"

    def join(self) -> None:
        """Become a member, under a new token; from now on writes of this process fail while it is none. Processes that have
        ended, as far as that can be seen from here, and those that did not renew for LEASE_SECONDS are given up.

        Raises DatabaseTaken where another process serves from an SQLite database, and for a command where any does.
        """
        alone = not self.shared or self._role is Role.COMMAND

        def work(connection: Connection) -> None:
            now = self._time(connection)
            self._give_up(connection, now)
            self._token = secrets.token_hex(16)
            other = connection.execute(select(members).limit(1)).one_or_none()
            if alone and other is not None:
                left = LEASE_SECONDS - max((now - utc(other.renewed_at)).total_seconds(), 0.0)
                raise DatabaseTaken(
                    f"process {other.pid} on host {other.host} already serves from this database: stop it, or give this "
                    f"server another home or store.url (an owner that was killed is given up in {left:.0f} s)"
                )
            connection.execute(insert(members).values(**self._values(connection, now)))

        self._db.write(work, by_member=False).result()
        self._db.member = self._token

    def register_pair(self, who: Provenance, *, trains: bool) -> None:
        """Record which pair this process serves or trains. trains: it does the pair's runs, where it leads."""
        self._who, self._trains = who, trains

        def work(connection: Connection) -> None:
            values = self._values(connection, self._time(connection))
            connection.execute(update(members).where(members.c.token == self._token).values(**values))

        self._db.write(work).result()

    def renew(self) -> bool:
        """Renew the lease. False when this process was given up meanwhile: its run is lost, and texts that it holds may have
        been erased. It waits for no other write: a large erasure takes longer than a lease. Raises Outdated, StoreError."""

        def work(connection: Connection) -> bool:
            mine = update(members).where(members.c.token == self._token)
            return connection.execute(mine.values(renewed_at=self._time(connection))).rowcount == 1

        return self._db.write_own_row(work)

    def leave(self) -> None:
        """No member any more."""
        mine = delete(members).where(members.c.token == self._token)
        self._db.write(lambda connection: connection.execute(mine), by_member=False).result()
        self._db.member = None

    def remove_ended(self) -> int:
        """Remove members that have ended; how many."""
        with self._db.read() as connection:
            now = self._time(connection)
            if not [row for row in connection.execute(select(members)) if self._has_ended(row, now)]:
                return 0
        return self._db.write(lambda connection: self._give_up(connection, self._time(connection))).result()

    def leads(self) -> bool:
        """Whether this process leads its pair: it starts runs and comparisons. Trainers come first, then servers that train,
        then the one that joined first."""
        first = self._first()
        return first is not None and first.token == self._token

    def has_trainer(self) -> bool:
        """Whether any process does the runs of this pair."""
        first = self._first()
        return first is not None and first.trains

    def now(self) -> datetime:
        """The database's time."""
        with self._db.read() as connection:
            return self._time(connection)

    # --------------------------------------------------------------------------------------------------------- erasures

    def acknowledge_erasure(self, number: int) -> None:
        """This process has carried out the erasures up to this one."""
        mine = update(members).where(members.c.token == self._token).values(erased=number)
        self._db.write(lambda connection: connection.execute(mine), shared=True).result()

    def still_to_erase(self, number: int) -> list[HostProcess]:
        """The other members that hold texts and have not carried out this erasure yet."""
        behind = and_(members.c.token != self._token, members.c.erased < number, members.c.target.is_not(None))
        with self._db.read() as connection:
            now = self._time(connection)
            rows = connection.execute(select(members).where(behind)).all()
        return [_process(row) for row in rows if not self._has_ended(row, now)]

    # ----------------------------------------------------------------------------------------------------------- inside

    def _values(self, connection: Connection, now: datetime) -> dict[str, Any]:
        who = self._who
        return {
            "token": self._token,
            "role": self._role.value,
            "host": self._process.host,
            "machine": self._process.machine,
            "pid": self._process.pid,
            "target": who.target if who else None,
            "tokenizer": who.tokenizer if who else None,
            "draft": who.draft if who else None,
            "trains": self._trains,
            # It has loaded nothing yet, or is about to forget all.
            "erased": connection.execute(select(func.max(erasures.c.id))).scalar() or 0,
            "renewed_at": now,
        }

    def _first(self) -> Row[Any] | None:
        assert self._who is not None, "`register_pair` was not called"
        with self._db.read() as connection:
            now = self._time(connection)
            rows = connection.execute(select(members).where(_of(self._who))).all()
        living = [row for row in rows if not _lapsed(row, now)]
        return min(living, key=lambda row: (not row.trains, row.role != Role.TRAINER, row.id), default=None)

    def _give_up(self, connection: Connection, now: datetime) -> int:
        gone = [row.id for row in connection.execute(select(members)) if self._has_ended(row, now)]
        connection.execute(delete(members).where(members.c.id.in_(gone)))
        return len(gone)

    def _has_ended(self, row: Row[Any], now: datetime) -> bool:
        """Never this process itself: late as it is, it is at work."""
        if row.token == self._token:
            return False
        return _lapsed(row, now) or self._process.sees_the_end_of(_process(row))


def is_member(connection: Connection, token: str) -> bool:
    """Whether a process has not been given up."""
    return connection.execute(select(members.c.id).where(members.c.token == token)).scalar() is not None


def _lapsed(row: Row[Any], now: datetime) -> bool:
    return now - utc(row.renewed_at) > timedelta(seconds=LEASE_SECONDS)


def _process(row: Row[Any]) -> HostProcess:
    return HostProcess(row.host, row.machine, row.pid)


def _of(who: Provenance) -> ColumnElement[bool]:
    return and_(members.c.target == who.target, members.c.tokenizer == who.tokenizer, members.c.draft == who.draft)
