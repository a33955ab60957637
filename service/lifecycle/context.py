"""What the training loop works with: rows, engine, child launcher, metrics and rules."""

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
    """max_generations, max_days, max_bytes: limits of the log (StoreSettings). adapters: root of the adapter folders.
    spec: the part of a job description that all jobs share (learning.spec). targets: folder of targets computed by
    children; None: no such folder. practice: the same for practice text."""

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
    """members: this process among those that share the database. who: the pair it serves or trains. machine: the kind
    of machine, which the engine's measured costs belong to. judge: decides about candidates, with the arguments of
    gate.judge. clock: replaces the time of this machine and of the database, in UTC, for simulated traffic. loans:
    serving memory that children borrow."""

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
        """A monotonic time in seconds for timing children: unaffected by clock changes and by sleep of the machine."""
        return self.clock().timestamp() if self.clock is not None else time.monotonic()

    def database_now(self) -> datetime:
        """The database's time, which rows are dated with."""
        return self.clock() if self.clock is not None else self.members.now()

    @property
    def trains(self) -> bool:
        """Whether this process executes training runs."""
        return self.rules.training.run_here and bool(self.who.draft)

    def active_adapter(self) -> int:
        """The adapter that the rows name as active; BARE_DRAFT for none."""
        ref = self.active_ref()
        return BARE_DRAFT if ref is None else ref.id

    def active_ref(self) -> AdapterRef | None:
        """The adapter that the rows name as active; None: the base draft serves."""
        return self.stores.adapters.active(self.who.target, self.who.draft)

    def adapter_folder(self, adapter: int) -> str | None:
        """An adapter's folder as named in a child's job; None: the base draft."""
        return None if adapter == BARE_DRAFT else str(self.stores.adapters.get(adapter).folder)

    def record_costs(self) -> None:
        """Records the round costs measured here, if any, for gates that decide in other processes."""
        base, twice = self.switching.round_seconds(), self.switching.round_seconds(2.0)
        if base and twice:
            more = tuple(b - a for a, b in zip(base, twice, strict=True))
            self.stores.costs.record(self.who, self.machine, RoundCosts(base, more))

    def measured_costs(self, lengths: int) -> Mapping[str, RoundCosts]:
        """Round costs by kind of machine, where they were measured within a day for `lengths` draft lengths; for this
        kind, the current ones. Servers with another maximum draft length measure other lengths."""
        self.record_costs()
        kinds = self.stores.costs.recent(self.who)
        return {name: costs for name, costs in kinds.items() if len(costs.seconds) == lengths}

    def own_costs(self, lengths: int) -> RoundCosts | None:
        """Round costs of this kind of machine, else of the most recently measured one; None if there are none."""
        kinds = self.measured_costs(lengths)
        return kinds.get(self.machine) or next(iter(kinds.values()), None)

    def launch(self, **job: object) -> Child:
        """Starts a child with the shared job description plus these entries. Raises OSError."""
        return Child(self.launcher.launch({**self.rules.spec, **job}), self.timer)

    def scoring_seconds(self, ref: AdapterRef) -> float:
        """Time limit for scoring a serving adapter: a quarter of its run's duration."""
        if ref.run is None:
            return 0.0
        run = self.stores.runs.get(ref.run)
        return 0.0 if run.finished_at is None else (run.finished_at - run.created_at).total_seconds() / 4

    def end_run(self, run_id: int, state: RunState, reason: str) -> None:
        """Ends a run without a verdict, unless it is over. Raises IllegalMove when another process owns it by now."""
        run = self.stores.runs.get(run_id)
        if not run.state.over:
            ended = self.stores.runs.move(run.id, run.fencing, state, error=reason)
            self.report_end(ended)
            log.warning("run %d %s: %s", run.id, state.value, ended.error)
        self.discard_candidates(reason)

    def give_up_orphans(self) -> None:
        """Removes processes that have died and ends their runs, for any pair."""
        self.members.remove_ended()
        for run in self.stores.runs.orphaned():
            reason = "its process died during the run"
            if (ended := self.stores.runs.give_up(run, reason)) is not None:
                self.report_end(ended)
                log.warning("run %d is lost: its process died", run.id)
            self.discard_candidates(reason)

    def report_end(self, run: TrainingRun) -> None:
        """Reports the run's end and final state to `events`."""
        self.events.training(run)
        self.events.training_ended(run.state)

    def discard_candidates(self, reason: str) -> None:
        """Marks candidates whose run ended without a verdict as broken, so that they can never serve."""
        adapters, runs = self.stores.adapters, self.stores.runs
        for ref in adapters.all():
            if ref.state is AdapterState.CANDIDATE and (ref.run is None or runs.get(ref.run).state.over):
                adapters.mark_broken(ref.id, reason, candidate=True)
