"""One reservoir of texts: which of those offered are held. Pure, but for the random numbers it is given.

Algorithm R (Vitter 1985): after any number of offers each text is held with the same probability. What many texts have in
common (their client, their template) bends it: a text of those that hold their share already takes the place of one of its
own, and while somebody holds more than that, whoever else comes takes theirs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from service.store.log.likeness import SHARE


@dataclass(frozen=True, slots=True)
class Item:
    """A stored text. key: equal for equal texts. groups: what it has in common with others."""

    seq: int
    key: bytes
    groups: frozenset[bytes]


class Reservoir:
    """held: slot -> text. seen: texts offered so far."""

    def __init__(self, capacity: int, held: Mapping[int, Item], seen: int, rng: random.Random) -> None:
        self.capacity = capacity
        self.held = dict(held)
        self.seen = seen
        self._rng = rng
        self._keys = {item.key for item in held.values()}
        self._counts = Counter(group for item in held.values() for group in item.groups)
        self._free = [slot for slot in reversed(range(capacity)) if slot not in self.held]

    def offer(self, item: Item) -> int | None:
        """The slot that the text takes; None where it is not held, or was already."""
        if item.key in self._keys:
            return None
        self.seen += 1
        slot = self._free.pop() if self._free else self._place(item)
        if slot is None:
            return None
        if (old := self.held.get(slot)) is not None:
            self._keys.discard(old.key)
            self._counts.subtract(old.groups)
        self.held[slot] = item
        self._keys.add(item.key)
        self._counts.update(item.groups)
        return slot

    def _place(self, item: Item) -> int | None:
        most = SHARE * self.capacity
        over = [(count, group) for group, count in self._counts.items() if count > most and group not in item.groups]
        if over:
            _, group = max(over)
            return self._one_of(frozenset({group}))
        full = frozenset(group for group in item.groups if 0 < self._counts[group] > most - 1)
        drawn = self._rng.randrange(self.seen)
        if drawn >= self.capacity:
            return None
        return self._one_of(full) if full else drawn

    def _one_of(self, groups: frozenset[bytes]) -> int | None:
        slots = [slot for slot, item in sorted(self.held.items()) if groups <= item.groups]
        return self._rng.choice(slots) if slots else None
