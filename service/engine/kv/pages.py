"""Keys and values in pages from one pool. Rows take pages as they grow and share the pages of common prefixes.

Used on CUDA, where a custom kernel reads the pages (`attention`). The pool's arrays keep their shape while rows join, grow and
leave, so calls repeat few shapes. Nothing is copied when a row joins, leaves, or continues a cached prefix. Each row holds only
what it uses. The layout is that of vLLM's PagedAttention (arXiv 2309.06180).
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
"""Widths of a page table: FEWEST pages per row, multiplied by STEP as needed. Calls with a new width are traced again."""

Held: TypeAlias = "list[Page | None]"
"""The pages of a row for one group; None: released."""


class Pages:
    """The pages that the rows of one cache hold in a pool. In layer groups with a window, a row releases the pages that no
    query sees any more."""

    def __init__(self, pool: Pool, groups: Groups, lengths: Lengths, rows: int) -> None:
        self.pool = pool
        self.groups = groups
        self.lengths = lengths
        self.traced = False
        """Whether this object stands for the rows in a traced call."""
        self._rows: list[list[Held] | None] = [self._none() for _ in range(rows)]
        """By row, a list for each group. None: a padding row, which holds no pages."""
        self._numbers = np.zeros((len(groups.windows), rows, FEWEST), dtype=np.int32)
        self._table: mx.array | None = None
        self._tables: list[mx.array] | None = None
        """The table, split by group."""
        self._layers = 0
        self._reserved: tuple[list[int] | None, int] = (None, 0)
        """The lengths for which pages are reserved, and the number of tokens reserved past them."""

    def _none(self) -> list[Held]:
        return [[] for _ in self.groups.windows]

    def layer(self, window: int | None) -> PagedLayer:
        """Add a layer. Layers refer to this object but not the reverse, so that pages are released when the cache is
        dropped."""
        self._layers += 1
        return PagedLayer(self, window, self._layers - 1)

    @property
    def table(self) -> mx.array:
        """The numbers of each row's pages, int32, 0 where there is none: (B, width), or (groups, B, width) with several
        groups."""
        if self._table is None:
            self._table = mx.array(self._numbers[0] if len(self._numbers) == 1 else self._numbers)
        return self._table

    def table_of(self, group: int) -> mx.array:
        """The table of one group, (B, width)."""
        if self._tables is None:
            table = self.table
            self._tables = [table] if table.ndim == 2 else [table[i] for i in range(table.shape[0])]
        return self._tables[group]

    def _renumbered(self) -> None:
        self._table = self._tables = None

    def written(self) -> list[int]:
        """The indices of the pool's arrays that hold keys and values, not features."""
        return [i for i, (keys, values) in enumerate(self.pool.layers) if keys is not None and values is not None]

    def buffers(self) -> list[mx.array]:
        """The pool's arrays of keys and values."""
        return [cast("mx.array", array) for i in self.written() for array in self.pool.layers[i]]

    def set_buffers(self, written: Sequence[int], buffers: Sequence[mx.array]) -> None:
        """Replace the pool's arrays of keys and values."""
        layers = self.pool.layers
        layers += [(None, None)] * (max(written) + 1 - len(layers))
        for i, both in zip(written, zip(buffers[::2], buffers[1::2], strict=True), strict=True):
            layers[i] = both

    def trace(self, table: mx.array, written: Sequence[int], buffers: Sequence[mx.array]) -> None:
        """Stand for rows in a traced call."""
        self.traced, self._table, self._tables = True, table, None
        self.set_buffers(written, buffers)

    def traced_writes(self) -> tuple[list[mx.array], list[mx.array]]:
        """What a traced call has to return for `take_writes`: the pool's arrays, if writes replaced them, and its in-place
        writes."""
        return [] if self.pool.in_place else self.buffers(), self.pool.unlaunched

    def take_writes(self, buffers: Sequence[mx.array], writes: Sequence[mx.array]) -> None:
        """Take over what a traced call returned from `traced_writes`."""
        if buffers:
            self.set_buffers(self.written(), buffers)
        self.pool.unlaunched.extend(writes)

    def reserve(self, count: int) -> None:
        """Take pages for the next `count` tokens of every row. Pages that no query will see any more are released first. That
        is safe: kernels that read them were launched already, and new writes are launched after those."""
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
        # Skip pages of a row whose length is only claimed.
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
        """Release the pages that no query sees any more."""
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
        """Rebuild the table after rows have changed or one has outgrown it."""
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
        """Take over the first counts[i] rows of each of these into the given slots of `size` rows. Raises ValueError if their
        pages belong to another pool."""
        if any(other.pool is not self.pool for other in others):
            raise ValueError("cannot join rows whose pages belong to another pool")
        self._rows += [self._none() for _ in range(size - len(self._rows))]
        joining = list[list[Held] | None]()
        for other, count in zip(others, counts, strict=True):
            # The last chunk of a prompt is as long as many windows.
            other._release()
            for held, length in zip(other._rows[:count], other.lengths.host, strict=False):
                # A prompt that is shorter than others of its call has taken pages for its padding.
                joining.append(None if held is None else [pages[: -(-length // PAGE)] for pages in held])
            other._rows = []
        for slot, held in zip(slots, joining, strict=True):
            self._rows[slot] = held
        self._changed()

    def pad(self, rows: Collection[int]) -> None:
        """Turn these rows into padding."""
        for row in rows:
            self._rows[row] = None
        if rows:
            self._changed()

    def copy_moved(self, rows: Sequence[int], *, tight: bool) -> list[mx.array | None]:
        """Nothing to copy: paged rows move without a copy."""
        return []

    def compact(self, rows: Sequence[int], copies: Sequence[mx.array | None], *, tight: bool) -> None:
        """Keep these rows, in this order."""
        self._rows = [self._rows[row] for row in rows]
        self._changed()

    def numbers(self, row: int, group: int = 0, first: int = 0) -> mx.array:
        """The numbers of a group's pages that hold a row, from page `first` to its end."""
        return mx.array(self._numbers[group, row, first : -(-self.lengths.host[row] // PAGE)])

    def clear(self, row: int) -> None:
        """Release a row's pages."""
        self._rows[row] = self._none()
        self._changed()

    def zero_tail(self, row: int, start: int) -> None:
        """Zero page 0 for a padding row. Other rows need nothing, because positions past a row's end are not read."""
        if self._rows[row] is None:
            self.pool.zero_first()

    def arrays(self) -> list[mx.array]:
        """The arrays that must be evaluated to compute the rows' contents."""
        return self.pool.arrays()

    @property
    def slots(self) -> int:
        """Rows for which memory is reserved: none."""
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
        """`count` blocks of a row from block `start` on, for the prefix cache. These are the row's pages, shared."""
        held = self._rows[row]
        if held is None:
            return []
        blocks = zip(*(pages[start : start + count] for pages in held), strict=True)
        if self.groups == WHOLE:
            return [cast("Page", page) for (page,) in blocks]
        return [PageBlock(self.pool, pages, self.groups.reach) for pages in blocks]

    def adopt(self, blocks: Sequence[Block]) -> list[Page | PageBlock]:
        """Blocks for `load`, with the contents of blocks that were read from files. Raises MemoryError."""
        return self.pool.fill(blocks)

    def load(self, paths: Sequence[Sequence[Page | PageBlock]], positions: int) -> None:
        """Start empty rows with these blocks, one path per row. Raises ValueError if they belong to another pool."""
        if any(block.pool is not self.pool for path in paths for block in path):
            raise ValueError("cannot load pages that belong to another pool")
        self._rows = [[self._seen(path, group) for group in range(len(self.groups.windows))] for path in paths]
        self._changed()

    def _seen(self, path: Sequence[Page | PageBlock], group: int) -> Held:
        """A group's pages of these blocks that are visible to a row which continues after them."""
        pages = [block.pages[group] for block in path]
        first = max(first_seen(self.groups.windows[group], len(path) * PAGE), _behind_gaps(pages))
        return [*[None] * first, *pages[first:]]


def _numbers(pages: Held) -> list[int]:
    return [0 if page is None else page.number for page in pages]


def _behind_gaps(pages: Held) -> int:
    """The index from which on all pages are present."""
    return next((i + 1 for i in range(len(pages) - 1, -1, -1) if pages[i] is None), 0)
