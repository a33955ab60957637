"""The models of a job, and how much memory they need."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_config, load_tokenizer

from service.core import TrainingFailed, TrainingOutOfMemory
from service.engine import device
from service.learning.draft_steps import LEARNT_STEPS
from service.learning.losses import CHUNK
from service.learning.spec import JobSpec
from service.models import eagle, vocabulary
from service.models.feature_cache import FeatureCache
from service.models.grammar import Grammars
from service.models.memory import device_free_bytes, free_bytes
from service.models.pair import Loaded, load_model
from service.models.weights import bytes_in_memory

MOST_FEATURES = 2 * 2**30
"""Bytes of an EAGLE head's features that a job may hold: 260,000 tokens of a target of 4,096 values in half precision. No more
than a quarter of what the job leaves free."""
_BASE = 512 * 2**20
"""Bytes of the interpreter, MLX and its buffers."""
_PER_HIDDEN, _PER_INNER, _PER_SCORE, _PER_LOGIT = 16, 6, 3, 5
"""Arrays stored for the backward pass of one block: as wide as the hidden states, the feed-forward layer, the attention scores;
and copies of the logits in the loss. Counted for a Llama block."""
_FLOAT = 4


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
    """The target. Raises TrainingFailed when its files changed or there is no memory for it."""
    check_memory(_BASE + _weight_bytes(job.target), least_gb=0.0)
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


def training_bytes(target: Path, draft: Path, *, rows: int, length: int, steps: int = LEARNT_STEPS) -> int:
    """Bytes that training this draft takes at its peak, the models that `load_draft` loads among them. rows, length: of the
    largest batch, padding included. steps: of a round that a head learns at once."""
    config = _config(draft)
    weights = _weight_bytes(draft)
    if not eagle.is_eagle_config(config):
        return estimate_training_bytes(config, weights=weights, rows=rows, length=length)
    weights += _weight_bytes(target)
    return estimate_training_bytes(config, weights=weights, rows=rows, length=length, steps=steps)


def estimate_training_bytes(
    config: Mapping[str, object], *, weights: int, rows: int, length: int, steps: int = 1
) -> int:
    """Bytes that a run takes at its peak, estimated. config: the draft's config.json. weights: bytes of all weights in memory.
    rows, length: of the largest batch, padding included. steps: draft steps that the draft's blocks compute for it."""

    config = {**config, **cast("Mapping[str, object]", config.get("text_config") or {})}

    def size(name: str, default: int) -> int:
        value = config.get(name)
        return value if isinstance(value, int) else default

    hidden = size("hidden_size", 1024)
    layers, heads = size("num_hidden_layers", 12), size("num_attention_heads", 16)
    inner, width = size("intermediate_size", 4 * hidden), size("vocab_size", 2**17)
    token = _PER_HIDDEN * hidden + _PER_INNER * inner + _PER_SCORE * heads * length
    logits = _PER_LOGIT * min(CHUNK, rows * length) * width
    return _BASE + weights + _FLOAT * (steps * layers * rows * length * token + logits)


def check_memory(needed: int, *, least_gb: float) -> None:
    """Raises TrainingOutOfMemory when less than `least_gb` GiB of the device's memory (0: less than `needed` bytes) is free, or
    when the host has too little for a process."""
    wanted = int(least_gb * 2**30) if least_gb > 0 else needed
    free = device.free_bytes()
    if free < wanted:
        raise TrainingOutOfMemory(
            f"training takes {wanted / 2**30:.1f} GiB of memory and {free / 2**30:.1f} GiB are free"
        )
    if (free := free_bytes()) < min(wanted, _BASE):
        raise TrainingOutOfMemory(f"{free / 2**30:.1f} GiB of the host's memory are free, too little to train")


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
