"""One attention layer over paged rows, as a model sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import mlx.core as mx

from service.engine.attention import FEW, RowCall, gather_pages
from service.engine.kv.layer import RowLayer, causal_mask
from service.engine.strategy import PAGE, current

if TYPE_CHECKING:
    from service.engine.kv.pages import Pages


class PagedLayer(RowLayer):
    """One layer over paged rows. index: the layer's index in the cache."""

    def __init__(self, pages: Pages, window: int | None, index: int) -> None:
        super().__init__(pages.lengths, window)
        self._pages = pages
        self.index = index
        self.group, self.slot = pages.groups.place(index)
        self._count = 0
        """Tokens of the last write."""
        self._written: mx.array | None = None
        """The result of the last write."""
        self._fresh: tuple[mx.array, mx.array] | None = None
        """The keys and values of the last write, if the rows hold nothing else."""
        self._views: tuple[mx.array | None, mx.array | None] = (None, None)
        """The last result of `keys_and_values`."""

    @property
    def keys(self) -> mx.array | None:
        """The pool's keys. Some models (deepseek_v32) read them and assign a dependency that forces evaluation. Here
        `Pool.arrays` does that."""
        return self._pages.pool.layers[self.slot][0]

    @keys.setter
    def keys(self, value: mx.array) -> None:
        pass

    @property
    def values(self) -> mx.array | None:
        """The pool's values; see `keys`."""
        return self._pages.pool.layers[self.slot][1]

    @values.setter
    def values(self, value: mx.array) -> None:
        self._pages.pool.zeroed.add(self.index)

    @property
    def table(self) -> mx.array:
        """The numbers of each row's pages for this layer, (B, width), int32; 0 where there is none."""
        return self._pages.table_of(self.group)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """See RowLayer."""
        self._write(keys, values)
        empty = not self._pages.traced and self.lengths.longest == 0 and self.ahead == keys.shape[2]
        self._fresh = (keys, values) if empty else None
        return self.keys_and_values()

    def _write(self, keys: mx.array, values: mx.array | None) -> None:
        # A view that is still referenced would force a copy.
        self._views = (None, None)
        self._count = keys.shape[2]
        if self.index == 0 and not self._pages.traced:
            # Launch the previous call's writes, which no kernel that reads those pages has as an input.
            self._pages.pool.launch()
        self._pages.reserve(self.ahead + self._count)
        starts = self.lengths.starts(self.ahead)
        self._written = self._pages.pool.write(self.slot, keys, values, starts, self.table)
        self.ahead += self._count

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """See RowLayer. Pages are gathered only if something reads the result."""
        keys, values = self._pages.pool.layers[self.slot]
        assert keys is not None and values is not None
        width, table, ends = self._width(self._count, self.ahead), self.table, self.lengths.starts(self.ahead)
        self._views = (
            gather_pages(keys, table, ends, width, self._written),
            gather_pages(values, table, ends, width, self._written),
        )
        return self._views

    def _causal(self, count: int, ahead: int, window: int | None) -> bool:
        """Whether a call over this many tokens per row is a prefill chunk of rows of equal length. For these, MLX's mask would
        have one copy per head: 10 GB on CUDA for 2,048 tokens over 32,768 positions and 72 heads."""
        end = self.lengths.longest + ahead
        return count > FEW and self.lengths.equal and not self._pages.traced and (window is None or end <= window)

    def _width(self, count: int, ahead: int) -> int:
        """Positions that a call over this many tokens per row sees; those of the whole table if the call's shape is to
        repeat."""
        if self._pages.traced or count <= FEW:
            return self._pages.table.shape[-1] * PAGE
        if self._causal(count, ahead, self.window):
            return self.lengths.longest + ahead
        return current().capacity(self.lengths.longest + ahead)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str:
        """See RowLayer. `row_call` recognises a call by its mask array."""
        window = self.window_of(window_size)
        if not return_array and self._causal(N, self.ahead + N, window):
            return "causal"
        self._pages.reserve(self.ahead + N)
        starts = self.lengths.starts(self.ahead)
        mask = causal_mask(starts, N, self._width(N, self.ahead + N), window)
        self.lengths.masks[id(mask)] = (mask, starts, window or 0)
        return mask

    def row_call(self, keys: mx.array, values: mx.array, mask: object) -> RowCall | None:
        """The arguments of `attention` for a call over `keys` and `values` under `mask`, if these are this layer's views;
        otherwise None."""
        causal = isinstance(mask, str)
        known = (mask, self.lengths.starts(self.ahead - self._count), 0) if causal else self.lengths.masks.get(id(mask))
        own = keys is self._views[0] and values is self._views[1]
        fresh, self._fresh, self._views = self._fresh, None, (None, None)
        if known is None or not own:
            return None
        mine, theirs = self._pages.pool.layers[self.slot]
        assert mine is not None and theirs is not None
        _, starts, window = known
        if window and self._count > window:
            fresh = None
        return RowCall(mine, theirs, starts, self.table, window, self._written, fresh)

    def contents(self, row: int) -> tuple[mx.array, mx.array | None] | None:
        """See RowLayer. Only a window's positions if only these are held."""
        pool, end, window = self._pages.pool, self.lengths.host[row], self._pages.groups.windows[self.group]
        pool.launch()
        if self.slot >= len(pool.layers) or pool.layers[self.slot][0] is None:
            return None
        start = 0 if window is None else max(0, end - window)
        pages, skipped = self._pages.numbers(row, self.group, start // PAGE), start // PAGE * PAGE
        keys, values = (
            None if each is None else _joined(each[pages])[:, start - skipped : end - skipped]
            for each in pool.layers[self.slot]
        )
        if values is not None and self.index in pool.zeroed:
            values = mx.zeros_like(values)
        return cast("mx.array", keys), values

    def append_features(self, states: mx.array) -> None:
        """See RowLayer."""
        self._write(states[:, None], None)

    def features_at(self, positions: mx.array) -> mx.array | None:
        """See RowLayer."""
        layers, table = self._pages.pool.layers, self.table
        features = layers[self.slot][0] if self.slot < len(layers) else None
        if features is None:
            return None
        places = mx.minimum(positions // PAGE, table.shape[1] - 1)
        at = mx.take_along_axis(table, places, axis=1) * PAGE + positions % PAGE
        return features.reshape(-1, features.shape[3])[at]


def _joined(pages: mx.array) -> mx.array:
    """(heads, positions, dims) of consecutive pages (n, heads, PAGE, dims)."""
    n, heads, _, dims = pages.shape
    return pages.swapaxes(0, 1).reshape(heads, n * PAGE, dims)
