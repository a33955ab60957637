"""Whatever happens in whatever order, with restarts in between, the rows stay legal."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import text
from stored import LOST, WHO, WON, case, copy_of, generation

from service.core import ADAPTER_MOVES, RUN_MOVES, AdapterState, IllegalMove, RunState, Trigger
from service.store.adapters import Adapters
from service.store.database import Database, integrity
from service.store.generations import Generations
from service.store.runs import MAX_CRASHES, Runs


class Lifecycle(RuleBasedStateMachine):
    template: Path

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="redraft-"))
        self.database = Database(copy_of(self.template, self.folder / "redraft.db"))
        self.trained: dict[int, int] = {}
        self.runs_seen: dict[int, RunState] = {}
        self.adapters_seen: dict[int, AdapterState] = {}
        self.names = itertools.count()
        self.fencing = 0

    @property
    def runs(self) -> Runs:
        return Runs(self.database)

    @property
    def adapters(self) -> Adapters:
        return Adapters(self.database)

    @initialize()
    def traffic_before(self) -> None:
        self.traffic(2)

    @rule(count=st.integers(1, 3))
    def traffic(self, count: int) -> None:
        made = [generation(cases=[case(0), case(1, tie=True)]) for _ in range(count)]
        assert Generations(self.database).add(made).result() == count

    @rule(limit=st.integers(1, 3))
    def claim(self, limit: int) -> None:
        current, active = self.runs.current(), self.adapters.active(WHO.draft)
        open_cases = Generations(self.database).counts(WHO).cases
        run = self.runs.claim(trigger=Trigger.CASES, who=WHO, parent=active.id if active else 0, limit=limit)
        assert (run is None) == (current is not None or open_cases == 0)
        if run is not None:
            assert run.fencing > self.fencing
            self.fencing = run.fencing

    @precondition(lambda self: self.runs.current() is not None)
    @rule(state=st.sampled_from([s for s in RunState if s not in (RunState.PROMOTED, RunState.REJECTED)]))
    def move(self, state: RunState) -> None:
        run = self.runs.current()
        assert run is not None
        legal = state in RUN_MOVES[run.state]
        try:
            assert self.runs.move(run.id, run.fencing, state).state is state
            assert legal
        except IllegalMove:
            assert not legal
            assert self.runs.get(run.id) == run

    @precondition(lambda self: self.runs.current() is not None)
    @rule()
    def advance(self) -> None:
        """So that runs get far often enough."""
        run = self.runs.current()
        assert run is not None
        for state in (RunState.TRAINING, RunState.SCORING, RunState.STAGING):
            if state in RUN_MOVES[run.state]:
                run = self.runs.move(run.id, run.fencing, state)

    @precondition(lambda self: self.runs.current() is not None)
    @rule()
    def crash(self) -> None:
        run = self.runs.current()
        assert run is not None
        self.runs.move(run.id, run.fencing, RunState.CRASHED, error="gone")

    @precondition(lambda self: (run := self.runs.current()) is not None and run.adapter is None)
    @rule()
    def offer_candidate(self) -> None:
        run = self.runs.current()
        assert run is not None
        self.adapters.add(
            run_id=run.id,
            fencing=run.fencing,
            folder=Path(f"/adapters/{next(self.names)}"),
            sha256="5" * 64,
            rank=8,
            scale=2.0,
            keys=["a"],
            draft=WHO.draft,
            parent=run.parent,
        )

    @precondition(lambda self: self.runs.current() is None)
    @rule(wins=st.sampled_from([True, True, False]))
    def whole_run(self, wins: bool) -> None:
        """From the claim to the verdict, so that adapters have ancestors."""
        self.traffic(1)
        self.claim(1)
        self.advance()
        self.offer_candidate()
        self.judge(wins, False)

    @precondition(lambda self: (run := self.runs.current()) is not None and run.adapter is not None)
    @rule(wins=st.booleans(), stale=st.booleans())
    def judge(self, wins: bool, stale: bool) -> None:
        run = self.runs.current()
        assert run is not None
        assert run.adapter is not None
        aim = RunState.PROMOTED if wins else RunState.REJECTED
        legal = aim in RUN_MOVES[run.state] and not stale
        act, verdict = (self.runs.promote, WON) if wins else (self.runs.reject, LOST)
        trained = Generations(self.database).stats().trained
        try:
            assert act(run.id, run.fencing - stale, run.adapter, verdict).state is aim
            assert legal
            assert Generations(self.database).stats().trained == trained + run.cases
        except IllegalMove:
            assert not legal
            assert self.runs.get(run.id) == run

    @precondition(lambda self: self.adapters.active(WHO.draft) is not None)
    @rule()
    def roll_back(self) -> None:
        active = self.adapters.active(WHO.draft)
        assert active is not None
        back = self.adapters.roll_back(active.id)
        assert back == self.adapters.active(WHO.draft)
        assert self.adapters.get(active.id).state is AdapterState.ROLLED_BACK
        if back is not None:
            assert back.id < active.id

    @rule(data=st.data())
    def activate(self, data: st.DataObject) -> None:
        refs = {0: None, **{ref.id: ref for ref in self.adapters.all()}}
        chosen = data.draw(st.sampled_from(sorted(refs)))
        ref, before = refs[chosen], self.adapters.active(WHO.draft)
        legal = ref is None or ref.state is AdapterState.ACTIVE or AdapterState.ACTIVE in ADAPTER_MOVES[ref.state]
        # A candidate becomes active by its run's promotion; the supervisor keeps operators from it.
        if ref is not None and ref.state is AdapterState.CANDIDATE:
            return
        try:
            assert self.adapters.activate(chosen, WHO.draft) == self.adapters.active(WHO.draft)
            assert legal
        except IllegalMove:
            assert not legal
            assert self.adapters.active(WHO.draft) == before

    @rule()
    def reopen(self) -> None:
        before = (self.runs.latest(100), self.adapters.all())
        self.database.close()
        self.database = Database(self.database.url)
        assert (self.runs.latest(100), self.adapters.all()) == before

    @invariant()
    def adapters_are_legal(self) -> None:
        refs = self.adapters.all()
        assert sum(ref.state is AdapterState.ACTIVE for ref in refs) <= 1
        for ref in refs:
            assert ref.state in reachable(self.adapters_seen.get(ref.id, AdapterState.CANDIDATE), ADAPTER_MOVES)
            self.adapters_seen[ref.id] = ref.state

    @invariant()
    def runs_and_cases_are_legal(self) -> None:
        runs = self.runs.latest(1000)
        assert sum(not run.state.over for run in runs) <= 1
        assert all((run.finished_at is not None) == run.state.over for run in runs)
        assert len({run.fencing for run in runs}) == len(runs)
        for run in runs:
            assert run.state in reachable(self.runs_seen.get(run.id, RunState.CLAIMED), RUN_MOVES)
            self.runs_seen[run.id] = run.state
        with self.database.read() as connection:
            rows = connection.execute(
                text("SELECT id, claimed_run, trained_run, crashes, quarantined FROM failure_cases")
            ).all()
        for row in rows:
            if row.trained_run is not None:
                assert self.trained.setdefault(row.id, row.trained_run) == row.trained_run, "trained twice"
                assert self.runs_seen[row.trained_run] in (RunState.PROMOTED, RunState.REJECTED, RunState.FAILED)
                assert row.claimed_run is None
            else:
                assert row.id not in self.trained, "forgotten that it was trained"
            if row.claimed_run is not None:
                assert not self.runs_seen[row.claimed_run].over
            assert bool(row.quarantined) == (row.crashes >= MAX_CRASHES)

    def teardown(self) -> None:
        assert integrity(self.database) == "ok"
        self.database.close()
        shutil.rmtree(self.folder)


def reachable(state, moves):  # pyright: ignore[reportUnknownParameterType, reportMissingParameterType]
    found, rest = {state}, [state]
    while rest:
        new = moves[rest.pop()] - found
        found |= new
        rest.extend(new)
    return found


@pytest.mark.timeout(120)
def test_the_rows_stay_legal_in_every_order(template: Path) -> None:
    machine = type("LifecycleFromTemplate", (Lifecycle,), {"template": template})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=40, deadline=None))
