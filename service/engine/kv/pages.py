"""Keys and values in pages of one pool, which rows take as they grow and share where they begin alike.

On CUDA: attention reads pages by a kernel of our own (`attention`). The pool's arrays keep their shape while rows come, grow
and go, so that calls of few shapes come again; nothing is copied when a row joins, leaves, or goes on behind a cached prefix.
Each row holds what it uses, whatever others hold. The layout is vLLM's PagedAttention (arXiv 2309.06180).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias, cast

import mlx.core as mx
import numpy as np

from service.engine.kv.groups import WHOLE, Groups, first_seen, most_held
from service.engine.kv.lengths import Lengths
from service.engine.kv.paged_layer import PagedLayer
from service.engine.kv.pool import Page, PageBlock, Pool
from service.engine.kv.rectangles import Block
from service.engine.strategy import PAGE

FEWEST, STEP = 32, 4
"""Pages of a row that a table has room for: FEWEST, or STEP times as many, and so on: calls of other widths are traced anew."""

Held: TypeAlias = "list[Page | None]"
"""The pages of a row for one group; None: given back."""


class Pages:
    """The pages that the rows of one cache hold in a pool. Of a group of layers with a window a row gives back those that no
    query sees any more."""

    def __init__(self, pool: Pool, groups: Groups, lengths: Lengths, rows: int) -> None:
        self.pool = pool
        self.groups = groups
        self.lengths = lengths
        self.traced = False
        """It only stands for the rows in a traced call."""
        self._rows: list[list[Held] | None] = [self._none() for _ in range(rows)]
        """By row, a list for each group. None: a padding row, which holds no page."""
        self._numbers = np.zeros((len(groups.windows), rows, FEWEST), dtype=np.int32)
        self._table: mx.array | None = None
        self._tables: list[mx.array] | None = None
        """The same, by group."""
        self._layers = 0
        self._reserved: tuple[list[int] | None, int] = (None, 0)
        """The lengths for which there are pages, and for how many tokens behind them."""

    def _none(self) -> list[Held]:
        return [[] for _ in self.groups.windows]

    def layer(self, window: int | None) -> PagedLayer:
        """One more layer. Layers refer to this object and not the other way round: pages are given back when the cache goes."""
        self._layers += 1
        return PagedLayer(self, window, self._layers - 1)

    @property
    def table(self) -> mx.array:
        """The numbers of each row's pages, int32, 0 where there is none: (B, width), of several groups (groups, B, width)."""
        if self._table is None:
            self._table = mx.array(self._numbers[0] if len(self._numbers) == 1 else self._numbers)
        return self._table

    def table_of(self, group: int) -> mx.array:
        """That of a group, (B, width)."""
        if self._tables is None:
            table = self.table
            self._tables = [table] if table.ndim == 2 else [table[i] for i in range(table.shape[0])]
        return self._tables[group]

    def _renumbered(self) -> None:
        self._table = self._tables = None

    def written(self) -> list[int]:
        """Those of the pool's arrays that are of keys and values: not of features."""
        return [i for i, (keys, values) in enumerate(self.pool.layers) if keys is not None and values is not None]

    def buffers(self) -> list[mx.array]:
        """These arrays of the pool."""
        return [cast("mx.array", array) for i in self.written() for array in self.pool.layers[i]]

    def set_buffers(self, written: Sequence[int], buffers: Sequence[mx.array]) -> None:
        """Replace them."""
        layers = self.pool.layers
        layers += [(None, None)] * (max(written) + 1 - len(layers))
        for i, both in zip(written, zip(buffers[::2], buffers[1::2], strict=True), strict=True):
            layers[i] = both

    def trace(self, table: mx.array, written: Sequence[int], buffers: Sequence[mx.array]) -> None:
        """Stand for rows in a traced call."""
        self.traced, self._table, self._tables = True, table, None
        self.set_buffers(written, buffers)

    def traced_writes(self) -> tuple[list[mx.array], list[mx.array]]:
        """What a traced call has to return for `take_writes`: the pool's arrays, where writing made others, and its writes."""
        return [] if self.pool.in_place else self.buffers(), self.pool.unlaunched

    def take_writes(self, buffers: Sequence[mx.array], writes: Sequence[mx.array]) -> None:
        """Take what a traced call has returned of `traced_writes`."""
        if buffers:
            self.set_buffers(self.written(), buffers)
        self.pool.unlaunched.extend(writes)

    def reserve(self, count: int) -> None:
        """Take pages for the next `count` tokens of every row. Those that no query sees from now on are given back first: what
        reads them was launched, and what writes to them anew comes behind it."""
        if self.traced or (self._reserved[0] is self.lengths.host and count <= self._reserved[1]):
            return
        self._release()
        for row, (held, length) in enumerate(zip(self._rows, self.lengths.host, strict=True)):
            for group, pages in enumerate(held or ()):
                if (more := -(-(length + count) // PAGE) - len(pages)) > 0:
                    self._extend(row, group, pages, more)
        self._reserved = self.lengths.host, count

    def _extend(self, row: int, group: int, held: Held, count: int) -> None:
        start, end = len(held), len(held) + count
        # Of a row that is only said to be so long.
        unseen = min(max(self._first_seen(row, group) - start, 0), count)
        held += [None] * unseen
        held += self.pool.take(count - unseen)
        if end > self._numbers.shape[2]:
            self._changed()
        else:
            self._numbers[group, row, start:end] = _numbers(held[start:])
            self._renumbered()

    def _first_seen(self, row: int, group: int) -> int:
        return first_seen(self.groups.windows[group], self.lengths.committed[row])

    def _release(self) -> None:
        """Give back the pages that no query sees any more."""
        windowed = [group for group, window in enumerate(self.groups.windows) if window is not None]
        for row, held in enumerate(self._rows if windowed else ()):
            for group in windowed if held is not None else ():
                pages = cast("list[Held]", held)[group]
                end = min(self._first_seen(row, group), len(pages))
                start = end
                while start and pages[start - 1] is not None:
                    start -= 1
                if start < end:
                    pages[start:end] = [None] * (end - start)
                    self._numbers[group, row, start:end] = 0
                    self._renumbered()

    def _changed(self) -> None:
        """Rows are others, or one has become too long for the table."""
        width, longest = FEWEST, max((len(pages) for held in self._rows for pages in held or ()), default=0)
        while width < longest:
            width *= STEP
        self._numbers = np.zeros((len(self.groups.windows), len(self._rows), width), dtype=np.int32)
        for row, held in enumerate(self._rows):
            for group, pages in enumerate(held or ()):
                self._numbers[group, row, : len(pages)] = _numbers(pages)
        self._renumbered()
        self._reserved = (None, 0)

    def join(self, others: Sequence[Pages], counts: Sequence[int], slots: Sequence[int], size: int) -> None:
        """Take over the first counts[i] rows of each of these, into these slots of `size` rows. Raises ValueError where they
        have pages of another pool."""
        if any(other.pool is not self.pool for other in others):
            raise ValueError("rows of another pool cannot join")
        self._rows += [self._none() for _ in range(size - len(self._rows))]
        joining = list[list[Held] | None]()
        for other, count in zip(others, counts, strict=True):
            # A prompt's last chunk is as long as many windows.
            other._release()
            for held, length in zip(other._rows[:count], other.lengths.host, strict=False):
                # A shorter prompt than others of its call has taken pages for their padding.
                joining.append(None if held is None else [pages[: -(-length // PAGE)] for pages in held])
            other._rows = []
        for slot, held in zip(slots, joining, strict=True):
            self._rows[slot] = held
        self._changed()

    def pad(self, rows: Collection[int]) -> None:
        """Make padding of these rows."""
        for row in rows:
            self._rows[row] = None
        if rows:
            self._changed()

    def copy_moved(self, rows: Sequence[int], *, tight: bool) -> list[mx.array | None]:
        """Nothing: rows move without a copy."""
        return []

    def compact(self, rows: Sequence[int], copies: Sequence[mx.array | None], *, tight: bool) -> None:
        """Keep these rows, in this order."""
        self._rows = [self._rows[row] for row in rows]
        self._changed()

    def numbers(self, row: int, group: int = 0, first: int = 0) -> mx.array:
        """The numbers of a group's pages that hold a row from the one numbered `first` on up to its end."""
        return mx.array(self._numbers[group, row, first : -(-self.lengths.host[row] // PAGE)])

    def clear(self, row: int) -> None:
        """Give a row's pages back."""
        self._rows[row] = self._none()
        self._changed()

    def zero_tail(self, row: int, start: int) -> None:
        """Set page 0 to zero for a padding row. Nothing for others: what is behind a row's end is not read."""
        if self._rows[row] is None:
            self.pool.zero_first()

    def arrays(self) -> list[mx.array]:
        """What has to be evaluated for the rows' contents to be there."""
        return self.pool.arrays()

    @property
    def slots(self) -> int:
        """Rows for which there is memory that nobody else can use: none."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated, for all caches of the pool."""
        return self.pool.pages * self.pool.page_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of PAGE positions of a row."""
        return len(self.groups.windows) * self.pool.page_bytes

    def window_bytes(self) -> dict[int, int]:
        """See Rectangles."""
        found: dict[int, int] = {}
        for window in self.groups.windows:
            if window is not None:
                most = most_held(window)
                found[most] = found.get(most, 0) + self.pool.page_bytes // PAGE
        return found

    def first_whole(self, row: int) -> int:
        """See Rectangles."""
        held = self._rows[row]
        return max((_behind_gaps(pages) for pages in held or ()), default=0) if self.groups.reach else 0

    def blocks(self, row: int, start: int, count: int) -> list[Page | PageBlock]:
        """So many blocks of a row from the one numbered `start` on, for the prefix cache: its own pages."""
        held = self._rows[row]
        if held is None:
            return []
        blocks = zip(*(pages[start : start + count] for pages in held), strict=True)
        if self.groups == WHOLE:
            return [cast("Page", page) for (page,) in blocks]
        return [PageBlock(self.pool, pages, self.groups.reach) for pages in blocks]

    def adopt(self, blocks: Sequence[Block]) -> list[Page | PageBlock]:
        """Blocks that `load` takes, with the contents of blocks that were read. Raises MemoryError."""
        return self.pool.fill(blocks)

    def load(self, paths: Sequence[Sequence[Page | PageBlock]], positions: int) -> None:
        """Let empty rows begin with these blocks, a path for each row. Raises ValueError where they are another pool's."""
        if any(block.pool is not self.pool for path in paths for block in path):
            raise ValueError("pages of another pool cannot be loaded")
        self._rows = [[self._seen(path, group) for group in range(len(self.groups.windows))] for path in paths]
        self._changed()

    def _seen(self, path: Sequence[Page | PageBlock], group: int) -> Held:
        """A group's pages of these blocks, those that a row sees which begins with them."""
        pages = [block.pages[group] for block in path]
        first = max(first_seen(self.groups.windows[group], len(path) * PAGE), _behind_gaps(pages))
        return [*[None] * first, *pages[first:]]


def _numbers(pages: Held) -> list[int]:
    return [0 if page is None else page.number for page in pages]


def _behind_gaps(pages: Held) -> int:
    """The first of these from which on all are there."""
    return next((i + 1 for i in range(len(pages) - 1, -1, -1) if pages[i] is None), 0)
