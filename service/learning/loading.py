"""What a job loads: the draft that serves, the target where it is needed, and what their config.json say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_config, load_tokenizer

from service.core import TrainingFailed
from service.learning import budget
from service.learning.spec import JobSpec
from service.learning.steps import LEARNT_STEPS
from service.models import eagle, vocabulary
from service.models.grammar import Grammars
from service.models.pair import Loaded, load_model
from service.models.weights import bytes_in_memory


def kept(job: JobSpec, adapter: Path | None) -> list[int] | None:
    """The vocabulary an adapter (None: the bare draft) serves with: its own, else the draft's."""
    own = vocabulary.read(adapter) if adapter is not None else None
    return own if own is not None else vocabulary.read(job.draft)


def load_draft(job: JobSpec) -> Loaded:
    """The draft, bound to its target where it reads that one's hidden states. Raises TrainingFailed."""
    draft = load_model(job.draft)
    if draft.fingerprint != job.provenance.draft:
        raise TrainingFailed(f"the draft in {job.draft.name} is not the one that serves: its files changed")
    if eagle.is_eagle_config(draft.config):
        eagle.bind(draft.model, load_target(job)[0])
    return draft


def load_target(job: JobSpec) -> tuple[nn.Module, int]:
    """The target, and the width of its logits. Raises TrainingFailed."""
    budget.check(budget.loading_bytes(_bytes(job.target)), least_gb=0.0)
    target = load_model(job.target)
    if target.fingerprint != job.provenance.target:
        raise TrainingFailed(f"the target in {job.target.name} is not the one that serves: its files changed")
    return target.model, target_width(job)


def load_grammars(job: JobSpec) -> Grammars:
    """What compiles grammars for the target, as the server does."""
    tokenizer = load_tokenizer(job.target, eos_token_ids=load_config(job.target).get("eos_token_id"))
    return Grammars(tokenizer, target_width(job), tokenizer.eos_token_ids)


def training_bytes(target: Path, draft: Path, *, rows: int, length: int) -> int:
    """Bytes that training this draft takes at its peak, what `load_draft` loads among them; see `budget`."""
    config = _config(draft)
    weights = _bytes(draft)
    if not eagle.is_eagle_config(config):
        return budget.training_bytes(config, weights=weights, rows=rows, length=length)
    weights += _bytes(target)
    return budget.training_bytes(config, weights=weights, rows=rows, length=length, steps=LEARNT_STEPS)


def target_width(job: JobSpec) -> int:
    """Width of the target's logits, at which seeded noise is drawn. Raises TrainingFailed."""
    return _width(job.target)


def shared_width(job: JobSpec) -> int:
    """Token ids below this are known to both models. Raises TrainingFailed."""
    return min(_width(job.target), _width(job.draft))


def _width(folder: Path) -> int:
    config = _config(folder)
    for part in (config, cast("dict[str, Any]", config.get("text_config") or {})):
        if isinstance(width := part.get("vocab_size"), int):
            return width
    raise TrainingFailed(f"{folder.name}/config.json names no vocab_size")


def _config(folder: Path) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads((folder / "config.json").read_text(encoding="utf-8")))


def _bytes(folder: Path) -> int:
    return bytes_in_memory(folder, widen=mx.default_device().type == mx.cpu)
