"""What a machine of some size gets of a pair: how long requests may be and how many fit together, with or without the weights
on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from service.core import ModelError
from service.engine import device
from service.engine.footprint import MemoryPlan, plan_memory, weight_bytes
from service.engine.strategy import CPU, METAL, using
from service.learning.draft_steps import LEARNT_STEPS
from service.learning.loading import TrainingOutlook, training_outlook
from service.models import eagle
from service.models.machine import backend, folder_at_hand
from service.models.memory import OTHERS, assumed_bytes, working_set
from service.models.pair import unread_pair
from service.models.shapes import config_of, context_of, model_of
from service.models.training_memory import TrainingShape
from service.models.weights import stores_float32
from service.settings import Settings

Device = Literal["metal", "cpu"]
ROW = 4096
"""Tokens of the rows that are counted."""


@dataclass(frozen=True, slots=True)
class PairPlan:
    """Sizes in bytes. memory: of the machine. free: left of it once the weights are loaded. context: tokens of a prompt and its
    answer, at most. rows: requests of ROW tokens that fit together. training: None without a draft. assumed: what is taken
    to be so, in words."""

    memory: int
    free: int
    weights: int
    plan: MemoryPlan
    context: int
    rows: int
    training: TrainingOutlook | None
    assumed: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """The answer of `doctor --memory` as JSON."""
        plan, row = self.plan, self.plan.budget.row
        return {
            "memory_bytes": self.memory,
            "free_bytes": self.free,
            "weights_bytes": self.weights,
            "cache_bytes": plan.cache,
            "activation_bytes": plan.activations,
            "adapter_bytes": plan.adapters,
            "budget_bytes": plan.budget.size,
            "token_bytes": row.first + row.scores,
            "row_bytes": row.fixed,
            "growth_bytes": row.growth(1, self.context),
            "context": self.context,
            "rows_of_4096": self.rows,
            "training": None if self.training is None else asdict(self.training),
            "idle_bytes": plan.idle,
            "problem": plan.problem,
            "assumed": list(self.assumed),
        }


def plan_pair(
    names: Sequence[str],
    settings: Settings,
    *,
    memory: int,
    free: int | None = None,
    tflops: float | None = None,
    on: Device = "metal",
) -> PairPlan:
    """The plan of a server on a machine with `memory` bytes, rows in rectangles.

    names: the target, and the draft where there is one (`catalog.resolve`). free: bytes left once the weights are loaded; None:
    as `assumed_bytes` has it. tflops: see `plan_models`. on: Metal runs weights as they are stored, a CPU in float32. Raises
    ModelError for a model that is neither on this disk nor known."""
    engine = settings.engine
    with using(METAL if on == "metal" else CPU):
        configs = _configs(names, settings)
        folders = [
            _with_weights(folder_at_hand(name, settings.home, None if i else settings.models.revision))
            for i, name in enumerate(names)
        ]
        models = _models(configs, folders, on)
        weights, context = weight_bytes(*models), context_of(configs[0])
        left = max(assumed_bytes(memory) - weights, 0) if free is None else free
        shape = _shape(configs[1], folders[1], models, settings, on) if len(models) > 1 else None
        pair = (models[0], models[1] if len(models) > 1 else None)
        plan, training = plan_models(
            pair, shape, settings, left, cache=device.cache_limit(memory), tflops=tflops, on_cpu=on == "cpu"
        )
        limits = [limit for limit in (context, engine.max_context) if limit]
        return PairPlan(
            memory,
            left,
            weights,
            plan,
            context=min([plan.budget.longest(), *limits]),
            rows=plan.budget.rows_of(ROW, engine.max_rows),
            training=training,
            assumed=_assumed(memory, free, tflops),
        )


def plan_models(
    models: tuple[nn.Module, nn.Module | None],
    shape: TrainingShape | None,
    settings: Settings,
    free: int,
    *,
    cache: int,
    tflops: float | None = None,
    on_cpu: bool | None = None,
) -> tuple[MemoryPlan, TrainingOutlook | None]:
    """How a server with these settings divides `free` bytes, which the models' weights leave, and what a training run would do;
    None where none is trained.

    shape: what the draft's training takes; None: there is no draft. cache: `device.cache_limit`. tflops, on_cpu: see
    `training_outlook`."""
    engine, training = settings.engine, settings.training
    trains = shape is not None and training.enabled and training.run_here

    def outlook(idle: int) -> TrainingOutlook | None:
        return training_outlook(shape, training, idle, tflops=tflops, on_cpu=on_cpu) if shape and trains else None

    def needed(idle: int) -> int:
        found = outlook(idle)
        return 0 if found is None else found.peak_bytes

    plan = plan_memory(
        *models,
        free,
        cache=cache,
        kv_mb=engine.kv_budget_mb,
        prefix_mb=engine.prefix_cache_mb,
        chunk=engine.prefill_chunk,
        proposed=max(engine.num_draft_tokens, engine.num_lookup_tokens),
        rank=training.rank if trains else None,
        training=needed,
    )
    return plan, outlook(plan.idle)


def _shape(
    config: Mapping[str, Any], folder: Path | None, models: Sequence[nn.Module], settings: Settings, on: Device
) -> TrainingShape:
    """What training the draft takes: from config.json, as `learning.loading.training_shape` has it from a folder."""
    head = eagle.is_eagle_config(config)
    wide = on == "cpu" or (folder is not None and stores_float32(folder))
    return TrainingShape.of(
        config,
        weights=weight_bytes(*(models if head else models[1:])),
        value=4 if wide else 2,
        rank=settings.training.rank,
        steps=LEARNT_STEPS if head else 1,
    )


def _configs(names: Sequence[str], settings: Settings) -> list[dict[str, Any]]:
    configs: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        config = config_of(name, settings.home, None if number else settings.models.revision)
        if config is None:
            raise ModelError(
                f"the sizes of {name} are not known: it is not on this disk (`redraft models get {name}` fetches it)"
            )
        configs.append(config)
    return configs


def _models(configs: Sequence[Mapping[str, Any]], folders: Sequence[Path | None], on: Device) -> list[nn.Module]:
    """The models, none of whose weights are read. folders: those with weights on this disk."""
    here = [folder for folder in folders if folder is not None]
    if len(here) == len(configs) and on == backend():
        # As they are loaded here: embeddings that are equal count once.
        pair = unread_pair(here[0], here[1] if len(here) > 1 else None)
        return [model for model in pair if model is not None]

    def dtype(folder: Path | None) -> mx.Dtype:
        wide = on == "cpu" or (folder is not None and stores_float32(folder))
        return mx.float32 if wide else mx.bfloat16

    return [model_of(config, dtype(folder)) for config, folder in zip(configs, folders, strict=True)]


def _with_weights(folder: Path | None) -> Path | None:
    """The folder, unless it holds a config.json and no weights."""
    return folder if folder is not None and any(folder.glob("model*.safetensors")) else None


def _assumed(memory: int, free: int | None, tflops: float | None) -> tuple[str, ...]:
    gib = 2**30
    speed = () if tflops is None else (f"large matrix products run at {tflops:g} TFLOP/s (--tflops)",)
    if free is not None:
        return (f"{free / gib:.1f} GiB are free once the weights are loaded (--free)", *speed)
    return (
        f"Metal recommends to hold {working_set(memory) / gib:.1f} GiB at once (sysctl iogpu.wired_limit_mb changes it)",
        f"macOS and other programs hold {OTHERS / gib:.0f} GiB",
        *speed,
    )
