"""Adapters as a training run leaves them, made without its child process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.nn as nn

from service.core import AdapterRef, Provenance, TrainingRun
from service.learning import lora
from service.models import vocabulary
from service.store.artifacts import publish
from service.store.registry.adapters import Adapters


def register(
    adapters: Adapters,
    run: TrainingRun,
    model: nn.Module,
    shape: lora.Shape,
    final: Path,
    who: Provenance,
    kept: Sequence[int] | None = None,
) -> AdapterRef:
    """Write what a wrapped draft holds to the folder `final`, and make it the run's candidate. kept: the tokens it may propose,
    None for all. Raises StoreError, IllegalMove."""
    scratch = final.with_name(f".{final.name}.part")
    lora.save(model, shape, scratch, draft=who.draft, target=who.target, run=run.id, parent=run.parent)
    if kept is not None:
        vocabulary.write(kept, scratch)
    return adapters.add(
        run_id=run.id,
        fencing=run.fencing,
        folder=final,
        sha256=publish(scratch, final),
        rank=shape.rank,
        scale=shape.scale,
        keys=shape.keys,
        draft=who.draft,
        parent=run.parent,
    )
