"""Builds every part once, starts and stops them in order."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from service.core import BARE_DRAFT, StoreError
from service.settings import Settings
from service.store.adapters import Adapters
from service.store.database import Database, upgrade
from service.store.generations import Generations
from service.store.replay import Replay
from service.store.runs import Runs

log = logging.getLogger(__name__)

FATAL_EXIT = 70
"""Exit status after the engine died or hung (EX_SOFTWARE): whoever supervises this process starts it again."""


@dataclass(frozen=True, slots=True)
class Stores:
    """The database and what reads it: all that commands without a model need."""

    database: Database
    generations: Generations
    runs: Runs
    adapters: Adapters
    replay: Replay

    def close(self) -> None:
        self.database.close()


def open_stores(settings: Settings, *, create: bool = False) -> Stores:
    """Open the database of these settings; create: set it up, or bring it up to date, first. Raises StoreError."""
    if create:
        upgrade(settings.database_url)
    database = Database(settings.database_url)
    return Stores(database, Generations(database), Runs(database), Adapters(database), Replay(database))


@dataclass(frozen=True, slots=True)
class Folders:
    """Where the pair's models are."""

    target: Path
    draft: Path | None
    general: Path | None


def resolve_models(settings: Settings, on_step: Callable[[str], None] = log.info) -> Folders:
    """Find or make the folders of the pair. The first time this uses MLX on the calling thread. Raises ModelError."""
    from service.models.catalog import default_draft, general_set, resolve

    chosen = settings.models
    target = resolve(chosen.target, settings.home, revision=chosen.revision, on_step=on_step)
    name = chosen.draft or default_draft(chosen.target)
    draft = resolve(name, settings.home, on_step=on_step) if name and name != "none" else None
    return Folders(target, draft, general_set(chosen.target))


class Application:
    """The server's parts, from the database to the HTTP application. `start` raises what makes serving impossible."""

    def __init__(self, settings: Settings) -> None:
        from service.engine.worker import Engine, Worker
        from service.lifecycle.clock import Clock
        from service.lifecycle.recorder import Recorder
        from service.metrics import Metrics

        self.settings = settings
        self.fatal: str | None = None
        self.on_fatal: Callable[[str], None] = lambda reason: None
        self.stores = open_stores(settings, create=True)
        self.metrics = Metrics(settings.engine.num_draft_tokens)
        self.recorder = Recorder(self.stores.generations, on_drop=self.metrics.recorder_dropped)
        self._engine: Engine | None = None
        self._folders: Folders | None = None
        self.worker = Worker(
            self._build,
            max_rows=settings.engine.max_rows,
            max_waiting=settings.engine.max_waiting,
            recorder=self.recorder,
            observer=self.metrics,
            hang_seconds=settings.engine.hang_seconds,
            on_fatal=self._failed,
        )
        self.metrics.watch_engine(self.worker.status)
        self.clock: Clock | None = None

    def _build(self) -> object:
        """On the engine's thread: models are found, converted, loaded and looked at there."""
        from service.engine.decoder import Decoder
        from service.engine.draft import bare
        from service.engine.probe import check_rows
        from service.engine.worker import Engine
        from service.models.pair import load_pair

        settings = self.settings
        self._folders = resolve_models(settings)
        pair = load_pair(self._folders.target, self._folders.draft)
        check_rows(pair.target.model, "target")
        if pair.draft is not None:
            check_rows(pair.draft.model, "draft")
        base = bare(pair.draft.model) if pair.draft is not None else None
        decoder = Decoder(
            pair.target.model,
            base,
            vocabulary=pair.vocabulary,
            k=settings.engine.num_draft_tokens if base is not None else 0,
            prefill_chunk=settings.engine.prefill_chunk,
            tie_margin=settings.engine.tie_margin,
            collect=settings.store.record,
        )
        self._pair = pair
        self._engine = Engine(
            decoder=decoder,
            base=base,
            eos=pair.eos,
            context=min(settings.engine.max_context, pair.target.context or settings.engine.max_context),
            provenance=pair.provenance,
            detokenizer=lambda: pair.target.tokenizer.detokenizer,
        )
        return self._engine
