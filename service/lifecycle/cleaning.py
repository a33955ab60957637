"""Retention: old generations, and adapter folders that crashed runs left."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import chain
from pathlib import Path

from service.lifecycle.context import LifecycleContext
from service.store.artifacts import sweep

log = logging.getLogger(__name__)

SWEEP_GRACE_SECONDS = 86_400.0
"""How long a folder is left alone that no row knows, where another process may be about to name it."""


def clean(context: LifecycleContext, *, child_under_way: bool) -> None:
    """Delete generations beyond what the log may hold, in the background, targets and practice text that are too old or too
    much, and folders that no row knows. Folders only while nobody trains: one may be about to be named. Of other databases'
    folders this knows nothing: they have their grace."""
    stores, rules = context.stores, context.rules
    before = None if rules.max_days is None else context.database_now() - timedelta(days=rules.max_days)
    purge = stores.generations.purge(rules.max_generations, before=before, max_bytes=rules.max_bytes)
    purge.add_done_callback(_report)
    for folder in (rules.targets, rules.practice):
        if before is not None and folder is not None:
            _remove_older(folder, before)
    if rules.practice is not None:
        _keep_newest(rules.practice, int(rules.training.practice_gb * 2**30))
    if child_under_way or stores.runs.unfinished():
        return
    context.discard_candidates("its run ended without a verdict")
    known = [ref.folder for ref in stores.adapters.all()]
    removed = sweep(rules.adapters, known, SWEEP_GRACE_SECONDS if context.members.shared else 0.0)
    if removed:
        log.info("removed %d adapter folders that no row knows", len(removed))


def _remove_older(root: Path, before: datetime) -> None:
    # Half-written ones too, which a child that was killed leaves.
    for path in chain(root.glob("*/*.npz"), root.glob("*/*.part")):
        # Another process of this folder may be removing the same.
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < before.timestamp():
                path.unlink()


def _keep_newest(root: Path, most: int) -> None:
    """Remove the oldest files of practice text until no more than `most` bytes are left."""
    with suppress(FileNotFoundError):
        files = sorted(((p.stat().st_mtime, p.stat().st_size, p) for p in root.glob("*/*.npz")), reverse=True)
        kept = 0
        for _, size, path in files:
            kept += size
            if kept > most:
                path.unlink(missing_ok=True)


def _report(purge: Future[int]) -> None:
    if (error := purge.exception()) is not None:
        log.warning("old generations were not removed: %s", error)
    elif purge.result():
        log.info("removed %d old generations", purge.result())
