"""How many bytes keys and values may take, and which rows fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from service.engine.kv.buffers import PART, slots
from service.engine.strategy import PAGE, STEP, current

HEADROOM = STEP
"""Positions that must be free behind the longest row for a request to be admitted: a first share of its answer."""
USABLE, USABLE_PAGED = 0.95, 0.9
"""Share of the memory that is free once models are loaded that rows and cached prefixes may take, in rectangles and in pages.
The rest is for what is not counted: masks, small arrays, in pages also logits and pages that are gathered."""
LONGEST = 2**30
"""Positions of a row that has no end: of a model whose layers are all recurrent."""


def prefix_bytes(asked_mb: int | None, free: int) -> int:
    """Bytes that the prefix cache may take of `free`. asked_mb: `engine.prefix_cache_mb`; None: all that rows leave, to which
    it gives way."""
    return free if asked_mb is None else asked_mb * 2**20


def usable(free: int, *, training: int) -> int:
    """Bytes for rows and cached prefixes where so many are free once the weights are loaded. training: bytes of a run.
    Pages take all of their memory at the start: there a run's is set aside, up to half of what is free. In rectangles a run
    takes what is free when it starts."""
    if not current().paged:
        return int(USABLE * free)
    return int(USABLE_PAGED * (free - min(training, free // 2)))


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
    """What a row takes. position: bytes of keys and values of each position, in layers that hold all. windows: (positions held
    at most, bytes of each) of layers with a sliding window. pools: where rows are in pages, what a row takes of target's and
    draft's. layer: bytes of a position in the widest layer; None: there is one layer. fixed: bytes of every row that decodes or
    prefills, whatever its length: recurrent states and what a round computes of logits. scores: bytes that attention over the
    longest row computes for each of its positions, of all queries of a call; 0 where a kernel does without them."""

    position: int
    windows: tuple[tuple[int, int], ...] = ()
    pools: tuple[PoolRow, ...] = ()
    layer: int | None = None
    fixed: int = 0
    scores: int = 0

    def of(self, positions: int, chunk: int = 0) -> int:
        """Bytes of the keys and values of a row with room for so many positions. chunk: tokens of the prefill's call, which
        layers with a window hold besides it."""
        return positions * self.position + sum(min(positions, most + chunk) * size for most, size in self.windows)

    def growth(self, rows: int, positions: int) -> int:
        """Bytes that exist besides the buffers of a batch while it grows, joins others or shrinks: old and new buffers of a
        part of the layers (`PART`), of one layer at least."""
        whole = rows * self.of(positions)
        layer = whole if self.layer is None else rows * positions * self.layer
        return min(whole, max(PART, layer))

    @property
    def first(self) -> int:
        """Bytes of a position within all windows."""
        return self.of(1)


@dataclass(frozen=True, slots=True)
class Budget:
    """size: bytes for rows of target and draft, and for cached prefixes, which give way to rows. row: what one row takes
    (`footprint`). chunk: tokens of a prefill's call; None: as many as suit the device.

    Rows in pages take what they use; in rectangles as many positions each as the longest (`buffers`)."""

    size: int
    row: RowBytes
    chunk: int | None = None

    @classmethod
    def of(cls, asked_mb: int, free: int, *, training: int, row: RowBytes, chunk: int | None = None) -> Budget:
        """As `engine.kv_budget_mb` asks for (0: what is `usable` of the free bytes)."""
        return cls(asked_mb * 2**20 or usable(free, training=training), row, chunk)

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages of each pool that it does for: as the longest row takes them that it does for, so that none is the reason why
        a long row does not fit, where memory is short. Shorter ones take them in other parts."""
        return _pages(self._pools, self.size, self._chunk)

    def longest(self, rows: int = 1) -> int:
        """Positions of each of so many rows that fit together, in steps of STEP; LONGEST at most."""
        return _longest(lambda positions: self._share([positions] * rows) <= 1)

    def rows_of(self, positions: int, most: int) -> int:
        """Rows of so many positions each that fit together, `most` at most."""
        return next((rows for rows in range(most, 0, -1) if self._share([positions] * rows) <= 1), 0)

    def used(self, lengths: Sequence[int]) -> float:
        """Share of the budget that rows of such lengths take, with what growing needs."""
        return self._share(lengths)

    def left(self, lengths: Sequence[int], prefilling: Sequence[int] = (), *, have: int = 0) -> int:
        """Bytes for cached prefixes beside rows in rectangles of such lengths. Arguments as for `fits`."""
        return max(self.size - self.bytes_of(lengths, prefilling, have), 0)

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
        return self.bytes_of(lengths, prefilling, have) / max(self.size, 1)

    def bytes_of(self, lengths: Sequence[int], prefilling: Sequence[int] = (), have: int = 0) -> int:
        """Bytes that rows in rectangles of such lengths take at their peak, and others that prefill and join them afterwards.
        Arguments as for `fits`."""
        strategy, rows = current(), [*lengths, *prefilling]
        if not rows and not have:
            return 0
        size, positions = strategy.batch_size, strategy.capacity(max(rows, default=0))
        # Until they join, prompts in prefill have buffers beside those of the batch, spare slots among them.
        many = max(slots(size(len(rows))), have + size(len(prefilling)))
        chunk = self._chunk if prefilling else 0
        took = many * self.row.of(positions, chunk) + self.row.growth(many, positions)
        return took + size(len(rows)) * self.row.fixed + positions * self.row.scores

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
    """The most positions that fit, in steps of STEP; LONGEST at most."""
    steps = range(1, LONGEST // STEP + 1)
    return bisect_left(steps, True, key=lambda n: not fits(n * STEP)) * STEP


def pages_of(lengths: Iterable[int]) -> int:
    """Pages that rows of such lengths take of one group of layers."""
    return sum(-(-length // PAGE) for length in lengths)
