"""Replies that later requests may refer to, in this process's memory, stored per key.

`/v1/responses` continues earlier responses (`previous_response_id`) and takes their items by id (`item_reference`);
`/v1/messages` continues threads. A reply is stored as the JSON of its parts: the whole prompt, then the answer. Parts
that several replies share, as the turns of one conversation do, are stored once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from weakref import WeakSet

from service.core import Caller, Selection

OVERHEAD_BYTES = 256
"""Overhead counted for each reply, item and part in addition to its text."""
REFERENCE_BYTES = 64
"""Bytes counted for each part and source that a reply refers to."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What erasures select a reply by. id: of its request; "": not known yet. api_key: name of the key it was requested
    with."""

    id: str
    api_key: str | None
    client: str | None
    domain: str | None
    created: datetime

    def erased_by(self, selection: Selection) -> bool:
        """Whether an erasure covers it."""
        return selection.covers(self.id, self, self.created)


@dataclass(frozen=True, slots=True)
class Reply:
    """A stored reply. parts: JSON of the conversation up to its end. items: part numbers by the ids that clients know.
    sources: replies its parts were taken from, stored or not. answer: the JSON sent to the client."""

    origin: Origin
    parts: tuple[bytes, ...]
    items: Mapping[str, int] = field(default_factory=dict[str, int])
    sources: frozenset[Origin] = frozenset()
    answer: bytes = b""

    @property
    def lineage(self) -> frozenset[Origin]:
        """Its own origin and those of its sources."""
        return self.sources | {self.origin}

    @property
    def size(self) -> int:
        """Bytes that no other reply can share."""
        references = len(self.parts) + len(self.sources)
        return len(self.answer) + OVERHEAD_BYTES * (1 + len(self.items)) + REFERENCE_BYTES * references


class PendingReply:
    """A reply in progress that may be stored at its end. forgotten: an erasure covers it or a reply that it continues,
    so it is not stored."""

    def __init__(self, replies: Replies, caller: Caller, client: str | None, domain: str | None) -> None:
        self.forgotten = False
        self._replies = replies
        self._caller = caller
        self._origin = Origin("", caller.key, client, domain, datetime.now(UTC))
        self.sources: frozenset[Origin] = frozenset()

    def take(self, name: str) -> Reply | None:
        """A reply that this one continues. None: not stored, or stored for another key."""
        return self._replies.take(self, name, self._caller)

    def take_item(self, id: str) -> bytes | None:
        """A part of an earlier reply by its id. None: not stored, or stored for another key."""
        return self._replies.take_item(self, id, self._caller)

    def asked(self, id: str) -> None:
        """Sets the id under which the engine knows its request."""
        self._origin = replace(self._origin, id=id)

    def keep(self, name: str, parts: Sequence[bytes], items: Mapping[str, int], answer: bytes = b"") -> None:
        """Stores it under the id its client knows, unless it was forgotten or exceeds the total size limit."""
        origin = replace(self._origin, created=datetime.now(UTC))
        self._replies.add(self, name, Reply(origin, tuple(parts), items, self.sources, answer))

    def covered_by(self, selection: Selection) -> bool:
        """Whether an erasure covers it or a reply that it continues."""
        own = replace(self._origin, created=datetime.now(UTC))
        return any(origin.erased_by(selection) for origin in (own, *self.sources))


class Replies:
    """Replies by the ids that clients know, up to `max_bytes`; the least recently used are dropped first. 0: none is
    stored. recorded: answers are also recorded in the log unless a request opts out. Thread-safe."""

    def __init__(self, max_bytes: int, *, recorded: bool = True) -> None:
        self.max_bytes = max_bytes
        self.recorded = recorded
        self._lock = threading.Lock()
        self._replies: OrderedDict[str, Reply] = OrderedDict()
        self._items: dict[str, str] = {}
        """Names of replies by the ids of their items."""
        self._parts: dict[bytes, tuple[bytes, int]] = {}
        """Every stored part and its reference count."""
        self._bytes = 0
        self._pending: WeakSet[PendingReply] = WeakSet()

    @property
    def size(self) -> int:
        """Bytes stored now."""
        return self._bytes

    @property
    def not_kept(self) -> str:
        """The message for a reply that is not stored."""
        if not self.max_bytes:
            return "is not kept here (store.replies_mb is 0 or store.record is false): send the whole conversation"
        return (
            "is not kept here: replies are kept for the key that asked, up to store.replies_mb, until the server stops; "
            "send the whole conversation"
        )

    def begin(self, caller: Caller, client: str | None, domain: str | None) -> PendingReply:
        """A new reply in progress for a request with these tags."""
        pending = PendingReply(self, caller, client, domain)
        with self._lock:
            self._pending.add(pending)
        return pending

    def find(self, name: str, caller: Caller) -> Reply | None:
        """The reply with this id. None: not stored, or stored for another key."""
        with self._lock:
            return self._found(name, caller)

    def take(self, pending: PendingReply, name: str, caller: Caller) -> Reply | None:
        """See PendingReply.take."""
        with self._lock:
            if (reply := self._found(name, caller)) is not None:
                # Under the lock, so that every later erasure knows that this reply contains the text.
                pending.sources |= reply.lineage
            return reply

    def take_item(self, pending: PendingReply, id: str, caller: Caller) -> bytes | None:
        """See PendingReply.take_item."""
        reply = self.take(pending, self._items.get(id, ""), caller)
        return None if reply is None else reply.parts[reply.items[id]]

    def drop(self, name: str, caller: Caller) -> bool:
        """Drops a reply. False: not stored, or stored for another key."""
        with self._lock:
            if self._found(name, caller) is None:
                return False
            self._remove(name)
            return True

    def forget(self, selection: Selection) -> None:
        """Drops the replies that an erasure covers and all that continue one of them; replies in progress are not stored."""
        with self._lock:
            for pending in self._pending:
                pending.forgotten = pending.forgotten or pending.covered_by(selection)
            covered = [
                name
                for name, reply in self._replies.items()
                if any(origin.erased_by(selection) for origin in reply.lineage)
            ]
            for name in covered:
                self._remove(name)

    def add(self, pending: PendingReply, name: str, reply: Reply) -> None:
        """See PendingReply.keep."""
        with self._lock:
            self._pending.discard(pending)
            whole = reply.size + sum(len(part) + OVERHEAD_BYTES for part in set(reply.parts))
            if pending.forgotten or whole > self.max_bytes:
                return
            shared = tuple(self._share(part) for part in reply.parts)
            self._replies[name] = replace(reply, parts=shared)
            self._items |= dict.fromkeys(reply.items, name)
            self._bytes += reply.size
            while self._bytes > self.max_bytes:
                self._remove(next(iter(self._replies)))

    def _found(self, name: str, caller: Caller) -> Reply | None:
        reply = self._replies.get(name)
        if reply is None or reply.origin.api_key != caller.key:
            return None
        self._replies.move_to_end(name)
        return reply

    def _remove(self, name: str) -> None:
        reply = self._replies.pop(name)
        self._bytes -= reply.size
        for id in reply.items:
            del self._items[id]
        for part in reply.parts:
            kept, uses = self._parts.pop(part)
            if uses > 1:
                self._parts[kept] = kept, uses - 1
            else:
                self._bytes -= len(kept) + OVERHEAD_BYTES

    def _share(self, part: bytes) -> bytes:
        kept, uses = self._parts.pop(part, (part, 0))
        self._parts[kept] = kept, uses + 1
        if not uses:
            self._bytes += len(kept) + OVERHEAD_BYTES
        return kept
