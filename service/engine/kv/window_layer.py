"""A layer with a sliding window, whose rows in `rectangles` hold only their last positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from service.engine.kv.lengths import Lengths
from service.engine.kv.rectangle_layer import RectangleLayer
from service.engine.strategy import PAGE, STEP, current

IN_FLIGHT = 2 * PAGE
"""Maximum positions that pending rounds write past a row's length: two rounds, including rejected tokens."""


@dataclass(slots=True, eq=False)
class LongCall:
    """Keys and values (B, heads, width, dims) of a call over many tokens and of the window before it. first: the position of
    each row's first entry, (B,), int32, negative if a row has no position that early. first_host: the same on the host."""

    first: mx.array
    first_host: list[int]
    keys: mx.array
    values: mx.array


class WindowLayer(RectangleLayer):
    """Position p is in slot p modulo `most`, so a write replaces positions that no query sees any more. `most` exceeds the
    window by what pending rounds write, which may be rejected, and by a block of the prefix cache.

    A longer call, as in prefill, would overwrite what its first queries see. Its keys and values are appended to those of the
    window before it. They move into their slots once the number of tokens that each row keeps is known (`settle`).
    """

    def __init__(self, lengths: Lengths, window: int) -> None:
        super().__init__(lengths, window)
        self.most = -(-window // STEP) * STEP + STEP
        self.kept = -(-window // PAGE) * PAGE + PAGE - 1
        """Positions before a row's end that are always held: the blocks that its window covers, and part of another."""
        self._call: LongCall | None = None

    @property
    def both(self) -> tuple[mx.array | None, mx.array | None]:
        """See RectangleLayer."""
        return (self.keys, self.values) if self._call is None else (self._call.keys, self._call.values)

    def capacity(self, positions: int) -> int:
        """See RectangleLayer."""
        return min(current().capacity(positions), self.most)

    def _long(self, count: int) -> bool:
        """Whether a call of `count` tokens cannot be written into the slots directly."""
        written = self.ahead + count
        return self._call is not None or (written > IN_FLIGHT and self.lengths.longest + written > self.most)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """See RowLayer."""
        self.settle()
        count = keys.shape[2]
        if not self._long(count):
            return super().update_and_fetch(keys, values)
        if self._call is None:
            before = self._before()
            first, first_host = self.lengths.starts(self.ahead) - before, [n - before for n in self._starts_host()]
            at = first[:, None] + mx.arange(before)
            held = [_at(each, at % self.most) for each in (self.keys, self.values) if each is not None and before]
        else:
            first, first_host = self._call.first, self._call.first_host
            held = [self._call.keys, self._call.values]
        new = (
            [mx.concatenate([a, b], axis=2) for a, b in zip(held, (keys, values), strict=True)]
            if held
            else [keys, values]
        )
        self._call = LongCall(first, first_host, *new)
        self.keys = self.values = None
        self.ahead += count
        return self.keys_and_values()

    def _before(self) -> int:
        """Positions before a long call that are kept with it."""
        return min(self.kept, self.lengths.longest + self.ahead)

    def _starts_host(self) -> list[int]:
        return [n + self.ahead for n in self.lengths.host]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """See RowLayer."""
        if self._call is not None:
            return self._call.keys, self._call.values
        return super().keys_and_values()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """See RowLayer."""
        self.settle()
        window, starts = self.window_of(window_size), self.lengths.starts(self.ahead)
        assert window is not None
        if self._long(N):
            if self._call is None:
                first, width = starts - self._before(), self._before() + N
            else:
                first, width = self._call.first, self._call.keys.shape[2] + N
            key = first[:, None] + mx.arange(width)
        elif self.lengths.longest + self.ahead + N > self.most:
            key = _held(starts[:, None] + N, mx.arange(self.most), self.most)
        else:
            return super().make_mask(N, return_array, window_size)
        key, query = key[:, None, None], (starts[:, None] + mx.arange(N))[:, None, :, None]
        return (key >= 0) & (key <= query) & (key > query - window)

    def settle(self) -> None:
        """See RectangleLayer."""
        call = self._call
        if call is None or self.ahead:
            return
        slots = mx.arange(self.capacity(self.lengths.longest))
        at = _held(self.lengths.starts(0)[:, None], slots, self.most) - call.first[:, None]
        at = mx.clip(at, 0, call.keys.shape[2] - 1)
        self.keys, self.values, self._call = _at(call.keys, at), _at(call.values, at), None

    def contents(self, row: int) -> tuple[mx.array, mx.array | None] | None:
        """See RowLayer. Only the window's positions."""
        assert self.window is not None
        self.settle()
        end = self.lengths.host[row]
        keys, values = self.span(row, max(0, end - self.window), end)
        return None if keys is None else (keys[0], None if values is None else values[0])

    def first_held(self, row: int) -> int:
        """See RectangleLayer."""
        if self._call is not None:
            return max(0, self._call.first_host[row])
        return max(0, self.lengths.host[row] - self.kept)

    def span(self, row: int, start: int, end: int) -> tuple[mx.array | None, mx.array | None]:
        """See RectangleLayer."""
        if (call := self._call) is not None:
            at = start - call.first_host[row]
            return call.keys[row : row + 1, :, at : at + end - start], call.values[
                row : row + 1, :, at : at + end - start
            ]
        at = mx.arange(start, end) % self.most
        keys, values = (None if each is None else each[row : row + 1][:, :, at] for each in (self.keys, self.values))
        return keys, values

    def zero_tail(self, row: int, start: int) -> None:
        """See RectangleLayer. Positions held before `start` are kept."""
        for array in (self.keys, self.values):
            if array is not None:
                held = _held(np.array(start), np.arange(array.shape[2]), self.most)
                stays = mx.array((held >= 0) & (held >= start - self.kept))
                array[row] = mx.where(stays[:, None], array[row], 0)


def _held(ends: Any, slots: Any, most: int) -> Any:
    """The positions in these slots of rows that end before `ends`; negative if there is none."""
    return ends - 1 - (ends - 1 + most - slots) % most


def _at(array: mx.array, slots: mx.array) -> mx.array:
    """The contents of slots (B, n) of the first B rows of an array (R, heads, capacity, dims)."""
    rows = slots.shape[0]
    return mx.take_along_axis(array[:rows], mx.minimum(slots, array.shape[2] - 1)[:, None, :, None], axis=2)
