"""The target model as the engine calls it: keys, values and, for an EAGLE-3 draft, features go into the row cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from service.engine.activations import Activations
from service.engine.kv.cache import RowCache
from service.engine.kv.pool import Pool
from service.engine.replay import Replay
from service.models import eagle


class Target:
    """A target and what its draft reads of it. draft: any version of it, because adapters do not change the projection to
    features."""

    def __init__(self, model: nn.Module, draft: nn.Module | None) -> None:
        self.model = model
        self._features: Callable[[], mx.array] | None = (
            draft.target_features if isinstance(draft, eagle.Model) else None
        )
        self._replay = Replay(model, self._call)
        self.activations = Activations.of(model)
        self.pool = Pool()
        """Where all caches of the target take pages, if rows are paged."""

    def cache(self, rows: int) -> RowCache:
        """An empty cache with `rows` rows, with features if the draft reads them. Raises PairError."""
        return RowCache(self.model, rows, features=self._features is not None, pool=self.pool)

    def __call__(self, tokens: mx.array, cache: RowCache) -> mx.array:
        """Logits (B, N, V) after each of tokens (B, N). Appends keys, values and features to `cache`."""
        return _with_features(self._call([tokens], cache), cache)

    def verify(self, tokens: mx.array, cache: RowCache) -> mx.array:
        """The same for a round's tokens, in traced calls because their shapes repeat."""
        return _with_features(self._replay([tokens], cache, tokens.shape[1]), cache)

    def logits_and_features(self, tokens: mx.array, cache: RowCache) -> tuple[mx.array, mx.array | None]:
        """Logits (B, N, V) after each of tokens (B, N), and features (B, N, width) if the draft reads them. Appends keys and
        values to `cache`, but not the features."""
        logits = self.model(tokens, cache=cache.layers)
        return logits, None if self._features is None else self._features()

    def _call(self, arguments: Sequence[Any], cache: RowCache) -> tuple[mx.array, mx.array | None]:
        return self.logits_and_features(arguments[0], cache)


def _with_features(returned: tuple[mx.array, mx.array | None], cache: RowCache) -> mx.array:
    logits, features = returned
    if features is not None:
        cache.append_features(features)
    return logits
