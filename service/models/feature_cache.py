"""Features of texts that an EAGLE head reads again and again: in every epoch of a run, and with every adapter scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


class FeatureCache:
    """The target's features of whole texts, `limit` bytes of them at most. What comes first stays: each epoch reads all texts
    in another order.

    A deep copy is the same cache: copies of a head that differ in their adapter read the same features.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self._rows: dict[bytes, mx.array] = {}

    def of(self, texts: Tokens, lengths: Sequence[int], compute: Callable[[mx.array], mx.array]) -> mx.array:
        """The features (B, N, hidden) of texts (B, N), padded behind `lengths`. compute: those (B', N, hidden) of the texts
        (B', N) that are not here; each depends on no token behind it."""
        keys = [text[:length].tobytes() for text, length in zip(texts, lengths, strict=True)]
        missing = [row for row, key in enumerate(keys) if key not in self._rows]
        new: dict[int, mx.array] = {}
        if missing:
            features = compute(mx.array(texts[missing]))
            new = dict(zip(missing, features, strict=True))
            if self.size + features.nbytes <= self.limit:
                mx.eval(features)
                self.size += features.nbytes
                self._rows |= {keys[row]: found for row, found in new.items()}
            if len(missing) == len(keys):
                return features
        return mx.stack(
            [_fit(new[row] if row in new else self._rows[key], texts.shape[1]) for row, key in enumerate(keys)]
        )

    def __deepcopy__(self, memo: dict[int, object]) -> FeatureCache:
        return self


def _fit(row: mx.array, length: int) -> mx.array:
    """(length, hidden): cut, or with zeros behind it."""
    return mx.pad(row[:length], [(0, max(length - row.shape[0], 0)), (0, 0)])
