"""One attention layer of a batch whose rows are in `rectangles`."""

from __future__ import annotations

import mlx.core as mx

from service.engine.kv.buffers import grow, scatter, write
from service.engine.kv.layer import RowLayer, causal_mask
from service.engine.kv.lengths import Lengths
from service.engine.strategy import current


class RectangleLayer(RowLayer):
    """One layer's keys and values, (R, heads, capacity, dims) each, with R at least the number of rows in the batch. Heads and
    dims may differ between keys and values."""

    def __init__(self, lengths: Lengths, window: int | None) -> None:
        super().__init__(lengths, window)
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.most = 0
        """Maximum positions of a row that are held, a multiple of PAGE. Position p is in slot p modulo this value. 0: all are
        held."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """See RowLayer."""
        self.keys = self._append(self.keys, keys)
        self.values = self._append(self.values, values)
        self.ahead += keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """See RowLayer. Views as wide as the longest row, or as what is held."""
        assert self.keys is not None and self.values is not None
        rows, top = len(self.lengths.host), self.lengths.longest + self.ahead
        return self.keys[:rows, :, :top], self.values[:rows, :, :top]

    def contents(self, row: int) -> tuple[mx.array, mx.array | None] | None:
        """See RowLayer."""
        end, keys, values = self.lengths.host[row], self.keys, self.values
        return None if keys is None else (keys[row, :, :end], None if values is None else values[row, :, :end])

    def append_features(self, states: mx.array) -> None:
        """See RowLayer."""
        self.keys = self._append(self.keys, states[:, None])
        self.ahead += states.shape[1]

    def features_at(self, positions: mx.array) -> mx.array | None:
        """See RowLayer."""
        if self.keys is None:
            return None
        at = mx.minimum(positions, self.keys.shape[2] - 1)
        return mx.take_along_axis(self.keys[: len(self.lengths.host), 0], at[..., None], axis=1)

    def _append(self, array: mx.array | None, new: mx.array) -> mx.array:
        count = new.shape[2]
        needed = self.lengths.longest + self.ahead + count
        array = grow(array, new, self.capacity(max(needed, self.lengths.reserved)))
        if self.lengths.equal:
            start = self.lengths.host[0] + self.ahead
            slot = start % self.most if self.most else start
            if slot + count <= array.shape[2]:
                return write(array, new, slot)
        return scatter(array, new, *self.lengths.places(self.ahead, new.shape[1], count, self.most))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """See RowLayer."""
        window = self.window_of(window_size)
        start = self.offset
        width = self.lengths.longest + self.ahead + N
        if isinstance(start, int):
            if window is None or width <= window:
                if N == 1:
                    return None
                if not return_array:
                    return "causal"
            start = mx.array([start])
        return causal_mask(start, N, width, window)

    @property
    def both(self) -> tuple[mx.array | None, mx.array | None]:
        """The arrays that hold keys and values."""
        return self.keys, self.values

    @property
    def position_bytes(self) -> int:
        """Bytes of one position of a row."""
        return sum(each.shape[1] * each.shape[3] * each.dtype.size for each in self.both if each is not None)

    # ------------------------------------------------------ otherwise in a layer with a window (`window_layer`)

    def settle(self) -> None:
        """Move everything into `keys` and `values`. Only while nothing was written past the lengths."""

    def capacity(self, positions: int) -> int:
        """Positions to allocate for rows of this many positions."""
        return current().capacity(positions)

    def first_held(self, row: int) -> int:
        """The first position of a row from which on all positions are held."""
        return 0

    def span(self, row: int, start: int, end: int) -> tuple[mx.array | None, mx.array | None]:
        """Keys and values (1, heads, end - start, dims) of a row's positions, as views where possible."""
        keys, values = (
            None if each is None else each[row : row + 1, :, start:end] for each in (self.keys, self.values)
        )
        return keys, values

    def zero_tail(self, row: int, start: int) -> None:
        """Zero a row from position `start` on: attention gives it zero weight, but zero times NaN is NaN."""
        for array in (self.keys, self.values):
            if array is not None:
                array[row, :, start:] = 0
