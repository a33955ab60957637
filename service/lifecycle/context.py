"""What the lifecycle works with: the rows, the engine, the launcher of children, the metrics, and the rules."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from service.core import (
    BARE_DRAFT,
    AdapterRef,
    AdapterState,
    Launcher,
    Provenance,
    RoundCosts,
    RunState,
    TrainingRun,
    Verdict,
)
from service.lifecycle import gate
from service.lifecycle.child import Child
from service.lifecycle.loans import Loans
from service.lifecycle.switching import Events, Switching
from service.settings import GateSettings, TrainingSettings
from service.store.processes.members import Members
from service.store.stores import Stores

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rules:
    """max_generations, max_days, max_bytes: what the log may hold (StoreSettings). adapters: root of the adapter folders. spec:
    the part of a child's job that is the same for every job (learning.spec). targets: folder of the targets that children
    computed; None: there is none. practice: the same of practice text."""

    training: TrainingSettings
    gate: GateSettings
    max_generations: int
    adapters: Path
    spec: Mapping[str, object]
    max_days: float | None = None
    keep_adapters: int = 3
    max_bytes: int | None = None
    targets: Path | None = None
    practice: Path | None = None


@dataclass(frozen=True, slots=True)
class LifecycleContext:
    """members: this process among those of the database. who: the pair that it serves or trains. machine: the kind of machine
    that this is, on which the engine's costs are measured. judge: decides about candidates, with the arguments of gate.judge.
    clock: replaces this machine's time and the database's, in UTC, for simulated traffic. loans: memory of serving that
    children borrow."""

    stores: Stores
    members: Members
    switching: Switching
    launcher: Launcher
    events: Events
    rules: Rules
    who: Provenance
    machine: str
    judge: Callable[..., Verdict] = gate.judge
    clock: Callable[[], datetime] | None = None
    loans: Loans = field(default_factory=Loans)

    def timer(self) -> float:
        """Seconds since some moment, by which children are timed: a clock that is set and a machine that sleeps add none."""
        return self.clock().timestamp() if self.clock is not None else time.monotonic()

    def database_now(self) -> datetime:
        """The database's time, by which rows are dated."""
        return self.clock() if self.clock is not None else self.members.now()

    @property
    def trains(self) -> bool:
        """Whether this process does training runs."""
        return self.rules.training.run_here and bool(self.who.draft)

    def active_adapter(self) -> int:
        """The adapter that is active by the rows; BARE_DRAFT for none."""
        ref = self.active_ref()
        return BARE_DRAFT if ref is None else ref.id

    def active_ref(self) -> AdapterRef | None:
        """The adapter that is active by the rows; None: the bare draft serves."""
        return self.stores.adapters.active(self.who.target, self.who.draft)

    def adapter_folder(self, adapter: int) -> str | None:
        """An adapter's folder as a child's job names it; None: the bare draft."""
        return None if adapter == BARE_DRAFT else str(self.stores.adapters.get(adapter).folder)

    def record_costs(self) -> None:
        """Record what rounds cost here, where that was measured, for gates that decide elsewhere."""
        base, twice = self.switching.round_seconds(), self.switching.round_seconds(2.0)
        if base and twice:
            more = tuple(b - a for a, b in zip(base, twice, strict=True))
            self.stores.costs.record(self.who, self.machine, RoundCosts(base, more))

    def measured_costs(self, lengths: int) -> Mapping[str, RoundCosts]:
        """What rounds cost, by kind of machine where that was measured within a day for so many draft lengths: this one's as of
        now. Servers that draft at most another number of tokens measure other lengths."""
        self.record_costs()
        kinds = self.stores.costs.recent(self.who)
        return {name: costs for name, costs in kinds.items() if len(costs.seconds) == lengths}

    def own_costs(self, lengths: int) -> RoundCosts | None:
        """The same on this kind of machine, or on the one where it was measured last; None: on none."""
        kinds = self.measured_costs(lengths)
        return kinds.get(self.machine) or next(iter(kinds.values()), None)

    def launch(self, **job: object) -> Child:
        """Start a child on the common job description and this. Raises OSError."""
        return Child(self.launcher.launch({**self.rules.spec, **job}), self.timer)

    def scoring_seconds(self, ref: AdapterRef) -> float:
        """How long scoring an adapter that serves may take: a quarter of what its run took."""
        if ref.run is None:
            return 0.0
        run = self.stores.runs.get(ref.run)
        return 0.0 if run.finished_at is None else (run.finished_at - run.created_at).total_seconds() / 4

    def end_run(self, run_id: int, state: RunState, reason: str) -> None:
        """End a run without a verdict, unless it is over. Raises IllegalMove when it is another process's by now."""
        run = self.stores.runs.get(run_id)
        if not run.state.over:
            ended = self.stores.runs.move(run.id, run.fencing, state, error=reason)
            self.report_end(ended)
            log.warning("run %d %s: %s", run.id, state.value, ended.error)
        self.discard_candidates(reason)

    def give_up_orphans(self) -> None:
        """Give up processes that have ended, and end their runs, of whatever pair."""
        self.members.remove_ended()
        for run in self.stores.runs.orphaned():
            reason = "its process ended while it ran"
            if (ended := self.stores.runs.give_up(run, reason)) is not None:
                self.report_end(ended)
                log.warning("run %d is given up: its process has ended", run.id)
            self.discard_candidates(reason)

    def report_end(self, run: TrainingRun) -> None:
        """Report to `events` that this run is over, with its last state."""
        self.events.training(run)
        self.events.training_ended(run.state)

    def discard_candidates(self, reason: str) -> None:
        """Mark candidates broken whose run ended without a verdict: they can never serve."""
        adapters, runs = self.stores.adapters, self.stores.runs
        for ref in adapters.all():
            if ref.state is AdapterState.CANDIDATE and (ref.run is None or runs.get(ref.run).state.over):
                adapters.mark_broken(ref.id, reason, candidate=True)
