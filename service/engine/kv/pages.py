"""Keys and values in pages of one pool, which rows take as they grow and share where they begin alike.

On CUDA: attention reads pages by a kernel of our own (`attention`). The pool's arrays keep their shape while rows come, grow
and go, so that calls of few shapes come again; nothing is copied when a row joins, leaves, or goes on behind a cached prefix.
Each row holds what it uses, whatever others hold. The layout is vLLM's PagedAttention (arXiv 2309.06180).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import mlx.core as mx
import numpy as np

from service.engine.attention import FEW, RowCall, gather_pages
from service.engine.kv.layer import RowLayer, causal_mask
from service.engine.kv.lengths import Lengths
from service.engine.kv.pool import Page, Pool
from service.engine.kv.rectangles import Block
from service.engine.strategy import PAGE, current

FEWEST, STEP = 32, 4
"""Pages of a row that a table has room for: FEWEST, or STEP times as many, and so on: calls of other widths are traced anew."""


class PagedLayer(RowLayer):
    """One layer of rows in pages. index: among the pool's layers."""

    def __init__(self, pages: Pages, window: int | None, index: int) -> None:
        super().__init__(pages.lengths, window)
        self._pages = pages
        self.index = index
        self._count = 0
        """Tokens of the last write."""
        self._written: mx.array | None = None
        """What the last write returned."""
        self._fresh: tuple[mx.array, mx.array] | None = None
        """What was written last, where the rows hold nothing else."""
        self._views: tuple[mx.array | None, mx.array | None] = (None, None)
        """What `keys_and_values` returned last."""

    @property
    def keys(self) -> mx.array | None:
        """The pool's. Some models (deepseek_v32) read them, and set them to what makes MLX compute them, as `Pool.arrays` does
        here."""
        return self._pages.pool.layers[self.index][0]

    @keys.setter
    def keys(self, value: mx.array) -> None:
        pass

    @property
    def values(self) -> mx.array | None:
        """The same of values."""
        return self._pages.pool.layers[self.index][1]

    @values.setter
    def values(self, value: mx.array) -> None:
        self._pages.pool.zeroed.add(self.index)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """See RowLayer."""
        self._write(keys, values)
        empty = not self._pages.traced and self.lengths.longest == 0 and self.ahead == keys.shape[2]
        self._fresh = (keys, values) if empty else None
        return self.keys_and_values()

    def _write(self, keys: mx.array, values: mx.array | None) -> None:
        # Views that are still referred to would make it a copy.
        self._views = (None, None)
        self._count = keys.shape[2]
        if self.index == 0 and not self._pages.traced:
            # Of the call before this one, which nothing that reads its pages has as an input.
            self._pages.pool.launch()
        self._pages.reserve(self.ahead + self._count)
        starts = self.lengths.starts(self.ahead)
        self._written = self._pages.pool.write(self.index, keys, values, starts, self._pages.table)
        self.ahead += self._count

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """See RowLayer. They are gathered only if something reads them."""
        keys, values = self._pages.pool.layers[self.index]
        assert keys is not None and values is not None
        width, table, ends = self._width(self._count, self.ahead), self._pages.table, self.lengths.starts(self.ahead)
        self._views = (
            gather_pages(keys, table, ends, width, self._written),
            gather_pages(values, table, ends, width, self._written),
        )
        return self._views

    def _causal(self, count: int, ahead: int, window: int | None) -> bool:
        """Whether a call over so many tokens a row is a part of prompts that have come equally far. MLX would make a mask one
        for each head: on CUDA 10 GB for 2,048 tokens over 32,768 positions and 72 heads."""
        end = self.lengths.longest + ahead
        return count > FEW and self.lengths.equal and not self._pages.traced and (window is None or end <= window)

    def _width(self, count: int, ahead: int) -> int:
        """Positions that a call over so many tokens a row sees: of the whole table, where it may come again."""
        if self._pages.traced or count <= FEW:
            return self._pages.table.shape[1] * PAGE
        if self._causal(count, ahead, self.window):
            return self.lengths.longest + ahead
        return current().capacity(self.lengths.longest + ahead)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str:
        """See RowLayer. By an array `row_call` knows the call."""
        window = self.window_of(window_size)
        if not return_array and self._causal(N, self.ahead + N, window):
            return "causal"
        self._pages.reserve(self.ahead + N)
        starts = self.lengths.starts(self.ahead)
        mask = causal_mask(starts, N, self._width(N, self.ahead + N), window)
        self.lengths.masks[id(mask)] = (mask, starts, window or 0)
        return mask

    def row_call(self, keys: mx.array, values: mx.array, mask: object) -> RowCall | None:
        """What a call over `keys` and `values` under `mask` is for `attention`, where these are the layer's own; else None."""
        causal = isinstance(mask, str)
        known = (mask, self.lengths.starts(self.ahead - self._count), 0) if causal else self.lengths.masks.get(id(mask))
        own = keys is self._views[0] and values is self._views[1]
        fresh, self._fresh, self._views = self._fresh, None, (None, None)
        if known is None or not own:
            return None
        mine, theirs = self._pages.pool.layers[self.index]
        assert mine is not None and theirs is not None
        _, starts, window = known
        if window and self._count > window:
            fresh = None
        return RowCall(mine, theirs, starts, self._pages.table, window, self._written, fresh)

    def contents(self, row: int) -> tuple[mx.array, mx.array | None] | None:
        """See RowLayer."""
        pool, end = self._pages.pool, self.lengths.host[row]
        pool.launch()
        if self.index >= len(pool.layers) or pool.layers[self.index][0] is None:
            return None
        pages = self._pages.numbers(row)
        keys, values = (None if each is None else _joined(each[pages])[:, :end] for each in pool.layers[self.index])
        if values is not None and self.index in pool.zeroed:
            values = mx.zeros_like(values)
        return cast("mx.array", keys), values

    def append_features(self, states: mx.array) -> None:
        """See RowLayer."""
        self._write(states[:, None], None)

    def features_at(self, positions: mx.array) -> mx.array | None:
        """See RowLayer."""
        layers, table = self._pages.pool.layers, self._pages.table
        features = layers[self.index][0] if self.index < len(layers) else None
        if features is None:
            return None
        places = mx.minimum(positions // PAGE, table.shape[1] - 1)
        at = mx.take_along_axis(table, places, axis=1) * PAGE + positions % PAGE
        return features.reshape(-1, features.shape[3])[at]


class Pages:
    """The pages that the rows of one cache hold in a pool."""

    def __init__(self, pool: Pool, lengths: Lengths, rows: int) -> None:
        self.pool = pool
        self.lengths = lengths
        self.traced = False
        """It only stands for the rows in a traced call."""
        self._rows: list[list[Page] | None] = [[] for _ in range(rows)]
        """None: a padding row, which holds no page."""
        self._numbers = np.zeros((rows, FEWEST), dtype=np.int32)
        self._table: mx.array | None = None
        self._layers = 0

    def layer(self, window: int | None) -> PagedLayer:
        """One more layer. Layers refer to this object and not the other way round: pages are given back when the cache goes."""
        self._layers += 1
        return PagedLayer(self, window, self._layers - 1)

    @property
    def table(self) -> mx.array:
        """The number of each page of each row, (B, width), int32; 0 where there is none."""
        if self._table is None:
            self._table = mx.array(self._numbers)
        return self._table

    def written(self) -> list[int]:
        """The layers that hold keys and values: not that of features, nor one that shares another's."""
        return [i for i, (keys, values) in enumerate(self.pool.layers) if keys is not None and values is not None]

    def buffers(self) -> list[mx.array]:
        """The pool's arrays for these layers."""
        return [cast("mx.array", array) for i in self.written() for array in self.pool.layers[i]]

    def set_buffers(self, written: Sequence[int], buffers: Sequence[mx.array]) -> None:
        """Replace the pool's arrays for these layers."""
        layers = self.pool.layers
        layers += [(None, None)] * (max(written) + 1 - len(layers))
        for i, both in zip(written, zip(buffers[::2], buffers[1::2], strict=True), strict=True):
            layers[i] = both

    def trace(self, table: mx.array, written: Sequence[int], buffers: Sequence[mx.array]) -> None:
        """Stand for rows in a traced call."""
        self.traced, self._table = True, table
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
        """Take pages for the next `count` tokens of every row."""
        if self.traced:
            return
        for row, (held, length) in enumerate(zip(self._rows, self.lengths.host, strict=True)):
            if held is not None and (more := -(-(length + count) // PAGE) - len(held)) > 0:
                self._extend(row, held, self.pool.take(more))

    def _extend(self, row: int, held: list[Page], more: Sequence[Page]) -> None:
        start, end = len(held), len(held) + len(more)
        held.extend(more)
        if end > self._numbers.shape[1]:
            self._changed()
        else:
            self._numbers[row, start:end] = [page.number for page in more]
            self._table = None

    def _changed(self) -> None:
        """Rows are others, or one has become too long for the table."""
        width, longest = FEWEST, max((len(held) for held in self._rows if held), default=0)
        while width < longest:
            width *= STEP
        self._numbers = np.zeros((len(self._rows), width), dtype=np.int32)
        for numbers, held in zip(self._numbers, self._rows, strict=True):
            if held:
                numbers[: len(held)] = [page.number for page in held]
        self._table = None

    def join(self, others: Sequence[Pages], counts: Sequence[int], slots: Sequence[int], size: int) -> None:
        """Take over the first counts[i] rows of each of these, into these slots of `size` rows. Raises ValueError where they
        have pages of another pool."""
        if any(other.pool is not self.pool for other in others):
            raise ValueError("rows of another pool cannot join")
        self._rows += [[] for _ in range(size - len(self._rows))]
        joining = list[list[Page] | None]()
        for other, count in zip(others, counts, strict=True):
            for held, length in zip(other._rows[:count], other.lengths.host, strict=False):
                # A shorter prompt than others of its call has taken pages for their padding.
                joining.append(None if held is None else held[: -(-length // PAGE)])
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

    def numbers(self, row: int) -> mx.array:
        """The numbers of the pages that hold a row up to its end."""
        return mx.array(self._numbers[row, : -(-self.lengths.host[row] // PAGE)])

    def clear(self, row: int) -> None:
        """Give a row's pages back."""
        self._rows[row] = []
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
        return self.pool.page_bytes

    def window_bytes(self) -> dict[int, int]:
        """See Rectangles: in pages all layers hold all positions."""
        return {}

    def first_whole(self, row: int) -> int:
        """See Rectangles: every block is."""
        return 0

    def blocks(self, row: int, start: int, count: int) -> list[Page]:
        """So many whole pages of a row from the one numbered `start` on, for the prefix cache."""
        held = self._rows[row]
        return [] if held is None else held[start : start + count]

    def adopt(self, blocks: Sequence[Block]) -> list[Page]:
        """Pages that `load` takes, with the contents of blocks that were read. Raises MemoryError."""
        return self.pool.fill(blocks)

    def load(self, paths: Sequence[Sequence[Page]], positions: int) -> None:
        """Let empty rows begin with these pages, a path for each row. Raises ValueError where they are another pool's."""
        if any(page.pool is not self.pool for path in paths for page in path):
            raise ValueError("pages of another pool cannot be loaded")
        self._rows = [list(path) for path in paths]
        self._changed()


def _joined(pages: mx.array) -> mx.array:
    """(heads, positions, dims) of pages (n, heads, PAGE, dims) that follow each other."""
    n, heads, _, dims = pages.shape
    return pages.swapaxes(0, 1).reshape(heads, n * PAGE, dims)
