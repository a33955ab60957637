"""How many bytes keys and values may take, and which rows fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from service.engine.kv.buffers import slots
from service.engine.strategy import PAGE, STEP, current

HEADROOM = STEP
"""Positions that must be free behind the longest row for a request to be admitted: a first share of its answer."""
USABLE = 0.9
"""Of the memory that is free once models are loaded keys and values may take this share; the rest is for what is not counted:
logits, masks, pages that are gathered."""
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


@dataclass(frozen=True, slots=True)
class PoolRow:
    """What a row takes of one pool of pages. page: bytes of a page. groups: by group of layers, the positions that a row which
    decodes holds at most; None: all."""

    page: int
    groups: tuple[int | None, ...]

    def pages(self, running: Sequence[int], prefilling: Sequence[int] = (), chunk: int = 0) -> int:
        """Pages of rows of such lengths, and of others that prefill, in calls of `chunk` tokens: those hold a call's positions
        besides the window's. So do running rows, all of them together, when a draft catches up."""
        took = 0
        for most in self.groups:
            took += pages_of(running if most is None else [min(n, most) for n in running])
            took += pages_of(prefilling if most is None else [min(n, most + chunk) for n in prefilling])
            if most is not None:
                took += min(pages_of([chunk]), pages_of(max(n - most, 0) for n in running))
        return took


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Bytes of a row's keys and values. position: of each position, in layers that hold all. windows: (positions held at most,
    bytes of each) of layers with a sliding window. pools: where they are in pages, what a row takes of target's and draft's."""

    position: int
    windows: tuple[tuple[int, int], ...] = ()
    pools: tuple[PoolRow, ...] = ()

    def of(self, positions: int) -> int:
        """Bytes of a row with room for so many positions."""
        return positions * self.position + sum(min(positions, most) * size for most, size in self.windows)

    @property
    def first(self) -> int:
        """Bytes of a position within all windows."""
        return self.of(1)


@dataclass(frozen=True, slots=True)
class Budget:
    """size: bytes for keys and values, of target and draft. row: what one row takes of them (`footprint`). chunk: tokens of a
    prefill's call; None: as many as suit the device.

    Rows in pages take what they use; in rectangles as many positions each as the longest (`buffers`)."""

    size: int
    row: RowBytes
    chunk: int | None = None

    @classmethod
    def of(
        cls, asked_mb: int, free: int, *, prefix: int, training: int, row: RowBytes, chunk: int | None = None
    ) -> Budget:
        """As `engine.kv_budget_mb` asks for (0: what is `usable` of the free bytes)."""
        return cls(asked_mb * 2**20 or usable(free, prefix=prefix, training=training), row, chunk)

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages of each pool that it does for: as the longest row takes them that it does for, so that none is the reason why
        a long row does not fit, where memory is short. Shorter ones take them in other parts."""
        return _pages(self._pools, self.size, self._chunk)

    def longest(self, rows: int = 1) -> int:
        """Positions of each of so many rows that fit together, in steps of an eighth or STEP; LONGEST at most."""
        return _longest(lambda positions: self._share([positions] * rows) <= 1)

    def used(self, lengths: Sequence[int]) -> float:
        """Share of the budget that rows of such lengths take, with what growing needs."""
        return self._share(lengths)

    def fits(self, lengths: Sequence[int], prefilling: Sequence[int] = (), *, have: int = 0) -> bool:
        """Whether rows of such lengths fit while others prefill, which join them afterwards. A row by itself always does: none
        is admitted that could become too long. have: slots that the batch's buffers have already."""
        if len(lengths) + len(prefilling) <= 1 and have <= slots(current().batch_size(1)):
            return True
        return self._share(lengths, prefilling, have) <= 1

    def _share(self, lengths: Sequence[int], prefilling: Sequence[int] = (), have: int = 0) -> float:
        """Share of the budget that they take; in pages, of the pool of which they take most."""
        strategy = current()
        if strategy.paged:
            took = (pool.pages(lengths, prefilling, self._chunk) for pool in self._pools)
            return max((n / max(most, 1) for n, most in zip(took, self.pages, strict=True)), default=0.0)
        rows, size = [*lengths, *prefilling], strategy.batch_size
        many = max(slots(size(len(rows))), have)
        took = GROWING * many * self.row.of(strategy.capacity(max(rows, default=0)))
        # They may be prefilled in one call, as many rows as there are in a batch.
        took += size(len(prefilling)) * self.row.of(strategy.capacity(max(prefilling, default=0)))
        return took / max(self.size, 1)

    @property
    def _pools(self) -> tuple[PoolRow, ...]:
        return self.row.pools or (PoolRow(self.row.of(PAGE), (None,)),)

    @property
    def _chunk(self) -> int:
        return self.chunk or current().prefill_chunk


@cache
def _pages(pools: tuple[PoolRow, ...], size: int, chunk: int) -> tuple[int, ...]:
    """See Budget.pages."""

    def took(positions: int) -> list[int]:
        return [pool.pages([positions], chunk=chunk) for pool in pools]

    def nbytes(positions: int) -> int:
        return sum(pool.page * n for pool, n in zip(pools, took(positions), strict=True))

    longest = max(_longest(lambda positions: nbytes(positions) <= size), PAGE)
    return tuple(size * n // max(nbytes(longest), 1) for n in took(longest))


def _longest(fits: Callable[[int], bool]) -> int:
    """The most positions that fit, in steps of an eighth or STEP; LONGEST at most."""
    most, step = 0, STEP
    while most < LONGEST and fits(most + step):
        most += step
        step = max(STEP, most // STEP // 8 * STEP)
    return most


def pages_of(lengths: Iterable[int]) -> int:
    """Pages that rows of such lengths take of one group of layers."""
    return sum(-(-length // PAGE) for length in lengths)
