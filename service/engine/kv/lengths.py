"""The lengths of a cache's rows."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


class Lengths:
    """Length of each row in positions, on the host, and as arrays for RoPE, masks and writes. The arrays are made on demand and
    shared by all layers."""

    def __init__(self, values: Sequence[int]) -> None:
        self.committed = list(values)
        """The committed length of each row, on the host."""
        self.reserved = 0
        """Positions for which buffers in rectangles are allocated at once."""
        self.set(values)

    def commit(self) -> None:
        """Commit the lengths: rows can no longer be rewound to earlier ones."""
        self.committed = self.host

    def set(self, values: Sequence[int]) -> None:
        """Replace all lengths, one per row."""
        self.host = list(values)
        # Computed once, because every layer asks for them.
        self.longest = max(self.host, default=0)
        self.equal = min(self.host, default=0) == self.longest
        self.masks: dict[int, tuple[mx.array, mx.array, int]] = {}
        """By the mask's id: the mask, the position of each row's first query, and the window (0: none)."""
        self._starts: dict[int, mx.array] = {}
        self._places: dict[tuple[int, int, int, int], tuple[mx.array, mx.array, mx.array]] = {}

    def follow(self, starts: mx.array, most: Sequence[int]) -> None:
        """Set the rows' ends to `starts` (rows,), int32, which the host does not know yet. most: an upper bound for each
        row."""
        self.set(most)
        self.equal = False
        self._starts[0] = starts

    def starts(self, ahead: int) -> mx.array:
        """Position (rows,), int32, of each row's next token after `ahead` tokens were written past its length."""
        if ahead not in self._starts:
            known = self._starts.get(0)
            if known is None:
                self._starts[ahead] = mx.array([n + ahead for n in self.host], dtype=mx.int32)
            else:
                # MLX would compile a kernel for each constant in a trace.
                self._starts[ahead] = known + mx.arange(ahead, ahead + 1)
        return self._starts[ahead]

    def places(self, ahead: int, heads: int, count: int, most: int = 0) -> tuple[mx.array, mx.array, mx.array]:
        """Write index of the rows' next `count` tokens: slots (rows, 1, 1), heads (1, heads, 1), positions (rows, 1, count),
        modulo `most` unless it is 0."""
        key = ahead, heads, count, most
        if key not in self._places:
            rows = mx.arange(len(self.host))[:, None, None]
            positions = (self.starts(ahead)[:, None] + mx.arange(count))[:, None]
            positions = positions % most if most else positions
            self._places[key] = (rows, mx.arange(heads)[None, :, None], positions)
        return self._places[key]
