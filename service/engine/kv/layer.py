"""What a model sees of one attention layer of a row cache, wherever its keys and values are held."""

from __future__ import annotations

from abc import ABC, abstractmethod

import mlx.core as mx

from service.core import PairError
from service.engine.kv.lengths import Lengths


class RowLayer(ABC):
    """One attention layer behind mlx-lm's cache protocol. window: positions that a query sees at most; None: all."""

    def __init__(self, lengths: Lengths, window: int | None) -> None:
        self.lengths = lengths
        self.window = window
        self.ahead = 0
        """Positions written since `lengths` was last set, the same for every row."""

    @property
    def offset(self) -> mx.array | int:
        """Position of the next token of each row: an int where all rows agree (rope's fast path), else (B,)."""
        if self.lengths.equal:
            return self.lengths.host[0] + self.ahead
        return self.lengths.starts(self.ahead)

    @abstractmethod
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (B, heads, N, dims) to every row. Returns `keys_and_values`."""

    @abstractmethod
    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Keys and values (B, heads, width, dims) of the rows, as wide as the mask. Layers that share this one's ask for them
        again (gemma3n)."""

    @abstractmethod
    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """mlx-lm asks before the update. (1 or B, 1, N, width) booleans; None or "causal" where that says it all. Raises
        PairError: see `window_of`."""

    @abstractmethod
    def contents(self, row: int) -> tuple[mx.array, mx.array | None] | None:
        """Keys and values (heads, length, dims) of a row up to its end; None where nothing was written. Features have no
        values."""

    @abstractmethod
    def append_features(self, states: mx.array) -> None:
        """Append features (B, N, width) to every row, as keys without values."""

    @abstractmethod
    def features_at(self, positions: mx.array) -> mx.array | None:
        """Features (B, N, width) at positions (B, N) of each row, int32, none below 0; garbage behind a row's end. None where
        none are stored yet."""

    def window_of(self, asked: int | None) -> int | None:
        """The window of a call. Raises PairError where a model asks for a wider one than its cache holds (plamo3): mlx-lm then
        reads prompts and generates through unlike windows, which no single mask can follow."""
        if asked and self.window and asked > self.window:
            raise PairError(f"it reads prompts through a window of {asked} and generates through {self.window}")
        return asked or self.window


def causal_mask(starts: mx.array, count: int, width: int, window: int | None) -> mx.array:
    """Booleans (B, 1, count, width): what `count` queries from positions starts (B,) on see of `width` keys."""
    key = mx.arange(width)
    query = (starts[:, None] + mx.arange(count))[:, None, :, None]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)
