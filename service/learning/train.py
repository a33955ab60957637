"""The training loop, for a draft with LoRA layers or a whole model: AdamW with gradient clipping and accumulation.
Batches whose loss or gradient is not finite are skipped.

Batches and the loss are passed in. Every micro-batch is evaluated at once, so that memory use stays constant.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import AdamW
from mlx.utils import tree_map

from service.core import Progress, TrainingFailed
from service.learning.memory_errors import is_out_of_memory
from service.learning.ranks import Gradients, Ranks
from service.models.arrays import named_arrays

log = logging.getLogger(__name__)

MAX_SKIPPED_SHARE = 0.1
MIN_SKIPPED = 3
"""A run fails when more than this fraction of its planned batches, and at least MIN_SKIPPED, have no finite loss and
gradient."""
_MOST_HALVINGS = 2
"""How often a run that runs out of memory halves the number of texts in a micro-batch."""
_LAST_LOSSES = 8
"""Number of losses at the end of a run whose mean is reported."""
_MAX_RATIO, _MARGIN = 1.1, 0.05
"""Limit of the best validation loss: this many times the first one plus this many nats."""


class Minibatch(Protocol):
    """A batch as the training loop needs it."""

    @property
    def count(self) -> int:
        """Tokens processed, for the rate."""
        ...

    @property
    def rows(self) -> int:
        """Texts in the batch."""
        ...

    @property
    def loss_weight(self) -> float:
        """Total weight that the loss is a mean over."""
        ...

    def split(self, rows: int) -> Sequence[Self]:
        """The same texts in micro-batches of at most `rows` texts."""
        ...


B = TypeVar("B", bound=Minibatch)


@dataclass(frozen=True, slots=True)
class Optimiser:
    """AdamW with linear warm-up, then cosine decay to 0.

    steps: total number of planned updates (see `update_count`). warmup: fraction of them. clip: largest global gradient
    norm. accumulate: batches averaged into one update, weighted like their losses. epoch: batches per epoch, after
    which the remainder is applied (None: only at the end of the run).
    """

    learning_rate: float
    steps: int
    warmup: float = 0.1
    clip: float = 1.0
    accumulate: int = 1
    epoch: int | None = None
    weight_decay: float = 0.0

    def rate(self, step: int) -> float:
        """Learning rate of update `step`, counted from 0."""
        warm = round(self.warmup * self.steps)
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        done = (step - warm) / max(self.steps - warm, 1)
        return self.learning_rate * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))


def update_count(epoch: int, epochs: int, accumulate: int) -> int:
    """Updates of a run of `epochs` epochs of `epoch` batches each, remainders included."""
    return epochs * math.ceil(epoch / accumulate)


@dataclass(frozen=True, slots=True)
class TrainReport:
    """The result of a run. steps: updates. skipped: batches with NaN or infinity in loss or gradient. empty: batches
    without anything to learn.

    loss: mean of the last losses. losses: one per update. validations: (updates done, loss), the first before training.
    best_step: number of updates after which the model had its current weights. seconds: without pauses.
    """

    steps: int
    skipped: int
    empty: int
    loss: float
    losses: tuple[float, ...]
    grad_norm: float
    validations: tuple[tuple[int, float], ...]
    best_step: int
    tokens: int
    seconds: float


def train(
    model: nn.Module,
    batches: Iterable[B],
    *,
    loss_fn: Callable[[nn.Module, B], mx.array],
    optimiser: Optimiser,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    hold: Callable[[], float] = lambda: 0.0,
    validate: Callable[[], float] | None = None,
    validate_every: int = 0,
    ranks: Ranks | None = None,
    rows: int | None = None,
) -> TrainReport:
    """Trains the model's trainable parameters in place on `batches`, which are iterated once.

    loss_fn: returns the mean over a batch as a scalar, 0 for a batch without anything to learn. hold: called before
    every micro-batch, may wait; returns the seconds that do not count as part of the run. validate: returns a loss;
    called before the first update, every `validate_every` updates and at the end. The model ends with the weights of
    its lowest validation loss after the first. ranks: processes that train together, each with the same number of
    batches, from the same weights. rows: texts computed at a time; a larger batch is split into micro-batches with the
    same total loss and gradient. None: whole batches. When memory runs out, the run continues with half of that, at
    most twice.

    Leaves the model in eval mode. Raises TrainingFailed when too many batches are not finite, the validation loss rose,
    no batch had anything to learn, or weights are not finite at the end.
    """
    run = _Run(model, optimiser, on_progress)
    micro = _MicroBatches(model, loss_fn, hold, rows)
    validation = _Validation(model, validate)
    model.train()
    try:
        validation.check(run.step)
        for index, batch in enumerate(batches, start=1):
            loss, gradients = micro.gradient(batch)
            run.paused += micro.take_paused()
            if ranks is not None:
                loss, gradients = ranks.mean(loss, gradients)
            norm = global_norm(gradients)
            mx.eval(loss, norm, gradients)
            run.tokens += batch.count
            run.add(number(loss), number(norm), gradients, batch.loss_weight)
            del loss, gradients
            if run.pending.batches == optimiser.accumulate or (optimiser.epoch and index % optimiser.epoch == 0):
                run.update()
                if validate_every and run.step % validate_every == 0:
                    validation.check(run.step)
        if run.pending.batches:
            run.update()
        validation.check(run.step)
    finally:
        model.eval()
    if not run.losses:
        raise TrainingFailed(f"nothing to learn: {run.empty} empty and {run.skipped} unusable batches")
    best_step = validation.restore_best(run.step)
    _check_finite(model)
    return run.report(validation.losses, best_step)


@dataclass(slots=True)
class _WeightedSum:
    """Losses and gradients of several batches, each multiplied by its weight."""

    gradients: Gradients | None = None
    loss: float = 0.0
    weight: float = 0.0

    def add(self, gradients: Gradients, loss: float, weight: float) -> None:
        """Adds those of one batch. Evaluates the sum, so that its terms are freed."""
        scaled: Gradients = tree_map(lambda g: g * weight, gradients)
        self.gradients = scaled if self.gradients is None else tree_map(mx.add, self.gradients, scaled)
        mx.eval(self.gradients)
        self.loss += loss * weight
        self.weight += weight

    def mean(self) -> tuple[Gradients, float]:
        """Their weighted means; zeros if no batch had any weight. At least one batch is required."""
        assert self.gradients is not None
        weight = self.weight or 1.0
        return tree_map(lambda g: g / weight, self.gradients), self.loss / weight


@dataclass(slots=True)
class _Pending:
    """Accumulated batches since the last update. batches: their number, unusable ones included."""

    sum: _WeightedSum = field(default_factory=_WeightedSum)
    batches: int = 0


class _MicroBatches(Generic[B]):
    """Computes loss and gradient of a batch, `rows` texts at a time; None: all at once."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[[nn.Module, B], mx.array], hold: Callable[[], float], rows: int | None
    ) -> None:
        self.model = model
        self.hold = hold
        self.rows = rows
        self._gradient_of = nn.value_and_grad(model, loss_fn)
        self._halvings = 0
        self._paused = 0.0

    def take_paused(self) -> float:
        """Seconds of pauses since the last call."""
        paused, self._paused = self._paused, 0.0
        return paused

    def gradient(self, batch: B) -> tuple[mx.array, Gradients]:
        """The loss and its gradient, evaluated. Raises MLX's error when memory runs out with one text, or after
        _MOST_HALVINGS."""
        while True:
            try:
                return self._gradient(batch)
            except (RuntimeError, MemoryError) as error:
                rows = min(self.rows or batch.rows, batch.rows)
                if not is_out_of_memory(error) or rows < 2 or self._halvings == _MOST_HALVINGS:
                    raise
                log.warning("out of memory with %d texts at a time; continuing with %d", rows, rows // 2)
                self.rows = rows // 2
                self._halvings += 1
            # Outside the handler: the error's traceback holds the arrays of the failed attempt.
            gc.collect()
            mx.clear_cache()

    def _gradient(self, batch: B) -> tuple[mx.array, Gradients]:
        if self.rows is None or batch.rows <= self.rows:
            return self._of(batch)
        total = _WeightedSum()
        for part in batch.split(self.rows):
            loss, gradients = self._of(part)
            # A part without anything to learn adds nothing.
            total.add(gradients, number(loss), part.loss_weight)
        mean, loss = total.mean()
        return mx.array(loss), mean

    def _of(self, batch: B) -> tuple[mx.array, Gradients]:
        self._paused += self.hold()
        weights = self.model.trainable_parameters()
        try:
            loss, gradients = self._gradient_of(self.model, batch)
            mx.eval(loss, gradients)
        finally:
            # Blocks that recompute their activations still hold arrays of the graph.
            self.model.update(weights)
        return loss, gradients


class _Run:
    """Optimiser state and counts of one run."""

    def __init__(self, model: nn.Module, settings: Optimiser, on_progress: Callable[[Progress], None]) -> None:
        self.model = model
        self.settings = settings
        self.on_progress = on_progress
        self.optimiser = AdamW(learning_rate=settings.rate(0), weight_decay=settings.weight_decay, bias_correction=True)
        self.optimiser.init(model.trainable_parameters())
        self.started = time.perf_counter()
        self.paused = 0.0
        self.pending = _Pending()
        self.step = self.skipped = self.empty = self.tokens = 0
        self.losses: list[float] = []
        self.grad_norm = 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started - self.paused

    def add(self, loss: float, norm: float, gradients: Gradients, weight: float) -> None:
        """Adds one batch to the next update, or counts it as unusable. Raises TrainingFailed when too many are."""
        self.pending.batches += 1
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.skipped += 1
            planned = self.settings.steps * self.settings.accumulate
            if self.skipped >= MIN_SKIPPED and self.skipped > MAX_SKIPPED_SHARE * planned:
                raise TrainingFailed(
                    f"{self.skipped} of {planned} steps had NaN or infinite losses or gradients (the last: loss {loss})"
                )
        elif norm == 0.0:
            # A batch with an empty mask has no gradient; including it would only shrink the average.
            self.empty += 1
        else:
            self.pending.sum.add(gradients, loss, weight)

    def update(self) -> None:
        """Applies the mean of the pending gradients and reports progress."""
        total, self.pending = self.pending.sum, _Pending()
        loss = None
        if total.gradients is not None:
            gradients, loss = total.mean()
            norm = global_norm(gradients)
            scale = mx.minimum(self.settings.clip / mx.maximum(norm, 1e-12), 1.0)
            self.optimiser.learning_rate = self.settings.rate(self.step)
            self.optimiser.update(self.model, tree_map(lambda g: g * scale.astype(g.dtype), gradients))
            mx.eval(self.model.trainable_parameters(), self.optimiser.state, norm)
            self.grad_norm = number(norm)
            self.losses.append(loss)
        self.step += 1
        self._report_progress(loss)

    def _report_progress(self, loss: float | None) -> None:
        seconds = max(self.seconds, 1e-9)
        self.on_progress(
            Progress(
                step=self.step,
                steps=self.settings.steps,
                loss=loss,
                grad_norm=self.grad_norm,
                tokens_per_second=self.tokens / seconds,
                seconds_left=seconds / self.step * max(self.settings.steps - self.step, 0),
            )
        )

    def report(self, validations: list[tuple[int, float]], best_step: int) -> TrainReport:
        last = self.losses[-_LAST_LOSSES:]
        return TrainReport(
            steps=self.step,
            skipped=self.skipped,
            empty=self.empty,
            loss=sum(last) / len(last),
            losses=tuple(self.losses),
            grad_norm=self.grad_norm,
            validations=tuple(validations),
            best_step=best_step,
            tokens=self.tokens,
            seconds=self.seconds,
        )


class _Validation:
    """Validation losses, (updates done, loss), and the weights of the lowest one after the first."""

    def __init__(self, model: nn.Module, validate: Callable[[], float] | None) -> None:
        self.model = model
        self.validate = validate
        self.losses: list[tuple[int, float]] = []
        self.best: tuple[float, int, Any] | None = None

    def check(self, step: int) -> None:
        """Measures after `step` updates, unless that was already done."""
        if self.validate is None or (self.losses and self.losses[-1][0] == step):
            return
        self.model.eval()
        loss = self.validate()
        self.model.train()
        self.losses.append((step, loss))
        # The initial weights are measured only for comparison: the gate decides whether training improved on them.
        if step and math.isfinite(loss) and (self.best is None or loss <= self.best[0]):
            # Arrays are immutable and updates replace them: a snapshot is a set of references.
            self.best = (loss, step, self.model.trainable_parameters())

    def restore_best(self, step: int) -> int:
        """Restores the best weights and returns after how many updates the model had them; `step` without validation.
        Raises TrainingFailed when the validation loss rose."""
        if self.losses:
            first, best = self.losses[0][1], self.best[0] if self.best is not None else math.nan
            if not best <= first * _MAX_RATIO + _MARGIN:
                raise TrainingFailed(f"the validation loss rose from {first:.3g} to {best:.3g}")
        if self.best is None or self.best[1] == step:
            return step
        self.model.update(self.best[2])
        return self.best[1]


def number(scalar: mx.array) -> float:
    """A scalar array as a Python float; evaluates it, which is a host sync."""
    return float(cast("float", scalar.item()))


def global_norm(gradients: Gradients) -> mx.array:
    """Euclidean norm of all gradients together, float32."""
    leaves = [g for _, g in named_arrays(gradients)]
    return mx.sqrt(mx.stack([mx.square(g.astype(mx.float32)).sum() for g in leaves]).sum())


def _check_finite(model: nn.Module) -> None:
    for name, array in named_arrays(model.trainable_parameters()):
        if not mx.isfinite(array.astype(mx.float32)).all().item():
            raise TrainingFailed(f"weights are not finite after training: {name}")
