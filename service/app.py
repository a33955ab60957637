"""What servers, trainers and commands need of a database and its models before any is loaded."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from service.core import Erased, Provenance, Selection
from service.lifecycle.context import Rules
from service.models.catalog import general_set, resolve
from service.models.draft_choice import find_draft
from service.settings import Settings, earlier_home
from service.store.access.keys import CONFIGURED
from service.store.backends.backend import shown, sqlite_path
from service.store.stores import Stores

log = logging.getLogger(__name__)

TARGETS, PRACTICE = "targets", "practice"
"""In the home folder: the target's distributions for texts that were logged without them (learning.targets), and what it wrote
for practice (learning.practice_text)."""
LOG_SHARE, LEAST_LOG_BYTES, MOST_LOG_BYTES = 1 / 50, 512 * 2**20, 16 * 2**30
"""Of the disk that holds SQLite's file, what recorded generations may take where `store.max_mb` says nothing."""
LOGGED_ANSWERS = 2_000
"""The log's newest, of any target, among which a server that starts looks for outputs of its own."""


def erase(stores: Stores, settings: Settings, selection: Selection, *, retire_adapters: bool) -> Erased:
    """What lifecycle.Supervisor.erase does, where no server runs: files and rows. Raises StoreError, OSError."""
    # Here alone: they import MLX.
    from service.engine.kv import prefix_files
    from service.learning import practice_text, targets

    # On a database that servers share one may start meanwhile: it forgets too, and reads none of it.
    number = stores.erasures.ask(selection)
    try:
        targets.remove_files(settings.home / TARGETS)
        practice_text.remove(settings.home / PRACTICE)
        if (folder := settings.engine.prefix_cache_dir) is not None:
            prefix_files.remove_files(folder)
        return stores.lineage.erase(selection, retire_adapters=retire_adapters)
    finally:
        stores.erasures.end(number)


def logged_outputs(
    stores: Stores, settings: Settings, who: Provenance, tokens: int
) -> Generator[tuple[str, tuple[int, ...]]]:
    """Salt (core.Prompt.cache_salt) and tokens of the log's newest outputs, so many tokens, the newest last. None while texts
    are being erased: this process may have forgotten them already, and they are still there. Raises StoreError."""
    if stores.erasures.asked():
        return
    days, shared = settings.store.max_days, settings.server.share_across_keys
    since = datetime.now(UTC) - timedelta(days=days) if days is not None else None
    for key, output in stores.generations.outputs(who, tokens, LOGGED_ANSWERS, since):
        # The key of the settings may have been another's when they were other settings.
        if shared or key not in CONFIGURED.values():
            yield "" if shared or key is None else key, output


def start_notices(settings: Settings) -> list[str]:
    """What `serve` says at start: where its files are, what it records there, and how to turn that off."""
    home = f"home: {settings.home}"
    if settings.home == earlier_home():
        home += " (from an earlier install, in the cache folder; set REDRAFT_HOME to keep it elsewhere)"
    kept: list[str] = []
    if (folder := settings.engine.prefix_cache_dir) is not None:
        kept = [f"kept for the next start: tokens of prompts and answers, in {folder} (engine.prefix_cache_dir)"]
    if not settings.store.record:
        return [home, "recorded: nothing (store.record is false)", *kept]
    shared: list[str] = []
    if sqlite_path(settings.database_url) is None:
        shared = [
            f"servers of the same database share adapters: {settings.adapters_dir} has to be one folder for all of them"
        ]
    return [
        home,
        *kept,
        *shared,
        f"recorded for training: prompts, answers and their tokens' probabilities, in {shown(settings.database_url)}; "
        f"adapters in {settings.adapters_dir}",
        'to record nothing: store.record = false with training.enabled = false, or "store": false in a request',
    ]


@dataclass(frozen=True, slots=True)
class Folders:
    """Where the pair's models are."""

    target: Path
    draft: Path | None
    general: Path | None


def resolve_models(settings: Settings, on_step: Callable[[str], None] = log.info) -> Folders:
    """Find or make the folders of the pair; where no draft is named, one that fits is looked for. The first time this uses MLX
    on the calling thread. Raises ModelError."""
    chosen, home = settings.models, settings.home
    target = resolve(chosen.target, home, revision=chosen.revision, on_step=on_step)
    if chosen.draft is None:
        draft = find_draft(chosen.target, target, home, on_step)
    else:
        draft = resolve(chosen.draft, home, on_step=on_step) if chosen.draft != "none" else None
    return Folders(target, draft, general_set(chosen.target))


def log_limit(settings: Settings) -> int | None:
    """Bytes of recorded generations before the oldest are purged (`store.max_mb`); None: no limit."""
    if settings.store.max_mb is not None:
        return settings.store.max_mb * 2**20 or None
    path = sqlite_path(settings.database_url)
    if path is None:
        return None
    folder = next(each for each in path.absolute().parents if each.is_dir())
    share = int(LOG_SHARE * shutil.disk_usage(folder).total)
    return min(max(share, LEAST_LOG_BYTES), MOST_LOG_BYTES)


def lifecycle_rules(settings: Settings, folders: Folders, who: Provenance) -> Rules:
    """What the lifecycle goes by: the settings, and what every training child of this pair gets."""
    spec: dict[str, object] = {
        "url": settings.database_url,
        "target": str(folders.target),
        "draft": str(folders.draft),
        "out": str(settings.adapters_dir),
        "general": str(folders.general) if folders.general else None,
        "cache": str(settings.home / TARGETS),
        "training": settings.training.model_dump(),
        "gate": settings.gate.model_dump(),
        "k": settings.engine.num_draft_tokens,
        "provenance": asdict(who),
    }
    return Rules(
        training=settings.training,
        gate=settings.gate,
        max_generations=settings.store.max_generations,
        adapters=settings.adapters_dir,
        spec=spec,
        max_days=settings.store.max_days,
        max_bytes=log_limit(settings),
        keep_adapters=settings.store.keep_adapters,
        targets=settings.home / TARGETS,
        practice=settings.home / PRACTICE,
    )
