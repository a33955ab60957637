"""Whole texts through a model as the steps of a round see them.

An ordinary model makes the same of a position whichever token of a proposal it is. A draft that reads its target's hidden
states does not: what the target has not read yet its own states stand in for, from its second step on.
"""

from __future__ import annotations

from typing import TypeAlias, cast

import mlx.core as mx
import mlx.nn as nn

from service.learning.dataset import Batch
from service.models import eagle
from service.models.heads import Backbone, Head

Parts: TypeAlias = tuple[Backbone, Head] | None
"""What `split` finds."""

UNROLLED = 4
"""Steps of a round that are told apart. Later ones count as the last of these: not exact, but as exact as this is deep."""

LEARNT_STEPS = 3
"""Steps of a round in which a position may be learnt."""
_TURNS = (0, 1, 0, 2, 0, 1, 2, 0, 1, 0, 1, 2)
"""In which step the next positions are learnt: as often as 1 : 0.8 : 0.6, which is about what EAGLE-3's loss weighs them."""


def depths(model: nn.Module, k: int) -> int:
    """In how many ways a model is to be looked at that drafts `k` tokens a round."""
    return max(1, min(k, UNROLLED)) if isinstance(model, eagle.Model) else 1


def learnt(model: nn.Module, parts: Parts, batch: Batch) -> mx.array:
    """Hidden states (N, hidden) at a batch's positions, each in one step of a round: the steps take turns, for the head over
    all of them at every position is most of the work. Of an ordinary model they are the same in any."""
    found = window_states(model, parts, batch, LEARNT_STEPS)
    if len(found) == 1:
        return found[0][batch.at]
    turns = mx.array(_TURNS)[batch.at % len(_TURNS)]
    return mx.concatenate(found)[turns * len(found[0]) + batch.at]


def window_states(model: nn.Module, parts: Parts, batch: Batch, depth: int) -> list[mx.array]:
    """`states` over a batch's windows. The target's hidden states there are those of the whole texts, as in serving."""
    features = None
    if isinstance(model, eagle.Model) and batch.texts is not None and batch.offsets is not None:
        count, length = batch.tokens.shape
        # Padding at a window's end may lie beyond its text's: whatever is read there is not learnt from.
        at = mx.minimum(batch.offsets[:, None] + mx.arange(length)[None], batch.texts.shape[1] - 1)
        features = model.features(batch.texts)[mx.arange(count)[:, None], at]
    return states(model, parts, batch.tokens, depth, features)


def states(
    model: nn.Module, parts: Parts, tokens: mx.array, depth: int, features: mx.array | None = None
) -> list[mx.array]:
    """Hidden states (B x N, hidden) over tokens (B, N) as each of the first `depth` steps of a round has them; one entry for
    an ordinary model. Logits where the model is not split. features: (B, N, hidden) what a model that reads its target's hidden
    states takes for those of the tokens; None: the target reads just these.

    What the target says of the tokens is taken as given: no gradient goes there.
    """
    if isinstance(model, eagle.Model):
        features = model.features(tokens) if features is None else features
        found = model.model.unrolled(tokens, mx.stop_gradient(features), depth)
    else:
        found = [cast("mx.array", model(tokens)) if parts is None else parts[0](tokens, None)]
    return [each.reshape(-1, each.shape[-1]) for each in found]
