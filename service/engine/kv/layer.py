"""What a model sees of one attention layer of a row cache, independent of where its keys and values are held."""

from __future__ import annotations

from abc import ABC, abstractmethod

import mlx.core as mx

from service.core import PairError
from service.engine.kv.lengths import Lengths


class RowLayer(ABC):
    """One attention layer behind mlx-lm's cache protocol. window: maximum positions that a query sees; None: all."""

    def __init__(self, lengths: Lengths, window: int | None) -> None:
        self.lengths = lengths
        self.window = window
        self.ahead = 0
        """Positions written since `lengths` was last set, the same for every row."""

    @property
    def offset(self) -> mx.array | int:
        """Position of the next token of each row: an int if all rows agree (RoPE's fast path), otherwise (B,)."""
        if self.lengths.equal:
            return self.lengths.host[0] + self.ahead
        return self.lengths.starts(self.ahead)

    @abstractmethod
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (B, heads, N, dims) to every row. Returns `keys_and_values`."""

    @abstractmethod
    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Keys and values (B, heads, width, dims) of the rows, as wide as the mask. Layers that share this layer's keys and
        values call it again (gemma3n)."""

    @abstractmethod
    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """The mask for the next N tokens; mlx-lm calls this before the update. Booleans (1 or B, 1, N, width), or None or
        "causal" if sufficient. Raises PairError: see `window_of`."""

    @abstractmethod
    def contents(self, row: int) -> tuple[mx.array, mx.array | None] | None:
        """Keys and values (heads, length, dims) of a row up to its end; None if nothing was written. Features have no
        values."""

    @abstractmethod
    def append_features(self, states: mx.array) -> None:
        """Append features (B, N, width) to every row, as keys without values."""

    @abstractmethod
    def features_at(self, positions: mx.array) -> mx.array | None:
        """Features (B, N, width) at positions (B, N) of each row, int32, none below 0; garbage past a row's end. None if none
        are stored yet."""

    def window_of(self, asked: int | None) -> int | None:
        """The window of a call. Raises PairError if a model asks for a wider window than its cache holds (plamo3): mlx-lm then
        prefills and generates with different windows, which no single mask can represent."""
        if asked and self.window and asked > self.window:
            raise PairError(f"it prefills with a window of {asked} tokens but generates with one of {self.window}")
        return asked or self.window


def causal_mask(starts: mx.array, count: int, width: int, window: int | None) -> mx.array:
    """Booleans (B, 1, count, width): which of `width` keys each of `count` queries sees, starting at positions starts (B,)."""
    key = mx.arange(width)
    query = (starts[:, None] + mx.arange(count))[:, None, :, None]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)
