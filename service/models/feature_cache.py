"""Caches features of texts that an EAGLE head reads repeatedly: in every epoch of a run, and with every adapter scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from service.models.padding import Tokens, grouped, padded_rows


class FeatureCache:
    """The target's features of texts, at most `limit` bytes. Nothing is evicted, because each epoch reads all texts in another
    order.

    A deep copy is the same cache: copies of a head that differ in their adapter read the same features.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self._features: dict[tuple[int, bytes], mx.array] = {}

    def of(
        self, texts: Sequence[Tokens], starts: Sequence[int], length: int, compute: Callable[[mx.array], mx.array]
    ) -> mx.array:
        """The features (B, length, hidden) of B texts at `length` positions from `starts` on, zeros past a text's end.

        compute: features (B', N, hidden) of whole texts (B', N), none of which depends on a later token. Called for texts that
        are not cached, in groups of similar length limited by `padding.TOKENS`.
        """
        keys = [(start, text.tobytes()) for start, text in zip(starts, texts, strict=True)]
        found = [self._features.get(key) for key in keys]
        for group in grouped({row: len(texts[row]) for row, features in enumerate(found) if features is None}):
            computed = compute(mx.array(padded_rows([texts[row] for row in group])))
            # Copied, because a slice shares the memory of the whole.
            parts = [
                mx.contiguous(each[starts[row] : len(texts[row])]) for row, each in zip(group, computed, strict=True)
            ]
            mx.eval(parts)
            for row, part in zip(group, parts, strict=True):
                found[row] = part
                self._add(keys[row], part)
        return mx.stack([_fit(features, length) for features in found if features is not None])

    def clear(self) -> None:
        """Drop all features."""
        self.size = 0
        self._features.clear()

    def _add(self, key: tuple[int, bytes], features: mx.array) -> None:
        if key not in self._features and self.size + features.nbytes <= self.limit:
            self.size += features.nbytes
            self._features[key] = features

    def __deepcopy__(self, memo: dict[int, object]) -> FeatureCache:
        return self


def _fit(features: mx.array, length: int) -> mx.array:
    """(length, hidden): truncated, or padded with zeros."""
    return mx.pad(features[:length], [(0, max(length - features.shape[0], 0)), (0, 0)])
