"""API keys and the page's sessions. The database holds SHA-256 hashes of them alone: both are random, 256 bits each, so that a
slow hash would add nothing."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection, Row, delete, insert, select, update

from service.core import Access, ApiKey, BadRequest, Conflict, NotFound
from service.store.database import Database
from service.store.tables import api_keys, page_sessions
from service.store.times import time_of, utc

PREFIX = "rd-"
"""Of every key that is made here, so that scanners of repositories can know one."""
SECRET_BYTES = 32
SESSION_HOURS = 12
MAX_SESSIONS = 32
"""Open sessions of one key. Each request with a cookie is compared with all of them."""
CONFIGURED = {Access.CLIENT: "api-key", Access.OPERATOR: "operator-key"}
"""Names of the keys that settings give. Who shares a key's name would share its cached prefixes, look-ups and erasures."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Known:
    """What opens something now, by hash. made: how many keys were ever made, revoked ones too."""

    made: int = 0
    keys: tuple[tuple[bytes, ApiKey], ...] = ()
    sessions: tuple[tuple[bytes, bytes, datetime], ...] = ()
    """With the hashes of their keys, and their ends."""


def digest(secret: str) -> bytes:
    """The hash of a key or session, as it is stored."""
    return hashlib.sha256(secret.encode()).digest()


class Keys:
    """The keys of a database. Writes wait until they are committed."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def create(self, name: str, access: Access) -> str:
        """Make a key; its secret, which is shown this once. Raises BadRequest for a name that is none, Conflict where there is
        or was a key of this name, or settings may give one."""
        if not NAME.fullmatch(name):
            raise BadRequest("names of keys are 1 to 64 letters, digits, dots, dashes and underscores", field="name")
        if name in CONFIGURED.values():
            raise Conflict(f"{name} is the name of a key that settings give")
        secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)

        def work(connection: Connection) -> None:
            if connection.execute(select(api_keys.c.name).where(api_keys.c.name == name)).first() is not None:
                raise Conflict(f"there is or was a key named {name}: names are used once")
            made = {"role": access.role, "hash": digest(secret), "created_at": time_of(connection)}
            connection.execute(insert(api_keys).values(name=name, **made))

        self._db.write(work).result()
        return secret

    def all(self) -> Sequence[ApiKey]:
        """Every key, revoked ones too, in the order in which they were made."""
        with self._db.read() as connection:
            rows = connection.execute(select(api_keys).order_by(api_keys.c.created_at, api_keys.c.name)).all()
        return [_key(row) for row in rows]

    def revoke(self, name: str) -> ApiKey:
        """End a key and its sessions. Idempotent. Raises NotFound."""

        def work(connection: Connection) -> ApiKey:
            this = api_keys.c.name == name
            open_ = this & api_keys.c.revoked_at.is_(None)
            connection.execute(update(api_keys).where(open_).values(revoked_at=time_of(connection)))
            row = connection.execute(select(api_keys).where(this)).first()
            if row is None:
                raise NotFound(f"there is no key named {name}")
            connection.execute(delete(page_sessions).where(page_sessions.c.key_hash == row.hash))
            return _key(row)

        return self._db.write(work).result()

    def known(self) -> Known:
        """What opens something now."""
        with self._db.read() as connection:
            now = time_of(connection)
            keys = connection.execute(select(api_keys)).all()
            sessions = connection.execute(select(page_sessions).where(page_sessions.c.expires_at > now)).all()
        return Known(
            made=len(keys),
            keys=tuple((row.hash, _key(row)) for row in keys if row.revoked_at is None),
            sessions=tuple((row.hash, row.key_hash, utc(row.expires_at)) for row in sessions),
        )

    def open_session(self, key: str) -> str:
        """Open a session of the page with the key of this secret; the session's secret. It is worth as much as the key, and no
        longer. Removes sessions that have ended, and the oldest ones of this key beyond MAX_SESSIONS."""
        secret = secrets.token_urlsafe(SECRET_BYTES)

        def work(connection: Connection) -> None:
            now = time_of(connection)
            connection.execute(delete(page_sessions).where(page_sessions.c.expires_at <= now))
            of_key = page_sessions.c.key_hash == digest(key)
            newest = page_sessions.c.expires_at.desc()
            known = connection.scalars(select(page_sessions.c.hash).where(of_key).order_by(newest)).all()
            connection.execute(delete(page_sessions).where(page_sessions.c.hash.in_(known[MAX_SESSIONS - 1 :])))
            made = {"hash": digest(secret), "key_hash": digest(key), "expires_at": now + timedelta(hours=SESSION_HOURS)}
            connection.execute(insert(page_sessions).values(made))

        self._db.write(work).result()
        return secret

    def close_session(self, secret: str) -> None:
        """End a session. Idempotent."""
        this = delete(page_sessions).where(page_sessions.c.hash == digest(secret))
        self._db.write(lambda connection: connection.execute(this).rowcount).result()


def _key(row: Row[tuple[object, ...]]) -> ApiKey:
    revoked = None if row.revoked_at is None else utc(row.revoked_at)
    return ApiKey(row.name, Access[row.role.upper()], utc(row.created_at), revoked)
