"""Keys and values of a batch as rectangles: one buffer for the keys of a layer and one for its values (`buffers`).

Rows are left-aligned: row b has positions 0 .. lengths[b]-1; slots after them hold garbage, which the mask hides and the next
write overwrites. Sliding-window layers keep all positions and narrow the mask (a rotating buffer cannot be truncated).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from service.engine.kv.buffers import copy_moved, grow, join_rows, keep_rows, scatter, write
from service.engine.kv.layer import RowLayer, causal_mask
from service.engine.kv.lengths import Lengths
from service.engine.strategy import PAGE, current

Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""Arrays of a model that have the same shape: 2 * layer is a layer's keys, 2 * layer + 1 its values."""


class RectangleLayer(RowLayer):
    """One layer's keys and values, (R, heads, capacity, dims) each, R at least the batch's rows; heads and dims may differ
    between the two."""

    def __init__(self, lengths: Lengths, window: int | None) -> None:
        super().__init__(lengths, window)
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """See RowLayer."""
        self.keys = self._append(self.keys, keys)
        self.values = self._append(self.values, values)
        self.ahead += keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """See RowLayer: views, as wide as the longest row."""
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
        array = grow(array, new, self.lengths.longest + self.ahead + count)
        if self.lengths.equal:
            return write(array, new, self.lengths.host[0] + self.ahead)
        return scatter(array, new, *self.lengths.places(self.ahead, new.shape[1], count))

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


@dataclass(slots=True, eq=False)
class Block:
    """Copies of the keys and values of PAGE positions: an array (members, heads, PAGE, dims) for each group."""

    groups: Groups
    arrays: list[mx.array]

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in self.arrays)


class Rectangles:
    """The keys and values of one cache's rows."""

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths
        self.layers: list[RectangleLayer] = []

    def layer(self, window: int | None) -> RectangleLayer:
        """One more layer."""
        self.layers.append(RectangleLayer(self.lengths, window))
        return self.layers[-1]

    def join(self, others: Sequence[Rectangles], counts: Sequence[int], slots: Sequence[int], size: int) -> None:
        """Take the first counts[i] rows of each of these into these slots of `size` rows."""
        each, rows = [self, *others], [len(self.lengths.host), *counts]
        for i, mine in enumerate(self.layers):
            mine.keys = join_rows([one.layers[i].keys for one in each], rows, slots, size)
            mine.values = join_rows([one.layers[i].values for one in each], rows, slots, size)

    def pad(self, rows: Collection[int]) -> None:
        """Make padding of these rows: nothing, their contents no longer matter."""

    def copy_moved(self, rows: Sequence[int], *, tight: bool) -> list[mx.array | None]:
        """What `compact` needs computed."""
        return copy_moved(self._buffers(), rows, self._top(rows), tight=tight)

    def compact(self, rows: Sequence[int], copies: Sequence[mx.array | None], *, tight: bool) -> None:
        """Keep these rows, in this order. copies: of `copy_moved`, computed. tight: without spare slots and positions."""
        remaining = keep_rows(self._buffers(), copies, rows, self._top(rows), tight=tight)
        for i, layer in enumerate(self.layers):
            layer.keys, layer.values = remaining[2 * i : 2 * i + 2]

    def clear(self, row: int) -> None:
        """Nothing: what a row held is overwritten."""

    def zero_tail(self, row: int, start: int) -> None:
        """Set a row's slots from `start` on to zero: attention gives those behind its end no weight, but zero times NaN is
        NaN."""
        for array in self.arrays():
            array[row, :, start:] = 0

    def arrays(self) -> list[mx.array]:
        """What has to be evaluated for the rows' contents to be there."""
        return [each for each in self._buffers() if each is not None]

    @property
    def slots(self) -> int:
        """Rows for which there are keys and values, spare ones among them."""
        return max((each.shape[0] for each in self.arrays()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(each.nbytes for each in self.arrays())

    @property
    def block_bytes(self) -> int:
        """Bytes of PAGE positions of a row."""
        return sum(a.shape[1] * PAGE * a.shape[3] * a.dtype.size for a in self.arrays())

    def blocks(self, row: int, start: int, count: int) -> list[Block]:
        """Copies, not computed, of so many blocks of a row from the one numbered `start` on, for the prefix cache."""
        arrays = self._buffers()
        groups, begin, end = groups_of(arrays), start * PAGE, (start + count) * PAGE
        wholes = [
            _copy([a[row : row + 1, :, begin:end] for index in members if (a := arrays[index]) is not None])
            for members in groups
        ]
        # A block by itself: parts of one array would live until the last of them was evicted.
        return [
            Block(groups, [_copy([each[:, :, at : at + PAGE]]) for each in wholes])
            for at in range(0, end - begin, PAGE)
        ]

    def adopt(self, blocks: list[Block]) -> list[Block]:
        """Blocks that `load` takes, made of blocks that were read."""
        return blocks

    def load(self, paths: Sequence[Sequence[Block]], positions: int) -> None:
        """Set the keys and values of empty rows to these blocks, a path for each row, with capacity for `positions`."""
        width = current().capacity(positions)
        like = next(path[0] for path in paths if path)
        for group, (members, array) in enumerate(zip(like.groups, like.arrays, strict=True)):
            _, heads, _, dims = array.shape
            for place, index in enumerate(members):
                rows: list[mx.array] = []
                for path in paths:
                    parts = [block.arrays[group][place : place + 1] for block in path]
                    spare = mx.zeros((1, heads, width - len(path) * PAGE, dims), dtype=array.dtype)
                    rows.append(mx.concatenate([*parts, spare], axis=2))
                whole = rows[0] if len(rows) == 1 else mx.concatenate(rows)
                layer = self.layers[index // 2]
                if index % 2:
                    layer.values = whole
                else:
                    layer.keys = whole

    def _buffers(self) -> list[mx.array | None]:
        return [each for layer in self.layers for each in (layer.keys, layer.values)]

    def _top(self, rows: Sequence[int]) -> int:
        return current().capacity(max((self.lengths.host[row] for row in rows), default=0))


def groups_of(arrays: Sequence[mx.array | None]) -> Groups:
    """Those of these arrays, (n, heads, positions, dims) each."""
    found: dict[tuple[object, ...], list[int]] = {}
    for index, array in enumerate(arrays):
        # Layers that share another layer's keys and values have none.
        if array is not None:
            found.setdefault((array.shape[1], array.shape[3], array.dtype), []).append(index)
    return tuple(tuple(members) for members in found.values())


def _copy(parts: Sequence[mx.array]) -> mx.array:
    # Concatenating a single part would return a view of it; an empty second part forces a copy.
    return mx.concatenate([*parts, parts[0][:0]])
