"""Drafting with an EAGLE-3 head, which reads the target's hidden states (arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from service.engine.adapters import Draft
from service.engine.drafters.model import DraftCalls, ModelDrafter
from service.engine.kv.cache import RowCache
from service.models import eagle


class EagleDrafter(ModelDrafter):
    """A ModelDrafter whose model also reads, for each token, a feature of the preceding position.

    For positions that the target has processed, the features come from `target`, the target's cache of the batch. In later
    draft steps of a round they are the head's hidden states of the previous step.
    """

    def __init__(self, draft: Draft, vocabulary: int, target: RowCache, chunk: int) -> None:
        super().__init__(draft, vocabulary, target, chunk)
        self._state: mx.array | None = None

    def extend(self, tokens: mx.array, cache: RowCache, target: RowCache) -> mx.array:
        """See ModelDrafter. Returns hidden states (B, N, hidden)."""
        return self._model.model(
            self.clamp_ids(tokens), cache.layers, target.features_before(cache.lengths, tokens.shape[1])
        )

    def prefill_limit(self, target: RowCache) -> int:
        """One position more than the target's, because a position needs the feature of the preceding one."""
        return target.lengths.longest + 1

    def make_calls(self) -> DraftCalls:
        """See ModelDrafter."""
        return draft_calls(self._model)

    def inputs(self, tokens: mx.array, *, first: bool) -> list[mx.array]:
        """See ModelDrafter: tokens, and features if there are any."""
        features = self._state
        if first:
            features = self.target.features_before(self.cache.lengths, tokens.shape[1])
        return [tokens] if features is None else [tokens, features]

    def logits(self, calls: DraftCalls, out: mx.array) -> mx.array:
        """See ModelDrafter. The hidden states (B, 1, hidden) are the features of the next step."""
        self._state = out
        return calls.head(out)

    @property
    def rereads(self) -> bool:
        """See ModelDrafter: the target's features are now available for positions that used the head's hidden states. False if
        the first step of a round feeds the same number of tokens for every row (docs/decisions/engine.md)."""
        return not self._feeds_alike

    @property
    def _model(self) -> eagle.Model:
        return cast("eagle.Model", self.draft.model)


def draft_calls(model: nn.Module) -> DraftCalls:
    """The calls of a draft. The backbone of a head reads tokens (B, N) and features (B, N, width), or tokens only."""
    if not isinstance(model, eagle.Model):
        return DraftCalls.of(model)

    def hidden(arrays: Sequence[mx.array], cache: RowCache) -> mx.array:
        tokens, *features = arrays
        return model.model(tokens, cache.layers, features[0] if features else None)

    return DraftCalls(hidden, model.logits)


def make_drafter(draft: Draft, vocabulary: int, target: RowCache, chunk: int) -> ModelDrafter:
    """The drafter for this kind of draft. Arguments as for ModelDrafter."""
    kind = EagleDrafter if isinstance(draft.model, eagle.Model) else ModelDrafter
    return kind(draft, vocabulary, target, chunk)
