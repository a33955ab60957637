"""Distil a draft on text its target wrote, towards the target's distribution at every written position.

Losses: forward KL, or a blend of it with the total variation distance, which is the share of drafted tokens that a target
rejects at T = 1 (LK losses, arXiv 2602.23881): the blend moves from the first to the second as the draft gets better.

A draft that reads the target's hidden states learns several steps of a round at once, the later ones from its own outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from service.learning.steps import UNROLLED
from service.learning.writing import FORCED, Text
from service.models import eagle

_SHARED = ("embed_tokens", "wte", "lm_head")
"""Modules that stay the target's own: the draft ships without them."""
_STEEP = 3.0
"""How fast the blend leaves KL as the overlap grows: the paper's."""
_FADING = 0.8
"""What a step of a round counts of the one before: it is reached only where that was right."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


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
    """How many batches `batches` yields with the same arguments."""
    return len(text.tokens) * epochs // rows


def freeze_shared(draft: nn.Module) -> None:
    """Train everything but embeddings and head."""
    draft.unfreeze()
    for name, module in draft.named_modules():
        if name.rsplit(".", 1)[-1] in _SHARED:
            module.freeze()


@dataclass(frozen=True, slots=True)
class Law:
    """What the target holds likely: p, (B, L, V), and its entropy (B, L) in nats."""

    p: mx.array
    entropy: mx.array

    @classmethod
    def of(cls, logits: mx.array) -> Law:
        """Of logits (B, L, V); nothing is learnt through it."""
        logits = mx.stop_gradient(logits.astype(mx.float32))
        mass = mx.logsumexp(logits, axis=-1)
        p = mx.exp(logits - mass[..., None])
        return cls(p, mass - (p * logits).sum(axis=-1))


class Distillation:
    """The loss, as the trainer calls it. Weights are kept in float32 and both models run in `dtype`. blend: KL and total
    variation, else KL alone."""

    def __init__(self, target: nn.Module, dtype: mx.Dtype, *, blend: bool = False) -> None:
        self.target = target
        self.dtype = dtype
        self.blend = blend

    def __call__(self, draft: nn.Module, batch: TextBatch) -> mx.array:
        """Mean over written positions, KL in nats; 0 for a batch without any. Of several steps: their weighted mean.

        Memory: several arrays as wide as the target's logits in float32; with four steps about a dozen.
        """
        inputs = batch.tokens[:, :-1]
        law = Law.of(self.target(inputs))
        if not isinstance(draft, eagle.Model):
            return self._apart(self._cast(draft, draft, inputs), law, batch.written)
        # The call above has shown the target's layers already.
        loss, weight, weights = mx.array(0.0), 1.0, 0.0
        for step, logits in enumerate(self._cast(draft, _unrolled, draft, inputs)):
            loss = loss + weight * self._apart(logits, law, batch.written * begun(step, inputs))
            weights += weight
            weight *= _FADING
        return loss / weights

    def guesses(self, draft: nn.Module, tokens: mx.array) -> Iterator[mx.array]:
        """The draft's likeliest next tokens (B, L) in each step of a round that it learns, given the texts (B, L)."""
        if not isinstance(draft, eagle.Model):
            yield mx.argmax(self._cast(draft, draft, tokens), axis=-1)
            return
        self.target(tokens)
        for logits in self._cast(draft, _unrolled, draft, tokens):
            yield mx.argmax(logits, axis=-1)

    def _apart(self, logits: mx.array, law: Law, written: mx.array) -> mx.array:
        """The loss of logits (B, L, V) over the positions of written (B, L)."""
        logits = logits.astype(mx.float32)
        count = mx.maximum(written.sum(), 1.0)
        # Of log q, which is as wide as the logits, only what it comes to is made: passes over memory are most of a step.
        mass = mx.logsumexp(logits, axis=-1)
        divergence = ((mass - (law.p * logits).sum(axis=-1) - law.entropy) * written).sum() / count
        if not self.blend:
            return divergence
        overlap = (mx.minimum(law.p, mx.exp(logits - mass[..., None])).sum(axis=-1) * written).sum() / count
        weight = mx.exp(-_STEEP * mx.stop_gradient(overlap))
        return weight * divergence + (1.0 - weight) * (written.sum() / count - overlap)

    def _cast(self, draft: nn.Module, call: Callable[_P, _R], *positional: _P.args, **named: _P.kwargs) -> _R:
        """What a call of the draft gives in `dtype`; its weights stay as they are."""
        weights = draft.parameters()
        draft.update(tree_map(self._narrow, weights))
        out = call(*positional, **named)
        draft.update(weights)
        return out

    def _narrow(self, array: Any) -> Any:
        return array.astype(self.dtype) if mx.issubdtype(array.dtype, mx.floating) else array


def begun(step: int, tokens: mx.array) -> mx.array:
    """(L,) whether a round that is in this step at an entry of texts (B, L) began within them."""
    return mx.arange(tokens.shape[1]) >= step


def _unrolled(draft: eagle.Model, tokens: mx.array) -> list[mx.array]:
    """The draft's logits (B, L, V) in each step, the target having just been called."""
    return [
        draft.logits(state)
        for state in draft.model.unrolled(tokens, eagle.shift_right(draft.target_features()), UNROLLED)
    ]
