"""The target as the engine runs it: where the draft reads its hidden states, they are kept beside its keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from service.engine.kv.cache import RowCache
from service.models import eagle


@dataclass(frozen=True, slots=True)
class Target:
    """noted: what the draft makes of the hidden states of a call that was just made; None for one that does not read them."""

    model: nn.Module
    noted: Callable[[], mx.array] | None

    @classmethod
    def of(cls, model: nn.Module, draft: nn.Module | None) -> Target:
        """Adapters leave alone what reads the hidden states, so that versions of one draft may follow one another."""
        return cls(model, draft.noted if isinstance(draft, eagle.Model) else None)

    def cache(self, rows: int) -> RowCache:
        """An empty cache of so many rows, with features where the draft reads hidden states. Raises PairError."""
        return RowCache(self.model, rows, features=self.noted is not None)

    def __call__(self, tokens: mx.array, cache: RowCache) -> mx.array:
        """Logits (B, N, V) after each of tokens (B, N)."""
        logits = self.model(tokens, cache=cache.layers)
        if self.noted is not None:
            cache.note(self.noted())
        return logits
