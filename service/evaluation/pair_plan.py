"""What a machine of some size gets of a pair: how long requests may be and how many fit together, with or without the weights
on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from service.core import ModelError
from service.engine import device
from service.engine.footprint import MemoryPlan, plan_memory, weight_bytes
from service.engine.strategy import CPU, METAL, using
from service.learning.loading import estimate_training_bytes
from service.models.machine import backend, folders_at_hand
from service.models.memory import OTHERS, assumed_bytes, working_set
from service.models.pair import unread_pair
from service.models.shapes import config_of, context_of, model_of
from service.settings import Settings

Device = Literal["metal", "cpu"]
ROW = 4096
"""Tokens of the rows that are counted."""


@dataclass(frozen=True, slots=True)
class TrainingOutlook:
    """Whether a run fits beside an idle server. batch, length: texts of a call and tokens of each. peak_bytes: of the run's
    process. minutes: of an epoch; None: not known."""

    fits: bool
    batch: int
    length: int
    peak_bytes: int
    minutes: float | None = None


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
            "problem": plan.problem,
            "assumed": list(self.assumed),
        }


def plan_pair(
    names: Sequence[str], settings: Settings, *, memory: int, free: int | None = None, on: Device = "metal"
) -> PairPlan:
    """The plan of a server on a machine with `memory` bytes, rows in rectangles. names: the target, and the draft where there
    is one (`catalog.resolve`). free: bytes left once the weights are loaded; None: as `assumed_bytes` has it. on: Metal
    runs weights as they are stored, a CPU in float32. Raises ModelError for a model that is neither on this disk nor known."""
    engine, training = settings.engine, settings.training
    with using(METAL if on == "metal" else CPU):
        configs = _configs(names, settings)
        models = _models(names, configs, settings, on)
        weights, context = weight_bytes(*models), context_of(configs[0])
        left = max(assumed_bytes(memory) - weights, 0) if free is None else free
        plan = plan_memory(
            models[0],
            models[1] if len(models) > 1 else None,
            left,
            cache=device.cache_limit(memory),
            kv_mb=engine.kv_budget_mb,
            prefix_mb=engine.prefix_cache_mb,
            chunk=engine.prefill_chunk,
            proposed=max(engine.num_draft_tokens, engine.num_lookup_tokens),
            learns=training.enabled and training.run_here and len(models) > 1,
        )
        limits = [limit for limit in (context, engine.max_context) if limit]
        return PairPlan(
            memory,
            left,
            weights,
            plan,
            context=min([plan.budget.longest(), *limits]),
            rows=plan.budget.rows_of(ROW, engine.max_rows),
            training=_outlook(configs[1], models[1], settings, left - plan.cache) if len(models) > 1 else None,
            assumed=_assumed(memory, free),
        )


def _outlook(config: Mapping[str, object], draft: nn.Module, settings: Settings, free: int) -> TrainingOutlook:
    """A run of the settings' size. free: bytes that an idle server leaves."""
    rows, length = settings.training.batch_size, settings.training.max_length
    peak = estimate_training_bytes(config, weights=weight_bytes(draft), rows=rows, length=length)
    return TrainingOutlook(peak <= free, rows, length, peak)


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


def _models(
    names: Sequence[str], configs: Sequence[Mapping[str, Any]], settings: Settings, on: Device
) -> list[nn.Module]:
    """The models, none of whose weights are read."""
    folders = folders_at_hand(names, settings.home, settings.models.revision)
    if len(folders) == len(names) and on == backend():
        # As they are loaded here: embeddings that are equal count once.
        pair = unread_pair(folders[0], folders[1] if len(folders) > 1 else None)
        return [model for model in pair if model is not None]
    return [model_of(config, mx.bfloat16 if on == "metal" else mx.float32) for config in configs]


def _assumed(memory: int, free: int | None) -> tuple[str, ...]:
    gib = 2**30
    if free is not None:
        return (f"{free / gib:.1f} GiB are free once the weights are loaded (--free)",)
    return (
        f"Metal recommends to hold {working_set(memory) / gib:.1f} GiB at once (sysctl iogpu.wired_limit_mb changes it)",
        f"macOS and other programs hold {OTHERS / gib:.0f} GiB",
    )
