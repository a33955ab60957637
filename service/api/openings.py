"""Which user message tells a conversation apart from others.

The split into training and held-out texts, and the intervals of gate and watch, go by conversation. A client may begin every
conversation with the same messages: instructions, examples, a form. Such an opening says nothing about the conversation, so the
first message after it does. A chat that goes on keeps its distinguishing message, and with it its side of the split.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

COMMON = 8
"""Different continuations after which an opening is a common one. The conversations before count as one."""
MAX_OPENINGS = 8192
"""Openings that are remembered; the least recently used are forgotten."""


class Openings:
    """Remembers how conversations went on after their first user messages, as keyed hashes: no text can be read from them, and
    none outlives the process. Safe to call from any thread."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._next: OrderedDict[bytes, set[bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def distinguishing(self, messages: Sequence[str]) -> str:
        """The first of a conversation's user messages that is not part of a common opening; "" where there are none."""
        opening, at = b"", 0
        with self._lock:
            for i, (message, following) in enumerate(pairwise(messages), start=1):
                opening = self._hash(opening, message)
                if self._common(opening, following):
                    at = i
        return messages[at] if messages else ""

    def _common(self, opening: bytes, following: str) -> bool:
        """Whether an opening is common by now, `following` included."""
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
