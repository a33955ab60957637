"""An objective over all of the target's logits, made anew for every batch: what the stored top and tail stand in for."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.utils import checkpoint

from service.learning.dataset import Batch
from service.learning.loss import CHUNK
from service.learning.objectives import Objective, each
from service.learning.steps import Parts, learnt, states
from service.models.heads import split


class WholeDivergence:
    """The loss for `trainer.train`, as TargetDivergence but with the target beside. vocabulary: width of both's logits."""

    def __init__(self, model: nn.Module, target: nn.Module, vocabulary: int, objective: Objective) -> None:
        self.parts = split(model)
        self.target = target
        self.target_parts = split(target)
        self.vocabulary = vocabulary
        self.objective = objective

    def __call__(self, model: nn.Module, batch: Batch) -> mx.array:
        """Weighted mean of the objective over the batch's response positions, a scalar; 0 where all weights are 0."""
        ours = learnt(model, self.parts, batch)
        theirs = mx.stop_gradient(states(self.target, self.target_parts, batch.tokens, 1)[0][batch.at])
        total = mx.array(0.0)
        for start in range(0, batch.at.shape[0], CHUNK):
            chosen = slice(start, start + CHUNK)
            logp = mx.stop_gradient(self._law(theirs[chosen], self.target_parts))
            weight = batch.weight[chosen]

            def part(found: mx.array, logp: mx.array = logp, weight: mx.array = weight) -> mx.array:
                return (each(self.objective, logp, self._law(found, self.parts)) * weight).sum()

            again = cast("Callable[[mx.array], mx.array]", checkpoint(model, part))
            total = total + again(ours[chosen])
        return total / mx.maximum(batch.weight.sum(), 1e-6)

    def _law(self, found: mx.array, parts: Parts) -> mx.array:
        logits = found if parts is None else parts[1](found)
        logits = logits[:, : self.vocabulary].astype(mx.float32)
        law = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        # Nothing is outside: an objective's last column is what the others leave.
        return mx.concatenate([law, mx.full((law.shape[0], 1), -float("inf"))], axis=-1)
