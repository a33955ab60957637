"""Drafting with a head that reads the target's hidden states."""

from __future__ import annotations

from typing import cast

import mlx.core as mx

from service.engine.adapters import Draft
from service.engine.drafters.model import ModelDrafter
from service.engine.kv.cache import RowCache
from service.models import eagle


class EagleDrafter(ModelDrafter):
    """As a ModelDrafter, but that an entry is a token and what the target made of the one before: `target`, the batch's cache,
    holds that for all the target has read. From there on each step reads the hidden state of the one before."""

    def __init__(self, draft: Draft, vocabulary: int, target: RowCache) -> None:
        super().__init__(draft, vocabulary, target)
        self._state: mx.array | None = None

    def feed(self, tokens: mx.array, cache: RowCache, target: RowCache) -> mx.array:
        """See ModelDrafter: hidden states (B, N, hidden), from tokens and the target's features of the positions before."""
        return self._model.model(self.known(tokens), cache.layers, target.before(cache.lengths.host, tokens.shape[1]))

    def readable(self, target: RowCache) -> int:
        """One position more than the target has read: an entry needs what the target made of the token before it."""
        return target.lengths.longest + 1

    def parts(self) -> None:
        """It comes in two as it is."""

    def run(self, feed: mx.array, *, first: bool) -> mx.array:
        """See ModelDrafter: hidden states (B, N, hidden). After the first call the features are the last step's own states."""
        if first:
            return self.feed(feed, self.cache, self.target)
        return self._model.model(feed, self.cache.layers, self._state)

    def told(self, out: mx.array) -> mx.array:
        """Logits (B, 1, V) from hidden states (B, 1, hidden), which become the features of the next step."""
        self._state = out
        return self._model.logits(out)

    @property
    def _model(self) -> eagle.Model:
        return cast("eagle.Model", self.draft.model)


def drafter(draft: Draft, vocabulary: int, target: RowCache) -> ModelDrafter:
    """Who drafts with a draft of this kind. target: the batch's cache."""
    kind = EagleDrafter if isinstance(draft.model, eagle.Model) else ModelDrafter
    return kind(draft, vocabulary, target)
