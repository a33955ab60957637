"""The guarded training loop, for a LoRA-wrapped draft as for a whole model.

It knows nothing of what is learnt: batches and loss come from outside. Its own business is that a bad batch never
reaches the weights, that the optimiser sees trainable parameters alone, and that every step is evaluated, so that
memory stays flat.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import AdamW
from mlx.utils import tree_flatten, tree_map

from service.core import Progress, TrainingFailed
from service.learning.ranks import Gradients, Ranks

MAX_SKIPPED_SHARE = 0.1
MIN_SKIPPED = 3
"""More than this share of the planned steps without a finite gradient, and at least so many, fail the run."""
_WINDOW = 8
"""Losses at the end of a run whose mean is reported."""
_WORSE, _NOISE = 1.1, 0.05
"""The validation loss may end at this many times what it began with, and so many nats more."""


class Minibatch(Protocol):
    """What the training loop needs of a batch."""

    @property
    def count(self) -> int:
        """Tokens processed, for the rate."""
        ...


B = TypeVar("B", bound=Minibatch)


@dataclass(frozen=True, slots=True)
class Optimiser:
    """AdamW with linear warm-up, then cosine to 0.

    steps: updates planned in all (see `update_count`). warmup: share of them. clip: largest global gradient norm.
    accumulate: micro-steps averaged into one update. epoch: micro-steps of one epoch, at whose end the remainder is
    applied (None: only at the end of the run).
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
    """Updates of a run of `epochs` epochs of `epoch` micro-steps each, remainders included."""
    return epochs * math.ceil(epoch / accumulate)


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What a run did. skipped: micro-steps with NaN or Inf in loss or gradient. empty: micro-steps with nothing to
    learn.

    loss: mean of the last losses. losses: one per update. validations: (updates done, loss), the first before training.
    kept: the updates done when the weights were as they are now. seconds: without pauses.
    """

    steps: int
    skipped: int
    empty: int
    loss: float
    losses: tuple[float, ...]
    grad_norm: float
    validations: tuple[tuple[int, float], ...]
    kept: int
    tokens: int
    seconds: float


@dataclass(slots=True)
class _Window:
    """Gradients of the micro-steps since the last update."""

    gradients: Gradients | None = None
    losses: list[float] = field(default_factory=list[float])
    seen: int = 0

    def add(self, gradients: Gradients, loss: float) -> None:
        self.gradients = gradients if self.gradients is None else tree_map(mx.add, self.gradients, gradients)
        mx.eval(self.gradients)
        self.losses.append(loss)

    def mean(self) -> tuple[Gradients, float] | None:
        """Averages over the valid micro-steps; None without any."""
        if self.gradients is None:
            return None
        n = len(self.losses)
        return tree_map(lambda g: g / n, self.gradients), sum(self.losses) / n


class _Trainer:
    """State of one run."""

    def __init__(self, model: nn.Module, settings: Optimiser, on_progress: Callable[[Progress], None]) -> None:
        self.model = model
        self.settings = settings
        self.on_progress = on_progress
        self.optimiser = AdamW(learning_rate=settings.rate(0), weight_decay=settings.weight_decay, bias_correction=True)
        self.optimiser.init(model.trainable_parameters())
        self.begun = time.perf_counter()
        self.paused = 0.0
        self.window = _Window()
        self.step = self.skipped = self.empty = self.tokens = 0
        self.losses: list[float] = []
        self.grad_norm = 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begun - self.paused

    def take(self, loss: float, norm: float, gradients: Gradients) -> None:
        """One micro-step's result: kept, or counted as unusable. Raises TrainingFailed when too many were."""
        self.window.seen += 1
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.skipped += 1
            planned = self.settings.steps * self.settings.accumulate
            if self.skipped >= MIN_SKIPPED and self.skipped > MAX_SKIPPED_SHARE * planned:
                raise TrainingFailed(
                    f"{self.skipped} of {planned} steps had NaN or infinite losses or gradients (the last: loss {loss})"
                )
        elif norm == 0.0:
            # A batch whose mask is empty has no gradient at all; averaging it in would only shrink the others'.
            self.empty += 1
        else:
            self.window.add(gradients, loss)

    def update(self) -> None:
        """Apply what has been gathered and report."""
        mean = self.window.mean()
        self.window = _Window()
        loss = None
        if mean is not None:
            gradients, loss = mean
            norm = global_norm(gradients)
            scale = mx.minimum(self.settings.clip / mx.maximum(norm, 1e-12), 1.0)
            self.optimiser.learning_rate = self.settings.rate(self.step)
            self.optimiser.update(self.model, tree_map(lambda g: g * scale.astype(g.dtype), gradients))
            mx.eval(self.model.trainable_parameters(), self.optimiser.state, norm)
            self.grad_norm = number(norm)
            self.losses.append(loss)
        self.step += 1
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
) -> TrainReport:
    """Train the model's trainable parameters in place on `batches`, which are walked once.

    loss_fn gives a scalar, 0 for a batch without anything to learn. hold is called before every micro-step, to wait in, and
    returns the seconds that are no part of the run. validate is called before the first update, every `validate_every` updates
    and at the end; the weights of its lowest answer after the first are the ones that stay. ranks: the processes that train
    together, each with as many batches as the others, from the same weights. Leaves the model in eval mode. Raises
    TrainingFailed when too many micro-steps are not finite, when the validation loss rose, when no step had anything to learn,
    or when weights are not finite at the end.
    """
    gradient_of = nn.value_and_grad(model, loss_fn)
    run = _Trainer(model, optimiser, on_progress)
    best: tuple[float, int, Any] | None = None
    validations: list[tuple[int, float]] = []

    def check() -> None:
        nonlocal best
        if validate is None or (validations and validations[-1][0] == run.step):
            return
        model.eval()
        loss = validate()
        model.train()
        validations.append((run.step, loss))
        # What the run began with is there to compare with, not to be kept: whether it is better is the gate's to say.
        if run.step and math.isfinite(loss) and (best is None or loss <= best[0]):
            # Arrays are immutable and updates replace them: a snapshot is a set of references.
            best = (loss, run.step, model.trainable_parameters())

    def advance() -> None:
        run.update()
        if validate_every and run.step % validate_every == 0:
            check()

    model.train()
    try:
        check()
        for index, batch in enumerate(batches, start=1):
            run.paused += hold()
            loss, gradients = gradient_of(model, batch)
            if ranks is not None:
                loss, gradients = ranks.mean(loss, gradients)
            norm = global_norm(gradients)
            mx.eval(loss, norm, gradients)
            run.tokens += batch.count
            run.take(number(loss), number(norm), gradients)
            del loss, gradients
            if run.window.seen == optimiser.accumulate or (optimiser.epoch and index % optimiser.epoch == 0):
                advance()
        if run.window.seen:
            advance()
        check()
    finally:
        model.eval()
    if not run.losses:
        raise TrainingFailed(f"nothing to learn: {run.empty} empty and {run.skipped} unusable batches")
    kept = run.step
    if validations:
        begun, ended = validations[0][1], best[0] if best is not None else math.nan
        if not ended <= begun * _WORSE + _NOISE:
            raise TrainingFailed(f"the validation loss rose from {begun:.3g} to {ended:.3g}")
    if best is not None and best[1] != run.step:
        kept = best[1]
        model.update(best[2])
    _check_finite(model)
    return TrainReport(
        steps=run.step,
        skipped=run.skipped,
        empty=run.empty,
        loss=_tail_mean(run.losses),
        losses=tuple(run.losses),
        grad_norm=run.grad_norm,
        validations=tuple(validations),
        kept=kept,
        tokens=run.tokens,
        seconds=run.seconds,
    )


def number(scalar: mx.array) -> float:
    """A scalar array as a Python float; evaluates it, which is a host sync."""
    return float(cast("float", scalar.item()))


def global_norm(gradients: Gradients) -> mx.array:
    """Euclidean norm of all gradients together, float32."""
    leaves = [g for _, g in _flat(gradients)]
    return mx.sqrt(mx.stack([mx.square(g.astype(mx.float32)).sum() for g in leaves]).sum())


def _flat(tree: object) -> list[tuple[str, mx.array]]:
    return cast("list[tuple[str, mx.array]]", tree_flatten(tree))


def _tail_mean(losses: list[float]) -> float:
    last = losses[-_WINDOW:]
    return sum(last) / len(last)


def _check_finite(model: nn.Module) -> None:
    for name, array in _flat(model.trainable_parameters()):
        if not mx.isfinite(array.astype(mx.float32)).all().item():
            raise TrainingFailed(f"weights are not finite after training: {name}")
