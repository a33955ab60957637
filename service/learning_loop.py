"""A process's part in learning: its place among those that share the database, its supervisor, and what makes them tick."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from service.app import Folders, lifecycle_rules
from service.blas import set_blas_threads
from service.core import DraftSwitch, Forget, Outdated, Provenance, RedraftError, Selection, StoreError
from service.lifecycle.clock import Clock
from service.lifecycle.context import LifecycleContext
from service.lifecycle.launcher import ProcessLauncher
from service.lifecycle.loans import Loans
from service.lifecycle.practice_choice import PracticeChoice
from service.lifecycle.supervisor import Supervisor
from service.lifecycle.switching import Events, Switching
from service.settings import Settings
from service.store.processes.members import FOLLOW_SECONDS, RENEW_SECONDS, Members, Role
from service.store.stores import open_stores

log = logging.getLogger(__name__)

TRAINING_LOG = "training.log"
"""In the home folder: what training children write to stderr."""
ON_DISK = ("targets", "practice")
"""Of the places that forget texts, those in the home folder. What is there can be made anew."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process learns, once it knows: its models' folders, the pair, and the kind of machine."""

    folders: Folders
    who: Provenance
    machine: str


class LearningLoop:
    """Opens the database and joins those that share it. Raises StoreError, DatabaseTaken.

    on_fatal: what to do when another process owns the database (SQLite) and this one has to end; called with the reason.
    """

    def __init__(self, settings: Settings, role: Role, on_fatal: Callable[[str], None]) -> None:
        self._settings = settings
        self.stores = open_stores(settings, create=True)
        self._role = role
        self._members = Members(self.stores.database, role)
        try:
            self._members.join()
        except RedraftError:
            self.stores.close()
            raise
        self._on_fatal = on_fatal
        self.practice = PracticeChoice(settings.training, settings.home)
        self._supervisor: Supervisor | None = None
        self._forget: Mapping[str, Forget] = {}
        self._clocks: list[Clock] = []
        self._launcher = ProcessLauncher(
            settings.home / TRAINING_LOG, settings.training.threads, share=set_blas_threads
        )
        # Not the supervisor's clock: loading models and long ticks must not let the lease run out.
        self._heartbeat = Clock(self._renew, RENEW_SECONDS)
        self._heartbeat.start()

    def start(
        self,
        place: Place,
        engine: DraftSwitch,
        events: Events,
        *,
        busy: Callable[[], bool] = lambda: False,
        idle_seconds: Callable[[], float] = lambda: math.inf,
        forget: Mapping[str, Forget],
        loans: Loans | None = None,
    ) -> Supervisor:
        """Serve the adapter that the database says is active, and begin to tick. busy, idle_seconds, forget: as Supervisor has
        them. loans: memory of the engine's that children borrow."""
        settings, stores = self._settings, self.stores
        context = LifecycleContext(
            stores=stores,
            members=self._members,
            switching=Switching(engine, stores.adapters, place.who, events, shared=self._members.shared),
            launcher=self._launcher,
            events=events,
            rules=lifecycle_rules(settings, place.folders, place.who),
            who=place.who,
            machine=place.machine,
            loans=loans or Loans(),
        )
        self._forget = forget = {**forget, "waiting_child": lambda selection: self._launcher.end_ready()}
        supervisor = Supervisor(context, practice=self.practice, busy=busy, idle_seconds=idle_seconds, forget=forget)
        if self._members.shared:
            # Others may have erased texts while this process was down, and which is not known.
            for name in ON_DISK:
                forget[name](Selection(everything=True))
        supervisor.start()
        self._clocks = [
            Clock(supervisor.tick, settings.training.tick_seconds),
            Clock(supervisor.follow, FOLLOW_SECONDS),
        ]
        for clock in self._clocks:
            clock.start()
        self._supervisor = supervisor
        return supervisor

    def stop(self) -> None:
        """No tick any more, and end a child under way. Idempotent."""
        for clock in self._clocks:
            clock.stop()
        if self._supervisor is not None:
            self._supervisor.stop()
        self._launcher.end_ready()

    def close(self) -> None:
        """Leave those that share the database, and close it; what is queued is written."""
        self._heartbeat.stop()
        with suppress(StoreError):
            self._members.leave()
        self.stores.close()

    def _renew(self) -> None:
        try:
            if self._members.renew():
                return
        except Outdated as error:
            if self._role is Role.TRAINER:
                self._on_fatal(str(error))
                return
            log.critical("%s. Nothing is recorded or trained any more; requests are served on", error)
            self._heartbeat.stop(wait=False)
            self.stop()
            # It is a member no more, and hears of no erasure.
            for forget in self._forget.values():
                forget(Selection(everything=True))
            return
        if not self._members.shared:
            self._on_fatal("another server has taken over the database")
        elif self._supervisor is not None:
            self._supervisor.rejoin()
        else:
            self._members.join()
