"""Who proposes tokens. A Drafter sees the rows as they stand and answers with up to K tokens per row and their q."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from service.engine.cache import RowCache
from service.engine.draft import Draft
from service.engine.sampling import SamplingBatch, draw, transform
from service.models.heads import cut_head
from service.models.vocabulary import own


@dataclass(frozen=True, slots=True)
class Proposal:
    """tokens: (B, K). logq: (B, K, V) what they were drawn from, None when no row needs it. logits: (B, K, V) before the
    transform. usable: (B, K) false where the draft's logits were not finite."""

    tokens: mx.array
    logq: mx.array | None
    logits: mx.array
    usable: mx.array


class Drafter(Protocol):
    def propose(
        self, rows: Sequence[Sequence[int]], k: int, batch: SamplingBatch, noise: mx.array | None, key: mx.array
    ) -> Proposal:
        """Propose k tokens after each row's tokens (at least two each). noise: (B, >= k, V) shared with the target."""
        ...


class ModelDrafter:
    """Drafts with a model of its own, whose KV rows run in step with the batch.

    Before drafting, every row's cache holds all its tokens but the last two: feeding two covers both what a round can
    leave unseen (the last draft when all were kept) and the new token, so all rows take part in one call.
    """

    def __init__(self, draft: Draft, vocabulary: int) -> None:
        self.draft = draft
        self.vocabulary = vocabulary
        self.cache = RowCache(draft.model, 0)

    def switch(self, draft: Draft) -> None:
        """Propose with another version of the same draft from now on. Rows under way keep keys and values of the old one:
        slightly stale guesses cost acceptance for the rest of that row, a new prefill would cost every row a pause."""
        self.draft = draft

    def propose(
        self, rows: Sequence[Sequence[int]], k: int, batch: SamplingBatch, noise: mx.array | None, key: mx.array
    ) -> Proposal:
        self.catch_up(rows)
        head = cut_head(self.draft.model)
        if head is None:
            return self._propose(rows, k, batch, noise, key)
        # A cut head proposes what the row itself has shown besides: names and words of its topic come back.
        head.also(mx.array(own(rows, head.keeps)))
        try:
            return self._propose(rows, k, batch, noise, key)
        finally:
            head.also(None)

    def _propose(
        self, rows: Sequence[Sequence[int]], k: int, batch: SamplingBatch, noise: mx.array | None, key: mx.array
    ) -> Proposal:
        self.cache.rewind([len(row) - 2 for row in rows])
        feed = mx.array(np.array([row[-2:] for row in rows], dtype=np.int32))
        tokens: list[mx.array] = []
        kept_logits: list[mx.array] = []
        laws: list[mx.array] = []
        for step in range(k):
            logits = self.draft.model(feed, cache=self.cache.layers)[:, -1:, : self.vocabulary]
            self.cache.commit(feed.shape[1])
            law = transform(logits, batch)
            key, step_key = mx.random.split(key)
            feed = draw(law, batch, None if noise is None else noise[:, step : step + 1], step_key).astype(mx.int32)
            tokens.append(feed)
            kept_logits.append(logits)
            laws.append(law)
        logits = mx.concatenate(kept_logits, axis=1)
        return Proposal(
            tokens=mx.concatenate(tokens, axis=1),
            logq=mx.concatenate(laws, axis=1) if batch.unseeded else None,
            logits=logits,
            usable=mx.isfinite(logits.max(axis=-1)),
        )

    def behind(self, rows: Sequence[Sequence[int]]) -> bool:
        """Whether a row was decoded without drafts since it last had one."""
        return any(have < len(row) - 2 for row, have in zip(rows, self.cache.lengths.host, strict=True))

    def catch_up(self, rows: Sequence[Sequence[int]]) -> None:
        """Feed rows that fell behind (decoded without drafts for a while) what they have not seen, all in one ragged call."""
        held = self.cache.lengths.host
        missing = [list(row[have : len(row) - 2]) for row, have in zip(rows, held, strict=True)]
        longest = max((len(tokens) for tokens in missing), default=0)
        if longest == 0:
            return
        feed = np.zeros((len(rows), longest), dtype=np.int32)
        for line, tokens in zip(feed, missing, strict=True):
            line[: len(tokens)] = tokens
        self.draft.model(mx.array(feed), cache=self.cache.layers)
        self.cache.rewind([have + len(tokens) for have, tokens in zip(held, missing, strict=True)])
