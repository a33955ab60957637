"""Loads an adapter named by a row into the engine, and falls back to an ancestor when it cannot be loaded."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from service.core import (
    BARE_DRAFT,
    AdapterRef,
    AdapterRefused,
    DraftSwitch,
    MeasuredGain,
    Provenance,
    RunState,
    Staged,
    TrainingRun,
    Unavailable,
)
from service.store.registry.adapters import Adapters

log = logging.getLogger(__name__)

STAGE_SECONDS = 120.0
"""Longest wait for the engine to load or switch a draft between rounds."""


class Events(Protocol):
    """Events that the training loop reports to the metrics."""

    def training(self, run: TrainingRun) -> None:
        """A run's state, progress or pause has changed."""
        ...

    def training_ended(self, state: RunState) -> None:
        """A run has ended in this state."""
        ...

    def promoted(self) -> None:
        """A candidate has passed the gate and is active."""
        ...

    def rolled_back(self) -> None:
        """The active adapter was rolled back, by the watch or by an operator."""
        ...

    def gain(self, measured: MeasuredGain | None) -> None:
        """The measured gain of the serving adapter over the base draft; None: unknown."""
        ...

    def swapped(self, seconds: float) -> None:
        """The engine has switched drafts. seconds: from the start of staging to the end of the switch."""
        ...

    def serving(self, ref: AdapterRef | None) -> None:
        """This adapter now drafts; None: the base draft."""
        ...


class Switching:
    """Stages an adapter, then switches to it. who: the served pair. shared: other servers use the same adapter folders,
    so a missing folder may be missing only here."""

    def __init__(
        self, engine: DraftSwitch, adapters: Adapters, who: Provenance, events: Events, *, shared: bool = False
    ) -> None:
        self._engine = engine
        self._adapters = adapters
        self._who = who
        self._events = events
        self._shared = shared

    def stage(self, ref: AdapterRef | None) -> Staged:
        """Loads and checks the adapter without serving it. Raises AdapterRefused, Unavailable, TimeoutError."""
        if self._shared and ref is not None and not ref.folder.is_dir():
            raise Unavailable(
                f"adapter {ref.id}: {ref.folder} does not exist; store.adapters must be the same folder on every server"
            )
        return self._engine.stage(ref).result(STAGE_SECONDS)

    def switch(self, staged: Staged, ref: AdapterRef | None, started: float) -> None:
        """Serves the staged adapter. started: time.perf_counter() at the start of staging."""
        self._engine.switch(staged).result(STAGE_SECONDS)
        self._events.swapped(time.perf_counter() - started)
        self._events.serving(ref)

    def round_seconds(self, step: float = 1.0) -> tuple[float, ...] | None:
        """See core.DraftSwitch."""
        return self._engine.round_seconds(step)

    def behind(self) -> bool:
        """Whether the engine serves a different adapter than the active one."""
        ref = self._adapters.active(self._who.target, self._who.draft)
        return self._engine.active != (ref.id if ref else BARE_DRAFT)

    def serve_active(self) -> AdapterRef | None:
        """Makes the engine serve the active adapter. One that cannot be loaded is marked broken and replaced by its
        nearest usable ancestor, finally the base draft. Returns the adapter that serves."""
        while True:
            ref = self._adapters.active(self._who.target, self._who.draft)
            started = time.perf_counter()
            try:
                staged = self.stage(ref)
            except AdapterRefused as error:
                if ref is None:
                    raise
                log.error("adapter %d cannot be loaded: %s", ref.id, error)
                self._adapters.mark_broken(ref.id, str(error))
                continue
            if self._engine.active != (ref.id if ref else BARE_DRAFT):
                self.switch(staged, ref, started)
            else:
                self._events.serving(ref)
            return ref
