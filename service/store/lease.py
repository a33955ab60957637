"""Which server owns a database: one row with its process and host, renewed while it lives.

Two servers on one database would each take the other's training run for one that was left behind.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Connection, select, update

from service.core import DatabaseTaken
from service.store.database import Database
from service.store.rows import utc
from service.store.tables import server_lease

RENEW_SECONDS = 5.0
LEASE_SECONDS = 30.0
"""An owner on another machine that has not renewed for so long is gone. Takes clocks to agree within some seconds."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A server process. machine: equal for processes that see each other's ids, which equal host names do not promise."""

    host: str
    machine: str
    pid: int

    @classmethod
    def here(cls) -> Owner:
        """This process."""
        host = socket.gethostname()
        parts = [host]
        with suppress(OSError):
            parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
            parts.append(str(Path("/proc/self/ns/pid").readlink()))
        return cls(host, " ".join(parts), os.getpid())


class Lease:
    """A server's hold on its database. Raises DatabaseTaken from `acquire` while another one lives."""

    def __init__(
        self, database: Database, owner: Owner | None = None, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._db = database
        self._owner = owner or Owner.here()
        self._token = secrets.token_hex(16)
        self._now = now

    def acquire(self) -> None:
        """Become the owner. An owner whose process has ended is replaced at once where that can be seen from here, otherwise
        after LEASE_SECONDS without a renewal."""

        def work(connection: Connection) -> None:
            row = connection.execute(select(server_lease).with_for_update()).one()
            if row.token is not None:
                held = Owner(row.host, row.machine, row.pid)
                # Another machine's clock may be ahead.
                silent = max((self._now() - utc(row.renewed_at)).total_seconds(), 0.0)
                left = LEASE_SECONDS - silent
                if left > 0 and not self._gone(held):
                    raise DatabaseTaken(
                        f"process {held.pid} on host {held.host} already serves from this database: stop it, or give this "
                        f"server another home or store.url (an owner that was killed is given up in {left:.0f} s)"
                    )
            connection.execute(
                update(server_lease).values(
                    token=self._token,
                    host=self._owner.host,
                    machine=self._owner.machine,
                    pid=self._owner.pid,
                    renewed_at=self._now(),
                )
            )

        self._db.write(work).result()

    def renew(self) -> bool:
        """Say that the owner lives; False when another server owns the database now."""

        def work(connection: Connection) -> bool:
            mine = update(server_lease).where(server_lease.c.token == self._token)
            return connection.execute(mine.values(renewed_at=self._now())).rowcount == 1

        return self._db.write(work).result()

    def release(self) -> None:
        """Free the database, unless another server owns it."""
        nobody = {"token": None, "host": None, "machine": None, "pid": None, "renewed_at": None}
        mine = update(server_lease).where(server_lease.c.token == self._token).values(**nobody)
        self._db.write(lambda connection: connection.execute(mine)).result()

    def _gone(self, held: Owner) -> bool:
        """Whether that process has surely ended. One with this very id was before this one."""
        if held.machine != self._owner.machine:
            return False
        if held.pid == self._owner.pid:
            return True
        try:
            os.kill(held.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # another user's
            pass
        return False
