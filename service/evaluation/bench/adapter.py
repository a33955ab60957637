"""The adapter that a benchmark's `adapted` arm drafts with: one that is there, or one trained through the real loop first."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from service.app import open_stores
from service.core import AdapterRef
from service.evaluation.prompts import PromptLine
from service.evaluation.training_run import Step, serve_and_train
from service.settings import Settings


@dataclass(frozen=True, slots=True)
class Adapter:
    """told: where it comes from, for the report."""

    ref: AdapterRef
    told: dict[str, object]


def registered(settings: Settings, version: int) -> Adapter:
    """A version of these settings' database. Raises NotFound, StoreError."""
    stores = open_stores(settings)
    try:
        return Adapter(stores.adapters.get(version), {"version": version})
    finally:
        stores.close()


@contextmanager
def trained(settings: Settings, source: str, train: Sequence[PromptLine], on_step: Step) -> Generator[Adapter]:
    """An adapter from serving these prompts and one run at the settings' own values, there while the block runs, whatever the
    gate said of it (which is told). source: a name for the prompts. Raises RedraftError."""
    with tempfile.TemporaryDirectory(prefix="redraft-bench-") as folder:
        run, ref = serve_and_train(settings, train, Path(folder), on_step=on_step)
        told: dict[str, object] = {
            "trained_on": source,
            "prompts": len(train),
            "state": run["state"],
            "verdict": run["verdict"],
            "train_seconds": run["train_seconds"],
        }
        yield Adapter(ref, told)
