"""What the lifecycle works with: the rows, the engine, whoever starts children, whoever counts, and the rules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from service.core import (
    BARE_DRAFT,
    AdapterState,
    Launcher,
    Provenance,
    RoundCosts,
    RunState,
    TrainingRun,
    Verdict,
)
from service.lifecycle.children import Child, Message
from service.lifecycle.switching import Events, Switching
from service.settings import GateSettings, TrainingSettings
from service.store.adapters import Adapters
from service.store.erasures import Erasures
from service.store.generations import Generations
from service.store.lineage import Lineage
from service.store.members import Members
from service.store.replay import Replay
from service.store.round_costs import MeasuredCosts
from service.store.runs import Runs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rules:
    """max_generations: what the log may hold. adapters: root of the adapter folders. spec: the part of a child's job
    that is the same for every job (learning.spec)."""

    training: TrainingSettings
    gate: GateSettings
    max_generations: int
    adapters: Path
    spec: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Parts:
    """members: this process among those of the database. who: the pair that it serves. now: this machine's time in UTC, for its
    children; what rows are dated by is members.now. judge: decides about candidates, with the arguments of gate.judge. machine:
    the kind of machine that this is, on which the engine's costs are measured."""

    members: Members
    runs: Runs
    adapters: Adapters
    lineage: Lineage
    generations: Generations
    replay: Replay
    costs: MeasuredCosts
    erasures: Erasures
    switching: Switching
    launcher: Launcher
    events: Events
    rules: Rules
    who: Provenance
    now: Callable[[], datetime]
    judge: Callable[..., Verdict]
    machine: str

    def serving(self) -> int:
        """The adapter that the rows say serves."""
        ref = self.adapters.active(self.who.draft)
        return BARE_DRAFT if ref is None else ref.id

    def folder(self, adapter: int) -> str | None:
        """An adapter's folder as a child is told it; None: the bare draft."""
        return None if adapter == BARE_DRAFT else str(self.adapters.get(adapter).folder)

    def record_costs(self) -> None:
        """Say what rounds cost here, where that was measured, for gates that decide elsewhere."""
        base, twice = self.switching.round_seconds(), self.switching.round_seconds(2.0)
        if base and twice:
            more = tuple(b - a for a, b in zip(base, twice, strict=True))
            self.costs.record(self.who, self.machine, RoundCosts(base, more))

    def measured_costs(self) -> Mapping[str, RoundCosts]:
        """What rounds cost, by kind of machine where that was measured within a day: this one's as of now."""
        self.record_costs()
        return self.costs.recent(self.who)

    def own_costs(self) -> RoundCosts | None:
        """What rounds cost on this kind of machine, or on the one where it was measured last; None: on none within a day."""
        kinds = self.measured_costs()
        return kinds.get(self.machine) or next(iter(kinds.values()), None)

    def launch(self, **what: object) -> Child:
        """Start a child on the common job description and this. Raises OSError."""
        return Child(self.launcher.launch({**self.rules.spec, **what}), self.now())

    def crash(self, run: TrainingRun, reason: str, *, give_back: bool = False) -> None:
        """The run came to nothing, and its texts are free. give_back: they cannot be to blame, it is as if it had never had
        them."""
        if not run.state.over:
            self.ended(self.runs.move(run.id, run.fencing, RunState.CRASHED, error=reason, give_back=give_back))
        self.discard(reason)

    def give_up(self, run: TrainingRun) -> None:
        """End a run whose process was given up."""
        reason = "its process ended while it ran"
        if (ended := self.runs.give_up(run, reason)) is not None:
            self.ended(ended)
            log.warning("run %d is given up: its process has ended", run.id)
        self.discard(reason)

    def ended(self, run: TrainingRun) -> None:
        """Report to `events` that this run is over, with its last state."""
        self.events.training(run)
        self.events.training_ended(run.state)

    def discard(self, reason: str) -> None:
        """Candidates whose run ended without a verdict on them can never serve."""
        for ref in self.adapters.all():
            if ref.state is AdapterState.CANDIDATE and (ref.run is None or self.runs.get(ref.run).state.over):
                self.adapters.broken(ref.id, reason)


class Job(Protocol):
    """A child at work and what its words mean."""

    @property
    def child(self) -> Child:
        """The child process of this job."""
        ...

    def pause(self, busy: bool, strain: str | None) -> None:
        """Pause while the machine cannot spare what it takes (`strain` says why), else go on. busy: requests wait; for that the
        supervisor pauses any child."""
        ...

    def heed(self, message: Message) -> None:
        """Act on the child's next message. May be called again with the same one after it raised."""
        ...

    def abandon(self, reason: str) -> None:
        """The child was ended from outside."""
        ...
