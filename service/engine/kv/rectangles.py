"""Keys and values of a batch as rectangles: one buffer for the keys of a layer and one for its values (`buffers`).

Rows are left-aligned: row b has positions 0 .. lengths[b]-1. Later positions hold garbage, which the mask hides and the next
write overwrites. Layers with a sliding window hold only their last positions (`window_layer`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from service.engine import device
from service.engine.kv.buffers import PART, copy_moved, grow, join_rows, keep_rows
from service.engine.kv.lengths import Lengths
from service.engine.kv.rectangle_layer import RectangleLayer
from service.engine.kv.window_layer import WindowLayer
from service.engine.strategy import PAGE

Members: TypeAlias = tuple[int, ...]
"""Arrays of a model that have the same shape: 2 * layer is a layer's keys, 2 * layer + 1 its values."""


@dataclass(slots=True, eq=False)
class Block:
    """Copies of the keys and values of PAGE positions: an array (members, heads, PAGE, dims) for each group of layers. whole:
    all layers are present; otherwise some held only later positions. reach: blocks at the end of a cached prefix that must be
    whole."""

    arrays: dict[Members, mx.array]
    whole: bool = True
    reach: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in self.arrays.values())


class Parts:
    """Computes new buffers in parts of PART bytes, so that the arrays they replace are freed before the next are made. The last
    part is left to the call that uses it, so small batches do not wait."""

    def __init__(self) -> None:
        self._arrays: list[mx.array] = []
        self._nbytes = 0

    def add(self, arrays: Sequence[mx.array | None]) -> None:
        """Add the new buffers of a layer. If they exceed a part together with earlier ones, the earlier ones are computed
        first."""
        new = [array for array in arrays if array is not None]
        size = sum(array.nbytes for array in new)
        if self._arrays and self._nbytes + size > PART:
            device.wait(self._arrays)
            self._arrays, self._nbytes = [], 0
        self._arrays += new
        self._nbytes += size


class Rectangles:
    """The keys and values of one cache's rows."""

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths
        self.layers: list[RectangleLayer] = []

    def layer(self, window: int | None) -> RectangleLayer:
        """Add a layer."""
        self.layers.append(RectangleLayer(self.lengths, None) if window is None else WindowLayer(self.lengths, window))
        return self.layers[-1]

    def join(self, others: Sequence[Rectangles], counts: Sequence[int], slots: Sequence[int], size: int) -> None:
        """Move the first counts[i] rows of each of these into the given slots of `size` rows. The others lose their arrays
        layer by layer, so only a part of the layers exists twice at a time."""
        each, rows = [self, *others], [len(self.lengths.host), *counts]
        for one in each:
            one.settle()
        # A single prefill that joins an empty batch is taken over without a copy.
        copied = rows[0] > 0 or len(others) > 1
        parts = Parts()
        for i, mine in enumerate(self.layers):
            shapes = _shapes(mine)
            mine.keys = join_rows([one.layers[i].keys for one in each], rows, slots, size)
            mine.values = join_rows([one.layers[i].values for one in each], rows, slots, size)
            for one in others:
                one.layers[i].keys = one.layers[i].values = None
            if copied and _shapes(mine) != shapes:
                parts.add(mine.both)

    def make_room(self, positions: int) -> None:
        """Give every row capacity for `positions`. Old and new buffers coexist for one part of the layers (`PART`) at a time.
        If all layers are one part, nothing is done: each layer then grows in the call that writes to it."""
        if self.nbytes <= PART:
            return
        parts = Parts()
        for layer in self.layers:
            layer.settle()
            width, shapes = layer.capacity(positions), _shapes(layer)
            layer.keys = None if layer.keys is None else grow(layer.keys, layer.keys, width)
            layer.values = None if layer.values is None else grow(layer.values, layer.values, width)
            if _shapes(layer) != shapes:
                parts.add(layer.both)

    def settle(self) -> None:
        """See RectangleLayer. Call before the rows change."""
        for layer in self.layers:
            layer.settle()

    def pad(self, rows: Collection[int]) -> None:
        """Turn these rows into padding; their contents no longer matter."""
        self.settle()

    def copy_moved(self, rows: Sequence[int], *, tight: bool) -> list[mx.array | None]:
        """The arrays that must be computed before `compact`."""
        self.settle()
        tight = tight or self._moves_much(rows)
        return [
            copy
            for layer in self.layers
            for copy in copy_moved([layer.keys, layer.values], rows, self._top(layer, rows), tight=tight)
        ]

    def compact(self, rows: Sequence[int], copies: Sequence[mx.array | None], *, tight: bool) -> None:
        """Keep these rows, in this order. copies: from `copy_moved`, computed. tight: without spare slots and positions."""
        tight, parts = tight or self._moves_much(rows), Parts()
        for i, layer in enumerate(self.layers):
            shapes, moved = _shapes(layer), copies[2 * i : 2 * i + 2]
            layer.keys, layer.values = keep_rows(
                [layer.keys, layer.values], moved, rows, self._top(layer, rows), tight=tight
            )
            if _shapes(layer) != shapes:
                parts.add(layer.both)

    def _moves_much(self, rows: Sequence[int]) -> bool:
        """Whether copies of the rows that change slots exceed a part. If so, smaller buffers are made layer by layer
        instead."""
        moved = sum(row != slot for slot, row in enumerate(rows))
        return moved * self.nbytes > PART * max(self.slots, 1)

    def clear(self, row: int) -> None:
        """Nothing to do: what a row held is overwritten."""

    def zero_tail(self, row: int, start: int) -> None:
        """See RectangleLayer."""
        for layer in self.layers:
            layer.settle()
            layer.zero_tail(row, start)

    def arrays(self) -> list[mx.array]:
        """The arrays that must be evaluated to compute the rows' contents."""
        return [each for layer in self.layers for each in layer.both if each is not None]

    @property
    def slots(self) -> int:
        """Rows for which there are keys and values, including spare rows."""
        return max((each.shape[0] for each in self.arrays()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(each.nbytes for each in self.arrays())

    @property
    def block_bytes(self) -> int:
        """Bytes of PAGE positions of a row, in all layers."""
        return sum(layer.position_bytes * PAGE for layer in self.layers)

    def blocks(self, row: int, start: int, count: int) -> list[Block]:
        """Uncomputed copies of `count` blocks of a row from block `start` on, for the prefix cache."""
        at_once = max(PART // max(self.block_bytes, 1), 1)
        if count > at_once:
            # Compute in parts, because the array from which blocks are cut exists at the same time.
            blocks = self._blocks(row, start, at_once)
            device.wait([list(block.arrays.values()) for block in blocks])
            return blocks + self.blocks(row, start + at_once, count - at_once)
        return self._blocks(row, start, count)

    def _blocks(self, row: int, start: int, count: int) -> list[Block]:
        begin, end = start * PAGE, (start + count) * PAGE
        blocks = [Block({}, reach=self._reach) for _ in range(count)]
        for members in self._groups():
            first = max(begin, -(-max(self.layers[i // 2].first_held(row) for i in members) // PAGE) * PAGE)
            spans = (self.layers[i // 2].span(row, first, end)[i % 2] for i in members if first < end)
            parts = [part for part in spans if part is not None]
            whole = _copy(parts) if parts else None
            for block, at in zip(blocks, range(begin, end, PAGE), strict=True):
                if whole is None or at < first:
                    block.whole = False
                else:
                    # Copy each block, because views of one array would keep all of it alive until the last block is evicted.
                    block.arrays[members] = _copy([whole[:, :, at - first : at - first + PAGE]])
        return blocks

    def first_whole(self, row: int) -> int:
        """The first block of a row from which on all layers hold all blocks."""
        return -(-max((layer.first_held(row) for layer in self.layers), default=0) // PAGE)

    def adopt(self, blocks: list[Block]) -> list[Block]:
        """Blocks for `load`, made of blocks that were read from files."""
        return blocks

    def load(self, paths: Sequence[Sequence[Block]], positions: int) -> None:
        """Set the keys and values of empty rows to these blocks, one path per row, with capacity for `positions`. The last
        `reach` blocks of each path must be whole."""
        like = next(path[-1] for path in paths if path)
        for members, array in like.arrays.items():
            width = self.layers[members[0] // 2].capacity(max(positions, self.lengths.reserved))
            for place, index in enumerate(members):
                rows = [_row([block.arrays.get(members) for block in path], place, array, width) for path in paths]
                whole = rows[0] if len(rows) == 1 else mx.concatenate(rows)
                layer = self.layers[index // 2]
                if index % 2:
                    layer.values = whole
                else:
                    layer.keys = whole

    def window_bytes(self) -> dict[int, int]:
        """By the maximum positions that a row holds: bytes of one position in the layers with that maximum."""
        found: dict[int, int] = {}
        for layer in self.layers:
            if isinstance(layer, WindowLayer):
                found[layer.most] = found.get(layer.most, 0) + layer.position_bytes
        return found

    @property
    def _reach(self) -> int:
        return max((-(-layer.window // PAGE) for layer in self.layers if layer.window is not None), default=0)

    def _groups(self) -> list[Members]:
        arrays = [each for layer in self.layers for each in layer.both]
        return groups_of(arrays, [layer.window for layer in self.layers])

    def _top(self, layer: RectangleLayer, rows: Sequence[int]) -> int:
        return layer.capacity(max((self.lengths.host[row] for row in rows), default=0))


def _shapes(layer: RectangleLayer) -> list[tuple[int, ...] | None]:
    return [None if array is None else array.shape for array in layer.both]


def groups_of(arrays: Sequence[mx.array | None], windows: Sequence[int | None]) -> list[Members]:
    """Groups the arrays, (n, heads, positions, dims) each, that have the same shape and window. windows: by layer."""
    found: dict[tuple[object, ...], list[int]] = {}
    for index, array in enumerate(arrays):
        # Layers that share another layer's keys and values have none.
        if array is not None:
            kind = windows[index // 2], array.shape[1], array.shape[3], array.dtype
            found.setdefault(kind, []).append(index)
    return [tuple(members) for members in found.values()]


def _row(blocks: Sequence[mx.array | None], place: int, like: mx.array, width: int) -> mx.array:
    """A row (1, heads, width, dims) of a buffer with the last of these blocks: position p in slot p modulo the width."""
    _, heads, _, dims = like.shape
    slots = width // PAGE
    parts = [mx.zeros((1, heads, PAGE, dims), dtype=like.dtype)] * min(slots, len(blocks))
    for number in range(max(0, len(blocks) - slots), len(blocks)):
        if (block := blocks[number]) is not None:
            parts[number % slots] = block[place : place + 1]
    return mx.concatenate([*parts, mx.zeros((1, heads, width - len(parts) * PAGE, dims), dtype=like.dtype)], axis=2)


def _copy(parts: Sequence[mx.array]) -> mx.array:
    # Concatenating a single part would return a view of it. An empty second part forces a copy.
    return mx.concatenate([*parts, parts[0][:0]])
