"""Drafts with an EAGLE-3 head, which reads the target's hidden states (arXiv 2503.01840)."""

from __future__ import annotations

from typing import cast

import mlx.core as mx

from service.engine.adapters import Draft
from service.engine.drafters.model import ModelDrafter
from service.engine.kv.cache import RowCache
from service.models import eagle


class EagleDrafter(ModelDrafter):
    """A ModelDrafter whose model also reads a feature of the position before each token.

    For positions that the target has processed the features come from `target`, the target's cache of the batch; in the further
    draft steps of a round they are the head's own hidden states of the step before.
    """

    def __init__(self, draft: Draft, vocabulary: int, target: RowCache) -> None:
        super().__init__(draft, vocabulary, target)
        self._state: mx.array | None = None

    def extend(self, tokens: mx.array, cache: RowCache, target: RowCache) -> mx.array:
        """See ModelDrafter. Returns hidden states (B, N, hidden)."""
        return self._model.model(
            self.clamp_ids(tokens), cache.layers, target.features_before(cache.lengths.host, tokens.shape[1])
        )

    def prefill_limit(self, target: RowCache) -> int:
        """One position more than the target's, because a position needs the feature of the one before it."""
        return target.lengths.longest + 1

    def split_model(self) -> None:
        """None: `forward` and `logits_from` call backbone and head themselves."""

    def forward(self, feed: mx.array, *, first: bool) -> mx.array:
        """See ModelDrafter. Returns hidden states (B, N, hidden)."""
        if first:
            return self.extend(feed, self.cache, self.target)
        return self._model.model(feed, self.cache.layers, self._state)

    def logits_from(self, out: mx.array) -> mx.array:
        """Logits (B, 1, V) from hidden states (B, 1, hidden), which are the features of the next step."""
        self._state = out
        return self._model.logits(out)

    @property
    def _model(self) -> eagle.Model:
        return cast("eagle.Model", self.draft.model)


def make_drafter(draft: Draft, vocabulary: int, target: RowCache) -> ModelDrafter:
    """The drafter for this kind of draft. vocabulary: width of the target's logits. target: its cache of the batch."""
    kind = EagleDrafter if isinstance(draft.model, eagle.Model) else ModelDrafter
    return kind(draft, vocabulary, target)
