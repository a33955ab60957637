"""The target model as the engine calls it: keys, values and, for an EAGLE-3 draft, features go into the row cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from service.engine.kv.cache import RowCache
from service.models import eagle


@dataclass(frozen=True, slots=True)
class Target:
    """features: returns the EAGLE-3 features (B, N, width) of the target's last call; None where the draft reads none."""

    model: nn.Module
    features: Callable[[], mx.array] | None

    @classmethod
    def of(cls, model: nn.Module, draft: nn.Module | None) -> Target:
        """The target for this draft. Adapters do not change the projection to features, so every version of the draft may be
        used with it."""
        return cls(model, draft.target_features if isinstance(draft, eagle.Model) else None)

    def cache(self, rows: int) -> RowCache:
        """An empty cache of so many rows, with features where the draft reads them. Raises PairError."""
        return RowCache(self.model, rows, features=self.features is not None)

    def __call__(self, tokens: mx.array, cache: RowCache) -> mx.array:
        """Logits (B, N, V) after each of tokens (B, N). Appends keys, values and features to `cache`."""
        logits = self.model(tokens, cache=cache.layers)
        if self.features is not None:
            cache.append_features(self.features())
        return logits
