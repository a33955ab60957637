"""The keys of a database in memory, by which a server tells who calls. Looking one up reads no row."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Mapping
from datetime import UTC, datetime

from service.core import ANYBODY, LOCAL, OWNER, Access, ApiKey, Caller, StoreError
from service.store.access.keys import CONFIGURED, Keys, Known, digest

log = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0
"""After so long at most a key that was made opens, and one that was revoked no longer does."""


class KeyRing:
    """Implements core.Doorkeeper. `refresh` has to be called every REFRESH_SECONDS; where the database does not answer, what
    was known stays.

    own: keys that settings give (server.api_key, server.operator_key). closed: a key is asked for even if none was ever made.
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
        """Let this token open everything as long as no key is asked for. From the first key on it opens nothing."""
        self._token = digest(token)

    @property
    def accepts_token(self) -> bool:
        """Whether the token opens everything now."""
        return self._token is not None and not self.asks

    @property
    def any(self) -> bool:
        """Whether there is a key, or was one."""
        return bool(self._own) or self._known.made > 0

    @property
    def several(self) -> bool:
        """Whether there is more than one key, or was: the draft has learnt from what others asked."""
        return len(self._own) + self._known.made > 1

    @property
    def asks(self) -> bool:
        """Whether callers need a key. Once one was made they always do: revoking the last one opens nothing."""
        return self._asks(self._known)

    def _asks(self, known: Known) -> bool:
        return self._closed or known.made > 0

    def refresh(self) -> None:
        """Read the database again."""
        try:
            self._known = self._keys.known()
        except StoreError as error:
            log.warning("keys cannot be read, those that were known stay: %s", error)

    def by_key(self, secret: str) -> Caller | None:
        """Who has this key, or token; None: nobody."""
        return self._by_hash(digest(secret), self._known)

    def by_session(self, secret: str) -> Caller | None:
        """Whose session of the page this is; None: nobody's, or what it was opened with opens nothing any more."""
        asked, key, known, now = digest(secret), None, self._known, datetime.now(UTC)
        for hash, key_hash, ends in known.sessions:
            if hmac.compare_digest(hash, asked) and ends > now:
                key = key_hash
        return None if key is None else self._by_hash(key, known)

    @property
    def without_key(self) -> Caller:
        """Who calls without a key."""
        return ANYBODY if self.asks else LOCAL

    def log_in(self, key: str) -> str | None:
        """Open a session of the page with a key, or the token. Returns its secret; None where the key opens nothing. Blocks.
        Raises StoreError."""
        if self.by_key(key) is None:
            return None
        session = self._keys.open_session(key)
        self.refresh()
        return session

    def log_out(self, session: str) -> None:
        """End a session of the page. Blocks. Raises StoreError."""
        self._keys.close_session(session)
        self.refresh()

    def _by_hash(self, asked: bytes, known: Known) -> Caller | None:
        found = None
        for hash, key in (*known.keys, *self._own):
            # All are compared, each in constant time.
            # A key of the settings may be one of the database too: it opens what either opens.
            if hmac.compare_digest(hash, asked) and (found is None or key.access > found.access):
                found = Caller(key.access, key.name)
        if self._token is not None and hmac.compare_digest(self._token, asked) and not self._asks(known):
            found = OWNER
        return found
