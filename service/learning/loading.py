"""The models of a job, and how much memory they need."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_config, load_tokenizer

from service.core import TrainingFailed, TrainingOutOfMemory
from service.engine import device
from service.learning.draft_steps import LEARNT_STEPS
from service.learning.spec import JobSpec
from service.models import eagle, vocabulary
from service.models.feature_cache import FeatureCache
from service.models.grammar import Grammars
from service.models.memory import device_free_bytes, free_bytes
from service.models.padding import padded
from service.models.pair import Loaded, load_model
from service.models.training_memory import (
    PROCESS,
    SHORTEST,
    TrainingPlan,
    TrainingShape,
    plan_training,
    smallest_plan,
    training_seconds,
)
from service.models.weights import bytes_in_memory, stores_float32
from service.settings import TrainingSettings

MOST_FEATURES = 2 * 2**30
"""Maximum bytes for an EAGLE head's cached features: 260,000 tokens of a target with 4,096 values in half precision. At
most a quarter of the memory left by the job is used."""
FREE_SHARE = 0.9
"""Fraction of the free memory that a run plans with: the server and other processes take more in the meantime."""
WAIT_SHARE = 0.6
"""Fraction of a step's device memory at which the accelerator is waited for, because calls that were already launched
add to it. On an H200, steps took 1.02 to 1.5 times the planned memory when waiting at the whole of it; with this
fraction 0.85 to 1.17 times, without taking longer (docs/results/memory.md)."""


def serving_vocabulary(job: JobSpec, adapter: Path | None) -> list[int] | None:
    """The reduced vocabulary an adapter (None: the base draft) serves with: its own, else the draft's; None: all ids."""
    own = vocabulary.read(adapter) if adapter is not None else None
    return own if own is not None else vocabulary.read(job.draft)


def load_draft(job: JobSpec, target: nn.Module | None = None, *, needed: int = 0) -> Loaded:
    """Loads the draft. An EAGLE head is bound to `target`, which is loaded when it is None. needed: bytes that the job
    takes and that cached features must leave free. Raises TrainingFailed when model files have changed since serving
    started, or when there is not enough memory for the target."""
    draft = load_model(job.draft)
    if draft.fingerprint != job.provenance.draft:
        raise TrainingFailed(f"the draft in {job.draft.name} is not the served one: its files have changed")
    if eagle.is_eagle_config(draft.config):
        target = target or load_target(job).model
        spare = max(device_free_bytes() - needed, 0) // 4
        eagle.bind(draft.model, target, FeatureCache(min(MOST_FEATURES, spare)))
    return draft


def load_target(job: JobSpec) -> Loaded:
    """Loads the target. Raises TrainingFailed when its files changed, TrainingOutOfMemory without enough memory for it."""
    needed, free = PROCESS + _weight_bytes(job.target), device.free_bytes()
    if needed > free:
        raise TrainingOutOfMemory(f"the target takes {_gib(needed)} GiB of memory, but only {_gib(free)} GiB are free")
    target = load_model(job.target)
    if target.fingerprint != job.provenance.target:
        raise TrainingFailed(f"the target in {job.target.name} is not the served one: its files have changed")
    return target


def load_grammars(job: JobSpec) -> Grammars:
    """The target's grammar compiler, configured as in the server."""
    tokenizer = load_tokenizer(job.target, eos_token_ids=load_config(job.target).get("eos_token_id"))
    return Grammars(tokenizer, target_width(job), tokenizer.eos_token_ids)


def target_width(job: JobSpec) -> int:
    """Width of the target's logits, at which seeded noise is drawn. Raises TrainingFailed if its config.json has none."""
    return logits_width(job.target)


def shared_width(job: JobSpec) -> int:
    """Number of token ids that both models know: all those below it. Raises TrainingFailed if a config.json has no width."""
    return min(logits_width(job.target), logits_width(job.draft))


def training_shape(target: Path, draft: Path, *, rank: int, steps: int = LEARNT_STEPS) -> TrainingShape:
    """The quantities that determine the memory of training this draft, with all models that `load_draft` loads. steps:
    draft steps that a head trains at once."""
    config = _config(draft)
    head = eagle.is_eagle_config(config)
    weights = _weight_bytes(draft) + (_weight_bytes(target) if head else 0)
    return TrainingShape.of(config, weights=weights, value=_value_bytes(draft), rank=rank, steps=steps if head else 1)


def free_for_training(training: TrainingSettings, lent: int | None = None) -> int:
    """Bytes that a run may take: FREE_SHARE of the device's free memory, at most `training.memory_gb`, and at most what
    serving lends (None: no such limit)."""
    free = int(FREE_SHARE * device.free_bytes())
    if lent is not None:
        free = min(free, lent)
    return min(free, int(training.memory_gb * 2**30)) if training.memory_gb > 0 else free


def left_of(lent: int | None) -> int:
    """Bytes of the loan that a process with loaded models can still take (None: no loan limits it)."""
    free = device_free_bytes()
    return free if lent is None else max(min(free, lent - PROCESS - device.memory().active), 0)


def plan_run(shape: TrainingShape, free: int, *, batch: int, length: int, shortest: int = SHORTEST) -> TrainingPlan:
    """How a run computes its steps in `free` bytes. Raises TrainingOutOfMemory with the needs of the smallest run, or
    when the host has too little memory for a process."""
    plan = plan_training(shape, free, batch=batch, length=length, shortest=shortest)
    if plan is None:
        least = smallest_plan(shape, batch=batch, length=length, shortest=shortest)
        raise TrainingOutOfMemory(
            f"{_gib(free)} GiB of memory may be used for training, and the smallest run, {least.rows} x {least.length} tokens, "
            f"takes {_gib(least.peak_bytes)} GiB"
        )
    if (host := free_bytes()) < PROCESS:
        raise TrainingOutOfMemory(f"{_gib(host)} GiB of host memory are free, which is too little for training")
    on_cpu = mx.default_device().type == mx.cpu
    device.limit_memory(plan.peak_bytes if on_cpu else int(WAIT_SHARE * (plan.peak_bytes - shape.process)))
    return plan


@dataclass(frozen=True, slots=True)
class TrainingOutlook:
    """What a run would do next to an idle server. batch, length: texts of a micro-batch and their tokens. recompute:
    with gradient checkpointing. peak_bytes: peak memory. minutes: for one epoch over `training.window` texts of that
    length; None if the device's speed is not known. If `fits` is False, the figures are those of the smallest run."""

    fits: bool
    batch: int
    length: int
    recompute: bool
    peak_bytes: int
    minutes: float | None

    def __str__(self) -> str:
        if not self.fits:
            return f"the smallest run takes {_gib(self.peak_bytes)} GiB"
        how = ", gradient checkpointing" if self.recompute else ""
        return f"{self.batch} x {self.length} tokens at a time{how}"


def training_outlook(
    shape: TrainingShape,
    training: TrainingSettings,
    idle: int,
    *,
    tflops: float | None = None,
    on_cpu: bool | None = None,
) -> TrainingOutlook:
    """What a run would do next to a server that can lend `idle` bytes while it handles no request.

    The run takes at most half of them if texts keep their full length in that, so that short requests can be answered
    at the same time; otherwise it may take all. tflops: the device's speed in large matrix products; None: unknown.
    on_cpu: whether it is a CPU, which `training.gpu_share` does not apply to; None: ask this device."""
    if training.memory_gb > 0:
        idle = min(idle, int(training.memory_gb * 2**30))
    size, length = training.batch_size, padded(training.max_length)
    found = plan_training(shape, idle // 2, batch=size, length=length, shortest=length)
    found = found or plan_training(shape, idle, batch=size, length=length)
    plan = found or smallest_plan(shape, batch=size, length=length)
    minutes = None
    if tflops is not None:
        on_cpu = mx.default_device().type == mx.cpu if on_cpu is None else on_cpu
        seconds = training_seconds(
            shape,
            max(training.window, 1) * plan.length,
            rows=plan.rows,
            length=plan.length,
            recompute=plan.recompute,
            tflops=tflops,
            share=1.0 if on_cpu else training.gpu_share,
        )
        minutes = seconds / 60
    return TrainingOutlook(found is not None, plan.rows, plan.length, plan.recompute, plan.peak_bytes, minutes)


def logits_width(folder: Path) -> int:
    """Width of a model's logits. Raises TrainingFailed if its config.json has none."""
    config = _config(folder)
    for part in (config, cast("dict[str, Any]", config.get("text_config") or {})):
        if isinstance(width := part.get("vocab_size"), int):
            return width
    raise TrainingFailed(f"{folder.name}/config.json has no vocab_size")


def _config(folder: Path) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads((folder / "config.json").read_text(encoding="utf-8")))


def _weight_bytes(folder: Path) -> int:
    return bytes_in_memory(folder, widen=mx.default_device().type == mx.cpu)


def _value_bytes(folder: Path) -> int:
    """Bytes per activation value: float32 on a CPU, otherwise the weights' type."""
    return 4 if mx.default_device().type == mx.cpu or stores_float32(folder) else 2


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}"
