"""API keys and the page's sessions. The database only holds their SHA-256 hashes: both are random with 256 bits, so a
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
"""Prefix of every generated key, so that secret scanners can recognise it."""
SECRET_BYTES = 32
SESSION_HOURS = 12
MAX_SESSIONS = 32
"""Maximum open sessions per key. Each request with a cookie is compared with all of them."""
CONFIGURED = {Access.CLIENT: "api-key", Access.OPERATOR: "operator-key"}
"""Names of the keys from the settings. They are reserved: callers with the same key name share prefixes, prompt lookup
and erasures."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Known:
    """The currently valid keys and sessions, by hash. made: number of keys ever created, including revoked ones."""

    made: int = 0
    keys: tuple[tuple[bytes, ApiKey], ...] = ()
    sessions: tuple[tuple[bytes, bytes, datetime], ...] = ()
    """Sessions with the hashes of their keys and their expiry times."""


def digest(secret: str) -> bytes:
    """The hash of a key or session in its stored form."""
    return hashlib.sha256(secret.encode()).digest()


class Keys:
    """The keys of a database. Writes wait until they are committed."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def create(self, name: str, access: Access) -> str:
        """Creates a key and returns its secret, which is shown only once. Raises BadRequest for an invalid name,
        Conflict if a key of this name exists, existed or may come from the settings."""
        if not NAME.fullmatch(name):
            raise BadRequest("key names are 1 to 64 letters, digits, dots, dashes and underscores", field="name")
        if name in CONFIGURED.values():
            raise Conflict(f"{name} is reserved for a key from the settings")
        secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)

        def work(connection: Connection) -> None:
            if connection.execute(select(api_keys.c.name).where(api_keys.c.name == name)).first() is not None:
                raise Conflict(f"a key named {name} exists or existed: names cannot be reused")
            made = {"role": access.role, "hash": digest(secret), "created_at": time_of(connection)}
            connection.execute(insert(api_keys).values(name=name, **made))

        self._db.write(work).result()
        return secret

    def all(self) -> Sequence[ApiKey]:
        """Every key, including revoked ones, in order of creation."""
        with self._db.read() as connection:
            rows = connection.execute(select(api_keys).order_by(api_keys.c.created_at, api_keys.c.name)).all()
        return [_key(row) for row in rows]

    def revoke(self, name: str) -> ApiKey:
        """Revokes a key and ends its sessions. Idempotent. Raises NotFound."""

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
        """The currently valid keys and sessions."""
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
        """Opens a session of the page with this key and returns its secret. The session has the key's access and ends
        with it at the latest. Removes expired sessions, and this key's oldest ones beyond MAX_SESSIONS."""
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
        """Ends a session. Idempotent."""
        this = delete(page_sessions).where(page_sessions.c.hash == digest(secret))
        self._db.write(lambda connection: connection.execute(this).rowcount).result()


def _key(row: Row[tuple[object, ...]]) -> ApiKey:
    revoked = None if row.revoked_at is None else utc(row.revoked_at)
    return ApiKey(row.name, Access[row.role.upper()], utc(row.created_at), revoked)
