"""How many bytes keys and values may take, and which rows fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from service.engine.kv.buffers import PART, slots
from service.engine.strategy import PAGE, STEP, current

HEADROOM = STEP
"""Positions that must be free after the longest row before a request is admitted: space for the start of its answer."""
USABLE, USABLE_PAGED = 0.95, 0.9
"""Share of the memory free after loading the models that rows and cached prefixes may take, in rectangles and in pages. The
rest covers what is not counted: masks, small arrays and, with pages, logits and gathered pages."""
LONGEST = 2**30
"""Positions of a row without a limit, for a model whose layers are all recurrent."""


def prefix_bytes(asked_mb: int | None, free: int) -> int:
    """Bytes of `free` that the prefix cache may take. asked_mb: `engine.prefix_cache_mb`; None: everything that rows leave
    free. Rows take precedence over it."""
    return free if asked_mb is None else asked_mb * 2**20


def usable(free: int, *, training: int) -> int:
    """Bytes for rows and cached prefixes if `free` bytes are free after loading the weights. training: bytes that a training
    run needs.

    Pages are all allocated at the start, so memory for a run is set aside, up to half of what is free. With rectangles, a run
    takes what is free when it starts.
    """
    if not current().paged:
        return int(USABLE * free)
    return int(USABLE_PAGED * (free - min(training, free // 2)))


@dataclass(frozen=True, slots=True)
class PoolRow:
    """What a row takes of one pool of pages. page: bytes per page. groups: by group of layers, the maximum positions that a
    decoding row holds; None: all."""

    page: int
    groups: tuple[int | None, ...]

    def pages(self, running: Sequence[int], prefilling: Sequence[int] = (), chunk: int = 0) -> int:
        """Pages of running rows with the given lengths and of rows that prefill in calls of `chunk` tokens. A prefilling row
        holds the positions of a call in addition to the window's. So do the running rows, all of them together, when a draft
        catches up."""
        took = 0
        for most in self.groups:
            took += pages_of(running if most is None else [min(n, most) for n in running])
            took += pages_of(prefilling if most is None else [min(n, most + chunk) for n in prefilling])
            if most is not None:
                took += min(pages_of([chunk]), pages_of(max(n - most, 0) for n in running))
        return took


@dataclass(frozen=True, slots=True)
class RowBytes:
    """What a row takes.

    position: bytes of keys and values per position, in layers that hold all positions. windows: (maximum positions held, bytes
    per position) of layers with a sliding window. pools: for paged rows, what a row takes of the target's and the draft's pool.
    layer: bytes of a position in the widest layer; None: there is only one layer. fixed: bytes of every row that decodes or
    prefills, regardless of its length: recurrent states and what a round computes of logits. scores: bytes of attention scores
    per position of the longest row, for all queries of a call; 0 if a kernel does not store them.
    """

    position: int
    windows: tuple[tuple[int, int], ...] = ()
    pools: tuple[PoolRow, ...] = ()
    layer: int | None = None
    fixed: int = 0
    scores: int = 0

    def of(self, positions: int, chunk: int = 0) -> int:
        """Bytes of the keys and values of a row with capacity for `positions`. chunk: tokens of the prefill's call, which
        layers with a window hold in addition."""
        return positions * self.position + sum(min(positions, most + chunk) * size for most, size in self.windows)

    def growth(self, rows: int, positions: int) -> int:
        """Extra bytes while a batch grows, joins others or shrinks: old and new buffers coexist for a part of the layers
        (`PART`), at least for one layer."""
        whole = rows * self.of(positions)
        layer = whole if self.layer is None else rows * positions * self.layer
        return min(whole, max(PART, layer))

    @property
    def first(self) -> int:
        """Bytes of a position that lies within all windows."""
        return self.of(1)


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory for keys and values.

    size: bytes for rows of target and draft and for cached prefixes, which are evicted in favour of rows. row: what one row
    takes (`footprint`). chunk: tokens of a prefill's call; None: what suits the device.

    Paged rows take what they use. In rectangles, each row takes as many positions as the longest (`buffers`).
    """

    size: int
    row: RowBytes
    chunk: int | None = None

    @classmethod
    def of(cls, asked_mb: int, free: int, *, training: int, row: RowBytes, chunk: int | None = None) -> Budget:
        """The budget set by `engine.kv_budget_mb` (0: `usable` of the free bytes)."""
        return cls(asked_mb * 2**20 or usable(free, training=training), row, chunk)

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages of each pool that the budget allows, in the proportions of the longest row that fits, so that no single pool
        limits a long row. Shorter rows take pages in other proportions."""
        return _pages(self._pools, self.size, self._chunk)

    def longest(self, rows: int = 1) -> int:
        """Positions of each of `rows` rows that fit together, in multiples of STEP; at most LONGEST."""
        return _longest(lambda positions: self._share([positions] * rows) <= 1)

    def rows_of(self, positions: int, most: int) -> int:
        """The number of rows with `positions` each that fit together, at most `most`."""
        return next((rows for rows in range(most, 0, -1) if self._share([positions] * rows) <= 1), 0)

    def used(self, lengths: Sequence[int]) -> float:
        """Share of the budget that rows of these lengths take, including what growth needs."""
        return self._share(lengths)

    def left(self, lengths: Sequence[int], prefilling: Sequence[int] = (), *, have: int = 0) -> int:
        """Bytes left for cached prefixes next to rows of these lengths in rectangles. Arguments as for `fits`."""
        return max(self.size - self.bytes_of(lengths, prefilling, have), 0)

    def fits(self, lengths: Sequence[int], prefilling: Sequence[int] = (), *, have: int = 0) -> bool:
        """Whether rows of these lengths fit while others prefill that join them afterwards. A single row always fits, because
        no request is admitted that could become too long. have: slots that the batch's buffers already have."""
        if len(lengths) + len(prefilling) <= 1 and have <= slots(current().batch_size(1)):
            return True
        return self._share(lengths, prefilling, have) <= 1

    def _share(self, lengths: Sequence[int], prefilling: Sequence[int] = (), have: int = 0) -> float:
        """Share of the budget that these rows take; with pages, of the most used pool."""
        strategy = current()
        if strategy.paged:
            took = (pool.pages(lengths, prefilling, self._chunk) for pool in self._pools)
            return max((n / max(most, 1) for n, most in zip(took, self.pages, strict=True)), default=0.0)
        return self.bytes_of(lengths, prefilling, have) / max(self.size, 1)

    def bytes_of(self, lengths: Sequence[int], prefilling: Sequence[int] = (), have: int = 0) -> int:
        """Peak bytes of rows of these lengths in rectangles, and of others that prefill and then join them. Arguments as for
        `fits`."""
        strategy, rows = current(), [*lengths, *prefilling]
        if not rows and not have:
            return 0
        size, positions = strategy.batch_size, strategy.capacity(max(rows, default=0))
        # Until they join, prefilling prompts have separate buffers in addition to the batch's, spare slots included.
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
    """The maximum positions that fit, in multiples of STEP; at most LONGEST."""
    steps = range(1, LONGEST // STEP + 1)
    return bisect_left(steps, True, key=lambda n: not fits(n * STEP)) * STEP


def pages_of(lengths: Iterable[int]) -> int:
    """Pages that rows of these lengths take of one group of layers."""
    return sum(-(-length // PAGE) for length in lengths)
