"""An in-memory copy of a database's keys for authenticating callers without reading rows."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Mapping
from datetime import UTC, datetime

from service.core import ANYBODY, LOCAL, OWNER, Access, ApiKey, Caller, StoreError
from service.store.access.keys import CONFIGURED, Keys, Known, digest

log = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0
"""Maximum delay after which a new key is accepted and a revoked one refused."""


class KeyRing:
    """Implements core.Doorkeeper. `refresh` must be called every REFRESH_SECONDS; while the database is unavailable,
    the known keys stay valid.

    own: keys from the settings (server.api_key, server.operator_key). closed: require a key even if none was ever created.
    """

    def __init__(self, keys: Keys, own: Mapping[Access, str] | None = None, *, closed: bool = False) -> None:
        self._keys = keys
        now = datetime.now(UTC)
        self._own = [
            (digest(secret), ApiKey(CONFIGURED[access], access, now)) for access, secret in (own or {}).items()
        ]
        self._closed = closed or bool(self._own)
        self._known = keys.known()
        self._token: bytes | None = None

    def accept_token(self, token: str) -> None:
        """Accepts this token for everything as long as no key is required. Once there is a key, it opens nothing."""
        self._token = digest(token)

    @property
    def accepts_token(self) -> bool:
        """Whether the token is accepted now."""
        return self._token is not None and not self.asks

    @property
    def any(self) -> bool:
        """Whether a key exists or has existed."""
        return bool(self._own) or self._known.made > 0

    @property
    def several(self) -> bool:
        """Whether more than one key exists or has existed: the draft then learnt from several callers."""
        return len(self._own) + self._known.made > 1

    @property
    def asks(self) -> bool:
        """Whether callers need a key. Once one was created they always do: revoking the last one opens nothing."""
        return self._asks(self._known)

    def _asks(self, known: Known) -> bool:
        return self._closed or known.made > 0

    def refresh(self) -> None:
        """Reads the database again."""
        try:
            self._known = self._keys.known()
        except StoreError as error:
            log.warning("the API keys cannot be read; the known ones stay valid: %s", error)

    def by_key(self, secret: str) -> Caller | None:
        """The caller with this key or token, or None."""
        return self._by_hash(digest(secret), self._known)

    def by_session(self, secret: str) -> Caller | None:
        """The caller with this session of the page, or None if it is unknown or its key is no longer valid."""
        asked, key, known, now = digest(secret), None, self._known, datetime.now(UTC)
        for hash, key_hash, ends in known.sessions:
            if hmac.compare_digest(hash, asked) and ends > now:
                key = key_hash
        return None if key is None else self._by_hash(key, known)

    @property
    def without_key(self) -> Caller:
        """The caller without a key."""
        return ANYBODY if self.asks else LOCAL

    def log_in(self, key: str) -> str | None:
        """Opens a session of the page with a key or the token. Returns its secret, or None for an invalid key. Blocks.
        Raises StoreError."""
        if self.by_key(key) is None:
            return None
        session = self._keys.open_session(key)
        self.refresh()
        return session

    def log_out(self, session: str) -> None:
        """Ends a session of the page. Blocks. Raises StoreError."""
        self._keys.close_session(session)
        self.refresh()

    def _by_hash(self, asked: bytes, known: Known) -> Caller | None:
        found = None
        for hash, key in (*known.keys, *self._own):
            # All are compared, each in constant time. A key in the settings may also be in the database: the higher
            # access counts.
            if hmac.compare_digest(hash, asked) and (found is None or key.access > found.access):
                found = Caller(key.access, key.name)
        if self._token is not None and hmac.compare_digest(self._token, asked) and not self._asks(known):
            found = OWNER
        return found
