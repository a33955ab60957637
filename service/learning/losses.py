"""The training loss: a divergence between the target's stored distribution and the draft's at response positions.

Divergences are in nats, (N,), over the target's most likely tokens and one bucket for all others. logp, logq: (N, top +
1) log-probabilities of target and draft; the last column is the mass outside the top.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import mlx.core as mx
import mlx.nn as nn

from service.engine.masks import allowed
from service.learning.batches import Batch
from service.learning.draft_steps import states_at_positions
from service.models.heads import split

CHUNK = 512
"""Positions whose logits exist at once, memory permitting: with a wide vocabulary they take most of a step's memory."""
_NO_LOGIT = -1e30
"""A logit that adds nothing to a sum; finite, so that a vocabulary inside the top gives no NaN."""
_NO_LOGPROB = -60.0
"""Replaces a log-probability of -inf: finite, so that differences and their gradients are finite too."""

Objective: TypeAlias = Callable[[mx.array, mx.array], mx.array]


def forward_kl(logp: mx.array, logq: mx.array) -> mx.array:
    """KL(p || q), with 0 for terms where p is 0. NaN stays NaN: a broken target must not count as an empty one."""
    none = logp == -float("inf")
    safe = mx.where(none, 0.0, logp)
    return mx.where(none, 0.0, mx.exp(safe) * (safe - mx.where(none, 0.0, logq))).sum(axis=-1)


def jensen_shannon(logp: mx.array, logq: mx.array) -> mx.array:
    """The mean of KL(p || m) and KL(q || m), where m is the mean of p and q. Runs minimise it (docs/results/learning.md)."""
    logp, logq = mx.maximum(logp, _NO_LOGPROB), mx.maximum(logq, _NO_LOGPROB)
    middle = mx.logaddexp(logp, logq) - math.log(2.0)
    return 0.5 * (forward_kl(logp, middle) + forward_kl(logq, middle))


def buckets(logits: mx.array, ids: mx.array) -> mx.array:
    """The draft's log-probabilities (N, top + 1) of the stored tokens and of all others together.

    logits: (N, V). ids: (N, top), distinct. A KL over these is never above the KL over the whole vocabulary (log-sum
    inequality). The mass outside the top is a logsumexp over the other logits rather than 1 minus the top's mass, so
    that value and gradient are accurate however small it is.
    """
    logits = logits.astype(mx.float32)
    picked = mx.take_along_axis(logits, ids, axis=-1)
    others = mx.put_along_axis(logits, ids, mx.array(_NO_LOGIT), axis=-1)
    both = mx.concatenate([picked, mx.logsumexp(others, axis=-1, keepdims=True)], axis=-1)
    return both - mx.logsumexp(both, axis=-1, keepdims=True)


class TargetDivergence:
    """The loss for `train`: the weighted mean of an objective over a batch's response positions; 0 without any.

    If the model splits into backbone and head, the head runs only on response positions: it is the largest part of a
    small draft's work. The logits of at most `chunk` positions exist at a time, with their gradient. The head's own
    parameters get no gradient, because adapters leave it frozen.
    """

    def __init__(self, model: nn.Module, objective: Objective = jensen_shannon, *, chunk: int = CHUNK) -> None:
        self.parts = split(model)
        self.objective = objective
        self.chunk = chunk

    def __call__(self, model: nn.Module, batch: Batch) -> mx.array:
        """The weighted mean as a scalar, differentiable in the trainable parameters of the model's backbone."""
        count = batch.at.shape[0]
        if count == 0:
            return mx.array(0.0)
        states = states_at_positions(model, self.parts, batch)
        total, gradient = self._total_and_gradient(mx.stop_gradient(states), batch)
        # Its value is 0, and its gradient with respect to the states is the one computed with the total.
        product = (states.astype(mx.float32) * gradient.astype(mx.float32)).sum()
        total = total + (product - mx.stop_gradient(product))
        return total / mx.maximum(batch.weight.sum(), 1e-6)

    def _total_and_gradient(self, states: mx.array, batch: Batch) -> tuple[mx.array, mx.array]:
        """The weighted sum over all positions and its gradient with respect to the states (N, hidden). Chunks are
        computed in sequence: a chunk's states depend on the gradient of the previous one."""
        total, gradients = mx.array(0.0), list[mx.array]()
        for start in range(0, len(states), self.chunk):
            stop = min(start + self.chunk, len(states))
            some = states[start:stop]
            if gradients:
                (some,) = mx.depends([some], [gradients[-1]])
            value, gradient = mx.value_and_grad(partial(self._total, batch=batch, start=start, stop=stop))(some)
            total = total + value
            gradients.append(gradient)
        return mx.stop_gradient(total), mx.stop_gradient(mx.concatenate(gradients))

    def _total(self, states: mx.array, batch: Batch, start: int, stop: int) -> mx.array:
        positions = slice(start, stop)
        return (self._divergence(states, batch, positions) * batch.weight[positions]).sum()

    def _divergence(self, states: mx.array, batch: Batch, positions: slice) -> mx.array:
        logits = states if self.parts is None else self.parts[1](states)
        if batch.masks is not None and batch.mask is not None:
            legal = allowed(batch.masks[batch.mask[positions]], logits.shape[-1])
            logits = mx.where(legal, logits.astype(mx.float32), _NO_LOGIT)
        logp = mx.concatenate([batch.logprobs[positions], batch.tail[positions][:, None]], axis=-1)
        logq = buckets(logits, batch.ids[positions])
        if batch.masks is not None:
            # If few tokens are allowed, the stored tail is almost zero and the draft's is zero.
            logq = mx.maximum(logq, _NO_LOGPROB)
        return self.objective(logp, logq)
