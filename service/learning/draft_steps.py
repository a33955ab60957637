"""Hidden states of a draft over whole texts, by draft step of a round.

An ordinary draft model computes the same at a position in every draft step. An EAGLE head does not: from its second
step on it reads its own hidden states instead of the target's, which are not known yet.
"""

from __future__ import annotations

from typing import TypeAlias, cast

import mlx.core as mx
import mlx.nn as nn

from service.learning.batches import Batch
from service.models import eagle
from service.models.heads import Backbone, Head

Parts: TypeAlias = tuple[Backbone, Head] | None
"""What `heads.split` returns."""

UNROLLED = 4
"""Draft steps scored separately. Later ones are approximated by the last of these."""

LEARNT_STEPS = 3
"""Draft steps in which a position may be trained."""
_STEP_OF_POSITION = (0, 1, 0, 2, 0, 1, 2, 0, 1, 0, 1, 2)
"""The step in which successive positions are trained: in the ratio 1 : 0.8 : 0.6, close to the weights of EAGLE-3's loss."""


def step_count(model: nn.Module, k: int) -> int:
    """Number of draft steps to compute for a model that drafts `k` tokens a round; 1 for an ordinary draft, where steps
    do not differ."""
    return max(1, min(k, UNROLLED)) if isinstance(model, eagle.Model) else 1


def states_at_positions(model: nn.Module, parts: Parts, batch: Batch) -> mx.array:
    """Hidden states (N, hidden) at a batch's positions, one draft step per position in turn: running the head over all
    steps at every position would be most of the work. Logits (N, V) if the model is not split."""
    states = window_states(model, parts, batch, LEARNT_STEPS)
    if len(states) == 1:
        return states[0][batch.at]
    # Uses the position in the window, so that the step does not depend on the other texts in the batch.
    position = batch.at % batch.tokens.shape[1]
    step = mx.array(_STEP_OF_POSITION)[position % len(_STEP_OF_POSITION)]
    return mx.concatenate(states)[step * len(states[0]) + batch.at]


def window_states(model: nn.Module, parts: Parts, batch: Batch, steps: int) -> list[mx.array]:
    """`states_by_step` over a batch's windows. The target's hidden states come from the whole texts, as when serving."""
    features = None
    if isinstance(model, eagle.Model):
        features = model.features_of(batch.texts, batch.starts, batch.tokens.shape[1])
    return states_by_step(model, parts, batch.tokens, steps, features)


def states_by_step(
    model: nn.Module, parts: Parts, tokens: mx.array, steps: int, features: mx.array | None
) -> list[mx.array]:
    """Hidden states (B x L, hidden) over tokens (B, L) in each of the first `steps` draft steps; one entry for an
    ordinary draft. Logits (B x L, V) if the model is not split.

    features: (B, L, hidden), the target's features that an EAGLE head reads; None for an ordinary draft. No gradient
    flows into them.
    """
    if isinstance(model, eagle.Model):
        assert features is not None
        states = model.model.unrolled(tokens, mx.stop_gradient(features), steps)
    else:
        states = [cast("mx.array", model(tokens)) if parts is None else parts[0](tokens, None)]
    return [each.reshape(-1, each.shape[-1]) for each in states]
