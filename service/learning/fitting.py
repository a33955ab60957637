"""One run's fit of an adapter, by the run's settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.nn as nn

from service.core import Progress
from service.learning.dataset import Example, batches
from service.learning.loss import TargetDivergence
from service.learning.trainer import Optimiser, TrainReport, number, train, update_count
from service.settings import TrainingSettings

MAX_VALIDATION, VALIDATION_SHARE = 16, 0.05
"""Examples kept aside to see the loss on, between epochs: so many at most, this share of all."""


def fit(
    model: nn.Module,
    examples: Sequence[Example],
    training: TrainingSettings,
    *,
    seed: int,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    hold: Callable[[], float] = lambda: 0.0,
) -> TrainReport:
    """Train a wrapped model in place. hold: called before every batch, of training and of validation, to wait in; returns the
    seconds that are no part of the run. Raises TrainingFailed."""
    loss = TargetDivergence(model)
    aside = min(MAX_VALIDATION, int(len(examples) * VALIDATION_SHARE))
    # Spread over all, new and replayed ones.
    step = len(examples) // aside if aside else 0
    kept = {i * step for i in range(aside)}
    learnt = [example for i, example in enumerate(examples) if i not in kept]
    # With too few to spare any, the loss is watched on what is learnt.
    checks = [examples[i] for i in sorted(kept)] or learnt[:MAX_VALIDATION]
    per_epoch = -(-len(learnt) // training.batch_size)

    def validate() -> float:
        total, weight = 0.0, 0.0
        for batch in batches(checks, training.batch_size, seed):
            hold()
            here = number(batch.weight.sum())
            total, weight = total + number(loss(model, batch)) * here, weight + here
        return total / weight if weight else 0.0

    return train(
        model,
        (batch for epoch in range(training.epochs) for batch in batches(learnt, training.batch_size, seed + epoch)),
        loss_fn=loss,
        optimiser=Optimiser(
            learning_rate=training.learning_rate,
            steps=update_count(per_epoch, training.epochs, training.accumulate),
            warmup=training.warmup,
            clip=training.clip,
            accumulate=training.accumulate,
            epoch=per_epoch,
        ),
        on_progress=on_progress,
        hold=hold,
        validate=validate,
        validate_every=update_count(per_epoch, 1, training.accumulate),
    )
