"""The target model as the engine calls it: keys, values and, for an EAGLE-3 draft, features go into the row cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from service.engine.kv.cache import RowCache
from service.engine.replay import Replay
from service.models import eagle


class Target:
    """A target and what its draft reads of it. draft: any version of it, for adapters do not change the projection to
    features."""

    def __init__(self, model: nn.Module, draft: nn.Module | None) -> None:
        self.model = model
        self._features: Callable[[], mx.array] | None = (
            draft.target_features if isinstance(draft, eagle.Model) else None
        )
        self._replay = Replay(model, self._call)

    def cache(self, rows: int) -> RowCache:
        """An empty cache of so many rows, with features where the draft reads them. Raises PairError."""
        return RowCache(self.model, rows, features=self._features is not None)

    def __call__(self, tokens: mx.array, cache: RowCache) -> mx.array:
        """Logits (B, N, V) after each of tokens (B, N). Appends keys, values and features to `cache`."""
        return _with_features(self._call([tokens], cache), cache)

    def verify(self, tokens: mx.array, cache: RowCache) -> mx.array:
        """The same of a round's tokens: calls of its shape come again."""
        return _with_features(self._replay([tokens], cache), cache)

    def _call(self, arrays: Sequence[mx.array], cache: RowCache) -> tuple[mx.array, ...]:
        logits = self.model(arrays[0], cache=cache.layers)
        return (logits,) if self._features is None else (logits, self._features())


def _with_features(returned: Sequence[mx.array], cache: RowCache) -> mx.array:
    logits, *features = returned
    if features:
        cache.append_features(features[0])
    return logits
