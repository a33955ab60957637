"""Finds the user message that distinguishes a conversation from others.

The split into training and held-out texts, and the intervals of gate and watch, group texts by conversation. A client
may start every conversation with the same messages: instructions, examples, a form. Such an opening does not identify
the conversation; the first message after it does. A continued chat keeps its distinguishing message and its side of the
split.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

COMMON = 8
"""Number of different continuations that make an opening common. The conversations before count as one."""
MAX_OPENINGS = 8192
"""Maximum number of remembered openings; the least recently used are dropped."""


class Openings:
    """Remembers how conversations continued after their first user messages, as keyed hashes: they reveal no text and
    do not outlive the process. Thread-safe."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._next: OrderedDict[bytes, set[bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def distinguishing(self, messages: Sequence[str]) -> str:
        """The first of a conversation's user messages that is not part of a common opening; "" if there is none."""
        opening, at = b"", 0
        with self._lock:
            for i, (message, following) in enumerate(pairwise(messages), start=1):
                opening = self._hash(opening, message)
                if self._common(opening, following):
                    at = i
        return messages[at] if messages else ""

    def _common(self, opening: bytes, following: str) -> bool:
        """Whether an opening is common, counting `following`."""
        known = self._next.setdefault(opening, set())
        self._next.move_to_end(opening)
        if len(known) < COMMON:
            known.add(self._hash(opening, following))
        if len(self._next) > MAX_OPENINGS:
            self._next.popitem(last=False)
        return len(known) >= COMMON

    def _hash(self, opening: bytes, message: str) -> bytes:
        text = message.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(opening + text, key=self._secret, digest_size=16).digest()
