"""The loss over a batch: a divergence between the target's stored distribution and the draft's, at response positions alone.

Divergences are in nats, (N,), over the target's most likely tokens and one bucket for all others. logp, logq: (N, top + 1)
log-probabilities of target and draft, the last column the mass outside the top.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.utils import checkpoint

from service.engine.masks import allowed
from service.learning.dataset import Batch
from service.learning.steps import learnt
from service.models.heads import split

CHUNK = 512
"""Positions whose logits exist at once: with a wide vocabulary they are most of a step's memory."""
_NOTHING = -1e30
"""A logit that has no share in any sum, finite so that a vocabulary inside the top leaves no NaN behind."""
_NEVER = -60.0
"""A log-probability that stands for none: finite, so that differences and their gradients are."""

Objective: TypeAlias = Callable[[mx.array, mx.array], mx.array]


def forward_kl(logp: mx.array, logq: mx.array) -> mx.array:
    """Σ p log(p / q), of which a term is 0 where p is. NaN stays NaN: a poisoned target must not pass for an empty one."""
    none = logp == -float("inf")
    safe = mx.where(none, 0.0, logp)
    return mx.where(none, 0.0, mx.exp(safe) * (safe - mx.where(none, 0.0, logq))).sum(axis=-1)


def jensen_shannon(logp: mx.array, logq: mx.array) -> mx.array:
    """The mean of both's KL from their mean: what a run minimises (docs/learning.md has the tables)."""
    logp, logq = mx.maximum(logp, _NEVER), mx.maximum(logq, _NEVER)
    middle = mx.logaddexp(logp, logq) - math.log(2.0)
    return 0.5 * (forward_kl(logp, middle) + forward_kl(logq, middle))


def buckets(logits: mx.array, ids: mx.array) -> mx.array:
    """The draft's log-probabilities (N, top + 1) of the stored tokens and of all others together.

    logits: (N, V). ids: (N, top), distinct. By the log-sum inequality a KL over these is never above the KL over the whole
    vocabulary.

    Its mass outside the top is a logsumexp over the other logits, not 1 minus the top's, so value and gradient are sound
    however small it is.
    """
    logits = logits.astype(mx.float32)
    picked = mx.take_along_axis(logits, ids, axis=-1)
    others = mx.put_along_axis(logits, ids, mx.array(_NOTHING), axis=-1)
    both = mx.concatenate([picked, mx.logsumexp(others, axis=-1, keepdims=True)], axis=-1)
    return both - mx.logsumexp(both, axis=-1, keepdims=True)


class TargetDivergence:
    """The loss for `trainer.train`: the weighted mean of an objective over a batch's response positions, 0 without any.

    The head, most of a small draft's work, runs on response positions only where the model family can be split exactly.
    """

    def __init__(self, model: nn.Module, objective: Objective = jensen_shannon) -> None:
        self.parts = split(model)
        self.objective = objective

    def __call__(self, model: nn.Module, batch: Batch) -> mx.array:
        """The weighted mean as a scalar, differentiable in the model's trainable parameters."""
        count = batch.at.shape[0]
        if count == 0:
            return mx.array(0.0)
        states = learnt(model, self.parts, batch)
        if count <= CHUNK:
            total = self._total(states, batch, 0, count)
        else:
            # The head's parameters may be trainable, which is why the module is handed over to be differentiated
            # through.
            total = mx.array(0.0)
            for start in range(0, count, CHUNK):
                stop = min(start + CHUNK, count)
                part = partial(self._total, batch=batch, start=start, stop=stop)
                again = cast("Callable[[mx.array], mx.array]", checkpoint(model, part))
                total = total + again(states[start:stop])
        return total / mx.maximum(batch.weight.sum(), 1e-6)

    def _total(self, states: mx.array, batch: Batch, start: int, stop: int) -> mx.array:
        chosen = slice(start, stop)
        return (self._each(states, batch, chosen) * batch.weight[chosen]).sum()

    def _each(self, states: mx.array, batch: Batch, chosen: slice) -> mx.array:
        logits = states if self.parts is None else self.parts[1](states)
        if batch.masks is not None and batch.mask is not None:
            legal = allowed(batch.masks[batch.mask[chosen]], logits.shape[-1])
            logits = mx.where(legal, logits.astype(mx.float32), _NOTHING)
        logp = mx.concatenate([batch.logprobs[chosen], batch.tail[chosen][:, None]], axis=-1)
        logq = buckets(logits, batch.ids[chosen])
        if batch.masks is not None:
            # The tail of a few allowed tokens is stored as nearly empty, not as empty.
            logq = mx.maximum(logq, _NEVER)
        return self.objective(logp, logq)
