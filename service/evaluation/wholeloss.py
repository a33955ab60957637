"""An objective over all of the target's logits, made anew for every batch: what the stored top and tail stand in for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.utils import checkpoint

from service.learning.dataset import Batch
from service.learning.loss import CHUNK
from service.learning.objectives import Objective, each
from service.models.heads import Backbone, Head, split

Parts: TypeAlias = tuple[Backbone, Head] | None


class WholeDivergence:
    """The loss for `trainer.train`, as TargetDivergence but with the target beside. vocabulary: width of both's logits."""

    def __init__(self, model: nn.Module, target: nn.Module, vocabulary: int, objective: Objective) -> None:
        self.parts = split(model)
        self.target = target
        self.target_parts = split(target)
        self.vocabulary = vocabulary
        self.objective = objective

    def __call__(self, model: nn.Module, batch: Batch) -> mx.array:
        ours = self._states(model, self.parts, batch)
        theirs = mx.stop_gradient(self._states(self.target, self.target_parts, batch))
        total = mx.array(0.0)
        for start in range(0, batch.at.shape[0], CHUNK):
            chosen = slice(start, start + CHUNK)
            logp = mx.stop_gradient(self._law(theirs[chosen], self.target_parts))
            weight = batch.weight[chosen]

            def part(states: mx.array, logp: mx.array = logp, weight: mx.array = weight) -> mx.array:
                return (each(self.objective, logp, self._law(states, self.parts)) * weight).sum()

            again = cast("Callable[[mx.array], mx.array]", checkpoint(model, part))
            total = total + again(ours[chosen])
        return total / mx.maximum(batch.weight.sum(), 1e-6)

    def _states(self, model: nn.Module, parts: Parts, batch: Batch) -> mx.array:
        states = cast("mx.array", model(batch.tokens)) if parts is None else parts[0](batch.tokens, None)
        return states.reshape(-1, states.shape[-1])[batch.at]

    def _law(self, states: mx.array, parts: Parts) -> mx.array:
        logits = states if parts is None else parts[1](states)
        logits = logits[:, : self.vocabulary].astype(mx.float32)
        law = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        # Nothing is outside: an objective's last column is what the others leave.
        return mx.concatenate([law, mx.full((law.shape[0], 1), -float("inf"))], axis=-1)
