"""Distil a pruned draft on text its target wrote, towards the target's distribution at every written position.

Losses: forward KL, or a blend of it with the total variation distance, which is the share of drafted tokens that a target
rejects at T = 1 (LK losses, arXiv 2602.23881): the blend moves from the first to the second as the draft gets better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from service.learning.writing import FORCED, Text

_SHARED = ("embed_tokens", "wte", "lm_head")
"""Modules that stay the target's own: the draft ships without them."""
_STEEP = 3.0
"""How fast the blend leaves KL as the overlap grows: the paper's."""


@dataclass(frozen=True, slots=True)
class TextBatch:
    """tokens: (B, L) int32. written: (B, L - 1) float32, 1 where the *next* token was written and not forced."""

    tokens: mx.array
    written: mx.array

    @property
    def count(self) -> int:
        """Token positions processed."""
        return self.tokens.size


def batches(text: Text, rows: int, epochs: int, seed: int) -> Iterator[TextBatch]:
    """Shuffled batches of `rows` texts; what an epoch leaves over goes into the next one's first batch."""
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(len(text.tokens)) for _ in range(epochs)])
    for start in range(0, len(order) - rows + 1, rows):
        chosen = order[start : start + rows]
        written = (text.role[chosen, 1:] != FORCED).astype(np.float32)
        yield TextBatch(mx.array(text.tokens[chosen]), mx.array(written))


def batch_count(text: Text, rows: int, epochs: int) -> int:
    return len(text.tokens) * epochs // rows


def freeze_shared(draft: nn.Module) -> None:
    """Train everything but embeddings and head."""
    draft.unfreeze()
    for name, module in draft.named_modules():
        if name.rsplit(".", 1)[-1] in _SHARED:
            module.freeze()


class Distillation:
    """The loss, as the trainer calls it. Weights are kept in float32 and both models run in `dtype`. blend: KL and total
    variation, else KL alone."""

    def __init__(self, target: nn.Module, dtype: mx.Dtype, *, blend: bool = False) -> None:
        self.target = target
        self.dtype = dtype
        self.blend = blend

    def __call__(self, draft: nn.Module, batch: TextBatch) -> mx.array:
        """Mean over written positions, KL in nats; 0 for a batch without any."""
        inputs = batch.tokens[:, :-1]
        logq = _log_softmax(self.logits(draft, inputs))
        logp = mx.stop_gradient(_log_softmax(self.target(inputs)))
        count = mx.maximum(batch.written.sum(), 1.0)
        p = mx.exp(logp)
        divergence = ((p * (logp - logq)).sum(axis=-1) * batch.written).sum() / count
        if not self.blend:
            return divergence
        overlap = (mx.minimum(p, mx.exp(logq)).sum(axis=-1) * batch.written).sum() / count
        weight = mx.exp(-_STEEP * mx.stop_gradient(overlap))
        return weight * divergence + (1.0 - weight) * (batch.written.sum() / count - overlap)

    def logits(self, draft: nn.Module, tokens: mx.array) -> mx.array:
        """The draft's logits (B, L, V), computed in `dtype`; its weights stay as they are."""
        weights = draft.parameters()
        draft.update(tree_map(self._cast, weights))
        out = draft(tokens)
        draft.update(weights)
        return out

    def _cast(self, array: Any) -> Any:
        return array.astype(self.dtype) if mx.issubdtype(array.dtype, mx.floating) else array


def _log_softmax(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
