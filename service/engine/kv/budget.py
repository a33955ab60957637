"""How many bytes keys and values may take, and which rows fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.engine.kv.buffers import slots
from service.engine.strategy import STEP, current

HEADROOM = STEP
"""Positions that must be free behind the longest row for a request to be admitted: a first share of its answer."""
USABLE = 0.9
"""Of the memory that is free once models are loaded keys and values may take this share; the rest is for what calls compute."""
GROWING = 2
"""Times the size of a batch that its keys and values take: while buffers grow, the old ones are there too."""


@dataclass(frozen=True, slots=True)
class Budget:
    """size: bytes for keys and values, of target and draft. position: bytes of one position of a row (`footprint`).

    Rows of a batch take as many positions each as the longest (`buffers`)."""

    size: int
    position: int

    def longest(self, rows: int = 1) -> int:
        """Positions of each of so many rows that fit together, in steps of an eighth or STEP."""
        most, step = 0, STEP
        while self._batch(rows, most + step) <= self.size:
            most += step
            step = max(STEP, most // STEP // 8 * STEP)
        return most

    def used(self, rows: int, longest: int) -> float:
        """Share of the budget that a batch of so many rows takes."""
        return self._batch(rows, longest) / self.size

    def fits(self, lengths: Sequence[int], prefilling: Sequence[int] = (), *, have: int = 0) -> bool:
        """Whether rows of such lengths fit while others prefill, which join them afterwards. A row by itself always does: none
        is admitted that could become too long. have: slots that the batch's buffers have already."""
        rows = [*lengths, *prefilling]
        if len(rows) <= 1:
            return True
        apart = sum(current().capacity(length) for length in prefilling) * self.position
        return self._batch(len(rows), max(rows), have) + apart <= self.size

    def _batch(self, rows: int, longest: int, have: int = 0) -> int:
        strategy = current()
        many = max(slots(strategy.batch_size(rows)), have)
        return GROWING * many * strategy.capacity(longest) * self.position
