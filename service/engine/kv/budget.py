"""How many bytes keys and values may take, and which rows fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from service.engine.kv.buffers import slots
from service.engine.strategy import PAGE, STEP, current

HEADROOM = STEP
"""Positions that must be free behind the longest row for a request to be admitted: a first share of its answer."""
USABLE = 0.9
"""Of the memory that is free once models are loaded keys and values may take this share; the rest is for what calls compute."""
PREFIX_SHARE = 1 / 8
"""Of free memory the prefix cache may take this share, where nothing else is asked for."""
GROWING = 2
"""Times the size of a batch that its keys and values take in rectangles: while they grow, the old ones are there too."""
LONGEST = 2**30
"""Positions of a row that has no end: of a model whose layers are all recurrent."""


def prefix_bytes(asked_mb: int | None, free: int) -> int:
    """Bytes for the prefix cache, where so many are free once the weights are loaded. asked_mb: `engine.prefix_cache_mb`. In
    pages it may have all that rows do not take: it gives way to them."""
    if asked_mb is not None:
        return asked_mb * 2**20
    return free if current().paged else int(PREFIX_SHARE * free)


def usable(free: int, *, prefix: int, training: int) -> int:
    """Bytes for keys and values where so many are free once the weights are loaded. prefix: the prefix cache's; where rows are
    in pages it is among them, and gives way. training: a run's, of which no more is set aside than half of the rest: serving
    goes first, and a run that finds too little fails by itself."""
    rest = free if current().paged else max(free - prefix, 0)
    return int(USABLE * (rest - min(training, rest // 2)))


def pages_of(lengths: Iterable[int]) -> int:
    """Pages that rows of such lengths take."""
    return sum(-(-length // PAGE) for length in lengths)


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Bytes of a row's keys and values. position: of each position, in layers that hold all. windows: (positions held at most,
    bytes of each) of layers with a sliding window."""

    position: int
    windows: tuple[tuple[int, int], ...] = ()

    def of(self, positions: int) -> int:
        """Bytes of a row with room for so many positions."""
        return positions * self.position + sum(min(positions, most) * size for most, size in self.windows)

    @property
    def first(self) -> int:
        """Bytes of a position within all windows."""
        return self.of(1)


@dataclass(frozen=True, slots=True)
class Budget:
    """size: bytes for keys and values, of target and draft. row: what one row takes of them (`footprint`).

    Rows in pages take what they use; in rectangles as many positions each as the longest (`buffers`)."""

    size: int
    row: RowBytes

    @classmethod
    def of(cls, asked_mb: int, free: int, *, prefix: int, training: int, row: RowBytes) -> Budget:
        """As `engine.kv_budget_mb` asks for (0: what is `usable` of the free bytes)."""
        return cls(asked_mb * 2**20 or usable(free, prefix=prefix, training=training), row)

    @property
    def pages(self) -> int:
        """Pages that it does for."""
        return self.size // max(self.row.of(PAGE), 1)

    def longest(self, rows: int = 1) -> int:
        """Positions of each of so many rows that fit together, in steps of an eighth or STEP; LONGEST at most."""
        most, step = 0, STEP
        while most < LONGEST and self._bytes([most + step] * rows) <= self.size:
            most += step
            step = max(STEP, most // STEP // 8 * STEP)
        return most

    def used(self, lengths: Sequence[int]) -> float:
        """Share of the budget that rows of such lengths take, with what growing needs."""
        return self._bytes(lengths) / self.size

    def fits(self, lengths: Sequence[int], prefilling: Sequence[int] = (), *, have: int = 0) -> bool:
        """Whether rows of such lengths fit while others prefill, which join them afterwards. A row by itself always does: none
        is admitted that could become too long. have: slots that the batch's buffers have already."""
        rows, size = [*lengths, *prefilling], current().batch_size
        if len(rows) <= 1 and have <= slots(size(1)):
            return True
        apart = 0
        if not current().paged:
            # They may be prefilled in one call, as many rows as there are in a batch.
            apart = size(len(prefilling)) * self.row.of(current().capacity(max(prefilling, default=0)))
        return self._bytes(rows, have) + apart <= self.size

    def _bytes(self, lengths: Sequence[int], have: int = 0) -> int:
        strategy = current()
        if strategy.paged:
            return pages_of(lengths) * self.row.of(PAGE)
        many = max(slots(strategy.batch_size(len(lengths))), have)
        return GROWING * many * self.row.of(strategy.capacity(max(lengths, default=0)))
