"""Which positions are learnt from in an ablation: weights of examples, set aside from what a run does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from service.learning.dataset import Example, collate
from service.learning.loss import TargetDivergence

Doubles = NDArray[np.float64]


def rejections_only(examples: Sequence[Example], heavy: float) -> list[Example]:
    """Examples of which positions that weigh `heavy` are the first rejections: those weigh 1 and all others nothing."""
    return [replace(e, weight=(e.weight == heavy).astype(np.float32)) for e in examples]


def selected(examples: Sequence[Example], gains: Sequence[Doubles], share: float) -> list[Example]:
    """The `share` of all positions that gain most weigh 1, all others nothing. gains: (positions,) of each example."""
    every = np.concatenate(gains)
    least = np.quantile(every, 1.0 - share) if len(every) else 0.0
    return [replace(e, weight=(gain >= least).astype(np.float32)) for e, gain in zip(examples, gains, strict=True)]


def position_losses(model: nn.Module, examples: Sequence[Example], batch_size: int) -> list[Doubles]:
    """What a run minimises, at every position of every example."""
    loss = TargetDivergence(model)
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].tokens))
    found: dict[int, Doubles] = {}
    for start in range(0, len(order), batch_size):
        members = order[start : start + batch_size]
        told = np.array(loss.positions(model, collate([examples[i] for i in members])), dtype=np.float64)
        ends = np.cumsum([examples[i].positions for i in members])
        found |= dict(zip(members, np.split(told, ends)[:-1], strict=True))
    return [found[i] for i in range(len(examples))]
