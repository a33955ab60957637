"""The adapter that the `adapted` arm of a benchmark drafts with: a version in the database, or one that is trained first."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from service.core import AdapterRef
from service.evaluation.progress import OnProgress
from service.evaluation.prompts import PromptLine
from service.evaluation.training_run import serve_and_train
from service.settings import Settings
from service.store.stores import open_stores


@dataclass(frozen=True, slots=True)
class BenchAdapter:
    """An adapter, and its origin for the report, JSON-ready."""

    ref: AdapterRef
    origin: dict[str, object]


def registered_adapter(settings: Settings, version: int) -> BenchAdapter:
    """A version of these settings' database. Raises NotFound, StoreError."""
    stores = open_stores(settings)
    try:
        return BenchAdapter(stores.adapters.get(version), {"version": version})
    finally:
        stores.close()


@contextmanager
def trained_adapter(
    settings: Settings, source: str, train: Sequence[PromptLine], on_progress: OnProgress
) -> Generator[BenchAdapter]:
    """An adapter from serving these prompts and one run at the settings' own values, promoted or not. Its folder exists while
    the block runs. source: a name for the prompts. Raises RedraftError when a request or the run fails."""
    with tempfile.TemporaryDirectory(prefix="redraft-bench-") as folder:
        result = serve_and_train(settings, train, Path(folder), on_progress=on_progress)
        origin: dict[str, object] = {
            "trained_on": source,
            "prompts": len(train),
            "state": result.run["state"],
            "verdict": result.run["verdict"],
            "train_seconds": result.seconds,
        }
        yield BenchAdapter(result.adapter, origin)
