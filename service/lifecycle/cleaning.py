"""Retention of generations and of adapter files that are no longer needed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import chain
from pathlib import Path

from service.core import BARE_DRAFT, AdapterRef, AdapterState, IllegalMove
from service.lifecycle.context import LifecycleContext
from service.store.artifacts import remove_folder, sweep

log = logging.getLogger(__name__)

SWEEP_GRACE_SECONDS = 86_400.0
"""Minimum age of a folder without a row before it is deleted: another process may be about to register it."""


def clean(context: LifecycleContext, *, child_under_way: bool) -> None:
    """Deletes generations beyond the log's limits (in the background), old or excess targets and practice text, and the
    folders of adapters that will not serve again or that no row names. Folders are deleted only while nothing trains,
    because a new folder may be about to be registered. Folders of other databases look the same, so a shared root has a
    grace period."""
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
    for ref in removable(stores.adapters.all(), rules.keep_adapters):
        # Another process may have activated or removed it in the meantime.
        with suppress(IllegalMove):
            stores.adapters.remove(ref.id)
    known = stores.adapters.all()
    # A candidate that was just rejected stays available until the next one.
    newest = max((ref.id for ref in known), default=BARE_DRAFT)
    kept = {ref.id for ref in known if ref.id == newest and ref.state is AdapterState.REJECTED}
    doomed = [ref.folder for ref in known if not ref.state.may_serve and ref.id not in kept and ref.folder.is_dir()]
    for folder in doomed:
        # Another process may be deleting it too.
        with suppress(FileNotFoundError):
            remove_folder(folder)
    grace = SWEEP_GRACE_SECONDS if context.members.shared else 0.0
    orphans = sweep(rules.adapters, [ref.folder for ref in known], grace)
    if doomed or orphans:
        log.info(
            "deleted %d folders of adapters that will not serve and %d without an adapter", len(doomed), len(orphans)
        )


def removable(known: Sequence[AdapterRef], keep: int) -> list[AdapterRef]:
    """Adapters whose files no rollback needs: of each pair, the retired and rolled-back ones except the newest `keep`.
    The active adapter and its ancestors always stay. known: every adapter."""
    by_id = {ref.id: ref for ref in known}
    serving: set[int] = set()
    for ref in known:
        ancestor = ref.id if ref.state is AdapterState.ACTIVE else BARE_DRAFT
        while ancestor != BARE_DRAFT and ancestor in by_id:
            serving.add(ancestor)
            ancestor = by_id[ancestor].parent
    spare: dict[tuple[str | None, str], list[AdapterRef]] = {}
    for ref in sorted(known, key=lambda ref: ref.id, reverse=True):
        if ref.state in {AdapterState.RETIRED, AdapterState.ROLLED_BACK} and ref.id not in serving:
            spare.setdefault((ref.target, ref.draft), []).append(ref)
    return [ref for refs in spare.values() for ref in refs[keep:]]


def _remove_older(root: Path, before: datetime) -> None:
    # Includes partial files left by a child that was killed.
    for path in chain(root.glob("*/*.npz"), root.glob("*/*.part")):
        # Another process that shares this folder may be removing it too.
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < before.timestamp():
                path.unlink()


def _keep_newest(root: Path, most: int) -> None:
    """Removes the oldest practice files until at most `most` bytes are left."""
    with suppress(FileNotFoundError):
        files = sorted(((p.stat().st_mtime, p.stat().st_size, p) for p in root.glob("*/*.npz")), reverse=True)
        kept = 0
        for _, size, path in files:
            kept += size
            if kept > most:
                path.unlink(missing_ok=True)


def _report(purge: Future[int]) -> None:
    if (error := purge.exception()) is not None:
        log.warning("could not delete old generations: %s", error)
    elif purge.result():
        log.info("deleted %d old generations", purge.result())
