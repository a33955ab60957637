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
"""Bytes of an EAGLE head's features that a job may hold: 260,000 tokens of a target of 4,096 values in half precision. No more
than a quarter of what the job leaves free."""
FREE_SHARE = 0.9
"""Of the memory that is free when a run begins it plans with this share: the server and others take more meanwhile."""
WAIT_SHARE = 0.6
"""Of what a step takes on the device: an accelerator is waited for once so much is held, since what was launched before comes
on top of it. On an H200 steps took 1.02 to 1.5 times what was planned when it was waited for at the whole; at this share they
took 0.85 to 1.17 times that, and no longer (docs/results/memory.md)."""


def serving_vocabulary(job: JobSpec, adapter: Path | None) -> list[int] | None:
    """The reduced vocabulary that an adapter (None: the bare draft) serves with: its own, else the draft's; None: all ids."""
    own = vocabulary.read(adapter) if adapter is not None else None
    return own if own is not None else vocabulary.read(job.draft)


def load_draft(job: JobSpec, target: nn.Module | None = None, *, needed: int = 0) -> Loaded:
    """The draft; an EAGLE head is bound to `target`, which is loaded too where it is None. needed: bytes that the job takes,
    which features of texts leave free. Raises TrainingFailed when files of a model changed since it was put to service, or when
    there is no memory for the target."""
    draft = load_model(job.draft)
    if draft.fingerprint != job.provenance.draft:
        raise TrainingFailed(f"the draft in {job.draft.name} is not the one that serves: its files changed")
    if eagle.is_eagle_config(draft.config):
        target = target or load_target(job).model
        spare = max(device_free_bytes() - needed, 0) // 4
        eagle.bind(draft.model, target, FeatureCache(min(MOST_FEATURES, spare)))
    return draft


def load_target(job: JobSpec) -> Loaded:
    """The target. Raises TrainingFailed when its files changed, TrainingOutOfMemory when there is no memory for it."""
    needed, free = PROCESS + _weight_bytes(job.target), device.free_bytes()
    if needed > free:
        raise TrainingOutOfMemory(f"the target takes {_gib(needed)} GiB of memory and {_gib(free)} GiB are free")
    target = load_model(job.target)
    if target.fingerprint != job.provenance.target:
        raise TrainingFailed(f"the target in {job.target.name} is not the one that serves: its files changed")
    return target


def load_grammars(job: JobSpec) -> Grammars:
    """The target's grammar compiler, as the server has it."""
    tokenizer = load_tokenizer(job.target, eos_token_ids=load_config(job.target).get("eos_token_id"))
    return Grammars(tokenizer, target_width(job), tokenizer.eos_token_ids)


def target_width(job: JobSpec) -> int:
    """Width of the target's logits, at which seeded noise is drawn. Raises TrainingFailed when its config.json has none."""
    return logits_width(job.target)


def shared_width(job: JobSpec) -> int:
    """Number of token ids that both models know: those below it. Raises TrainingFailed when a config.json has no width."""
    return min(logits_width(job.target), logits_width(job.draft))


def training_shape(target: Path, draft: Path, *, rank: int, steps: int = LEARNT_STEPS) -> TrainingShape:
    """What decides what training this draft takes, with all models that `load_draft` loads. steps: of a round that a head
    learns at once."""
    config = _config(draft)
    head = eagle.is_eagle_config(config)
    weights = _weight_bytes(draft) + (_weight_bytes(target) if head else 0)
    return TrainingShape.of(config, weights=weights, value=_value_bytes(draft), rank=rank, steps=steps if head else 1)


def free_for_training(training: TrainingSettings, lent: int | None = None) -> int:
    """Bytes that a run may take: FREE_SHARE of what is free on the device, `training.memory_gb` at most, and no more than what
    serving lends it (None: that is not bounded)."""
    free = int(FREE_SHARE * device.free_bytes())
    if lent is not None:
        free = min(free, lent)
    return min(free, int(training.memory_gb * 2**30)) if training.memory_gb > 0 else free


def left_of(lent: int | None) -> int:
    """Bytes that a process which has loaded its models can still take of what serving lends it (None: that is not bounded)."""
    free = device_free_bytes()
    return free if lent is None else max(min(free, lent - PROCESS - device.memory().active), 0)


def plan_run(shape: TrainingShape, free: int, *, batch: int, length: int, shortest: int = SHORTEST) -> TrainingPlan:
    """How a run computes its steps in `free` bytes. Raises TrainingOutOfMemory with what the smallest run would take, and where
    the host has too little memory for a process."""
    plan = plan_training(shape, free, batch=batch, length=length, shortest=shortest)
    if plan is None:
        least = smallest_plan(shape, batch=batch, length=length, shortest=shortest)
        raise TrainingOutOfMemory(
            f"{_gib(free)} GiB of memory may be used for training, and the smallest run, {least.rows} x {least.length} tokens, "
            f"takes {_gib(least.peak_bytes)} GiB"
        )
    if (host := free_bytes()) < PROCESS:
        raise TrainingOutOfMemory(f"{_gib(host)} GiB of the host's memory are free, too little to train")
    on_cpu = mx.default_device().type == mx.cpu
    device.limit_memory(plan.peak_bytes if on_cpu else int(WAIT_SHARE * (plan.peak_bytes - shape.process)))
    return plan


@dataclass(frozen=True, slots=True)
class TrainingOutlook:
    """What a run would do beside a server that is idle. batch, length: texts of a micro-batch and their tokens. recompute: with
    gradient checkpointing. peak_bytes: what it takes. minutes: of one epoch over `training.window` texts of that length; None
    where the device's speed is not known. Where `fits` is False the figures are those of the smallest run."""

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
    """What a run would do beside a server that has `idle` bytes to lend while nothing is asked.

    The run takes at most half of them where texts keep their full length in that, so that short requests are answered beside
    it; otherwise it may take all. tflops: speed of the device in large matrix products; None: not known. on_cpu: whether it
    is a CPU, which a run does not share by `training.gpu_share`; None: whether this one is."""
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
    """Width of a model's logits. Raises TrainingFailed where its config.json has none."""
    config = _config(folder)
    for part in (config, cast("dict[str, Any]", config.get("text_config") or {})):
        if isinstance(width := part.get("vocab_size"), int):
            return width
    raise TrainingFailed(f"{folder.name}/config.json names no vocab_size")


def _config(folder: Path) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads((folder / "config.json").read_text(encoding="utf-8")))


def _weight_bytes(folder: Path) -> int:
    return bytes_in_memory(folder, widen=mx.default_device().type == mx.cpu)


def _value_bytes(folder: Path) -> int:
    """Bytes of an activation: float32 on a CPU, elsewhere as the weights are stored."""
    return 4 if mx.default_device().type == mx.cpu or stores_float32(folder) else 2


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}"
