"""Runs and adapters under random sequences of operations and crashes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import select

from service.core import (
    ADAPTER_MOVES,
    RUN_MOVES,
    AdapterRef,
    AdapterState,
    IllegalMove,
    Provenance,
    RunState,
    TrainingRun,
    Trigger,
)
from service.store.database import Database, integrity
from service.store.log.generations import Generations
from service.store.log.run_texts import Role
from service.store.log.training_texts import TrainingTexts
from service.store.registry.adapters import Adapters
from service.store.registry.runs import Runs
from service.store.tables import adapters, evaluations, generations, metadata, run_texts, training_runs
from tests.support.databases import BY_NIGHT, Databases
from tests.support.store_rows import ADAPTERS, LOST, WHO, WON, case, generation

T = TypeVar("T")

PAIRS = [WHO, replace(WHO, draft="e" * 64), replace(WHO, target="e" * 64)]
WHICH = st.integers(0, 2)
VERDICTS = {RunState.PROMOTED, RunState.REJECTED}
FENCING = st.sampled_from([0, 0, 0, 0, -1, 1])
"""Added to a run's fencing token: mostly zero."""


class Machine(RuleBasedStateMachine):
    databases: Databases
    runs_made, adapters_made = Bundle("runs_made"), Bundle("adapters_made")

    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.url = self.databases.empty(self.folder)
        self.database = Database(self.url)
        self.tokens: dict[int, int] = {}
        self.pairs: dict[int, Provenance] = {}
        self.owner: dict[int, int] = {}
        self.chosen: set[int] = set()
        self.lost = set[int]()
        """Runs whose adapter was rolled back."""
        self.run_states: dict[int, RunState] = {}
        self.adapter_states: dict[int, AdapterState] = {}

    def teardown(self) -> None:
        if hasattr(self, "database"):
            assert integrity(self.database) == "ok"
            self.database.close()
            self.databases.give_back(self.url)
            shutil.rmtree(self.folder)

    # ------------------------------------------------------------------------------------------------ what happens

    @rule(shapes=st.lists(st.lists(st.booleans(), max_size=3), min_size=1, max_size=3), pair=WHICH)
    def record(self, shapes: list[list[bool]], pair: int) -> None:
        cases = [[case(i, tie=tie) for i, tie in enumerate(ties)] for ties in shapes]
        made = [generation(cases=each, who=PAIRS[pair]) for each in cases]
        assert Generations(self.database).add(made).result(60) == len(made)

    @rule(target=runs_made, limit=st.integers(1, 3), pair=WHICH, key=st.sampled_from([None, "x", "y"]))
    def claim(self, limit: int, pair: int, key: str | None) -> Any:
        runs, texts = Runs(self.database), TrainingTexts(self.database)
        known = runs.by_key(key) if key else None
        open_now, waiting = runs.current(PAIRS[pair]), texts.untrained(PAIRS[pair]).generations
        search = runs.crash_search(PAIRS[pair])
        parent = self.active(PAIRS[pair])
        run = runs.claim(
            trigger=Trigger.CASES,
            who=PAIRS[pair],
            parent=parent.id if parent else 0,
            limit=limit,
            idempotency_key=key,
        )
        if known is not None:
            assert run == known
            return multiple()
        if open_now is not None or (waiting == 0 and not search.probe):
            assert run is None
            return multiple()
        assert run is not None
        had = len(texts.claimed(run.id)) + len(texts.claimed_again(run.id))
        assert run.generations == had == min(limit, len(search.probe) or had)
        assert search.open or had == min(limit, waiting)
        assert run.fencing > max(self.tokens.values(), default=0)
        self.tokens[run.id], self.pairs[run.id] = run.fencing, PAIRS[pair]
        return run.id

    @rule(run=runs_made, offset=FENCING, state=st.sampled_from(RunState))
    def move(self, run: int, offset: int, state: RunState) -> None:
        legal = offset == 0 and state in RUN_MOVES[self.run_states[run]] - VERDICTS
        self.attempt(legal, lambda: Runs(self.database).move(run, self.tokens[run] + offset, state))

    @rule(run=runs_made)
    def go_on(self, run: int) -> None:
        """The next step of a successful run, which is refused with a wrong fencing token."""
        steps = {
            RunState.CLAIMED: RunState.TRAINING,
            RunState.TRAINING: RunState.SCORING,
            RunState.SCORING: RunState.STAGING,
        }
        if (state := steps.get(self.run_states[run])) is not None:
            for offset in (-1, 1):
                self.attempt(
                    False, lambda offset=offset: Runs(self.database).move(run, self.tokens[run] + offset, state)
                )
            assert Runs(self.database).move(run, self.tokens[run], state).state is state

    @rule(target=adapters_made, run=runs_made, offset=FENCING)
    def train(self, run: int, offset: int) -> Any:
        legal = offset == 0 and not self.run_states[run].over
        made = self.attempt(
            legal,
            lambda: Adapters(self.database, ADAPTERS).add(
                run_id=run,
                fencing=self.tokens[run] + offset,
                folder=ADAPTERS / f"{len(self.owner)}",
                sha256="5" * 64,
                rank=8,
                scale=2.0,
                keys=["a"],
                draft=self.pairs[run].draft,
                parent=Runs(self.database).get(run).parent,
            ),
        )
        if made is None:
            return multiple()
        self.owner[made.id] = run
        return made.id

    @rule(run=runs_made, adapter=adapters_made, offset=FENCING)
    def promote(self, run: int, adapter: int, offset: int) -> None:
        state = self.adapter_states[adapter]
        legal = (
            offset == 0
            and RunState.PROMOTED in RUN_MOVES[self.run_states[run]]
            and self.owner[adapter] == run
            # The active adapter is retired first, and may be the chosen one itself.
            and (state is AdapterState.ACTIVE or AdapterState.ACTIVE in ADAPTER_MOVES[state])
            and Runs(self.database).get(run).parent == self.serving(self.pairs[run])
        )
        done = self.attempt(legal, lambda: Runs(self.database).promote(run, self.tokens[run] + offset, adapter, WON))
        if done is not None:
            active = self.active(self.pairs[run])
            assert active is not None
            assert (active.id, done.adapter, done.state) == (adapter, adapter, RunState.PROMOTED)

    @rule(run=runs_made, adapter=adapters_made, offset=FENCING, none=st.booleans())
    def reject(self, run: int, adapter: int, offset: int, none: bool) -> None:
        legal = (
            offset == 0
            and RunState.REJECTED in RUN_MOVES[self.run_states[run]]
            and (none or self.owner[adapter] == run)
            and (none or AdapterState.REJECTED in ADAPTER_MOVES[self.adapter_states[adapter]])
        )
        judged = None if none else adapter
        self.attempt(legal, lambda: Runs(self.database).reject(run, self.tokens[run] + offset, judged, LOST))

    @rule(adapter=adapters_made, pair=WHICH)
    def activate(self, adapter: int, pair: int) -> None:
        state, who, mine = self.adapter_states[adapter], PAIRS[pair], self.pairs[self.owner[adapter]] == PAIRS[pair]
        legal = mine and (state is AdapterState.ACTIVE or AdapterState.ACTIVE in ADAPTER_MOVES[state])
        store = Adapters(self.database, ADAPTERS)
        if self.attempt(legal, lambda: store.activate(adapter, who.target, who.draft)) is not None:
            self.chosen.add(adapter)

    @rule(pair=WHICH)
    def serve_bare(self, pair: int) -> None:
        who = PAIRS[pair]
        assert Adapters(self.database, ADAPTERS).activate(0, who.target, who.draft) is None
        assert self.active(who) is None

    @rule(adapter=adapters_made)
    def roll_back(self, adapter: int) -> None:
        store = Adapters(self.database, ADAPTERS)
        legal = self.adapter_states[adapter] is AdapterState.ACTIVE
        wanted, ancestor = None, store.get(adapter).parent
        while wanted is None and ancestor:
            wanted = ancestor if self.adapter_states[ancestor] is AdapterState.RETIRED else None
            ancestor = store.get(ancestor).parent
        back = self.attempt(legal, lambda: store.roll_back(adapter, store.get(adapter).parent, LOST))
        if legal:
            self.lost.add(self.owner[adapter])
            assert (back.id if back else None) == wanted
            assert self.active(self.pairs[self.owner[adapter]]) == back
            assert store.get(adapter).state is AdapterState.ROLLED_BACK

    @rule(target=adapters_made, pair=WHICH, wins=st.sampled_from([True, True, False]))
    def whole_run(self, pair: int, wins: bool) -> Any:
        """A whole run from claim to verdict, so that adapters often have ancestors."""
        self.record([[False]], pair)
        run = self.claim(limit=1, pair=pair, key=None)
        if not isinstance(run, int):
            return multiple()
        for _ in range(3):
            self.all_is_legal()
            self.go_on(run)
        self.all_is_legal()
        adapter = self.train(run, 0)
        self.all_is_legal()
        if wins:
            self.promote(run, adapter, 0)
        else:
            self.reject(run, adapter, 0, False)
        return adapter

    @rule(limit=st.integers(1, 3))
    def crash_again_and_again(self, limit: int) -> None:
        for _ in range(5):
            run = self.claim(limit=limit, pair=0, key=None)
            if isinstance(run, int):
                Runs(self.database).move(run, self.tokens[run], RunState.CRASHED)
                self.all_is_legal()

    @rule(adapter=consumes(adapters_made))
    def breaks(self, adapter: int) -> None:
        legal = AdapterState.BROKEN in ADAPTER_MOVES[self.adapter_states[adapter]]
        self.attempt(legal, lambda: Adapters(self.database, ADAPTERS).mark_broken(adapter, "cannot be read"))

    @rule()
    def reopen(self) -> None:
        before = self.rows()
        self.database.close()
        self.database = Database(self.url)
        assert self.rows() == before

    # ----------------------------------------------------------------------------------------- what holds throughout

    @invariant()
    def all_is_legal(self) -> None:
        if not hasattr(self, "database"):
            return
        with self.database.read() as connection:
            runs = connection.execute(select(training_runs)).all()
            refs = connection.execute(select(adapters)).all()
            texts = connection.execute(select(generations)).all()
            had = connection.execute(select(run_texts)).all()
            gated = {
                row.adapter
                for row in connection.execute(select(evaluations).where(evaluations.c.kind == "gate"))
                if '"promoted": true' in row.verdict
            }
        states, drafts = ({row.id: getattr(row, name) for row in runs} for name in ("state", "draft"))
        pairs = {row.id: (row.target, row.draft) for row in runs}
        open_runs = {row.id for row in runs if not RunState(row.state).over}
        assert len({pairs[run] for run in open_runs}) == len(open_runs), "one a pair"
        assert all((row.finished_at is not None) == RunState(row.state).over for row in runs)
        active = [row for row in refs if row.state == AdapterState.ACTIVE]
        assert len({(row.target, row.draft) for row in active}) == len(active)
        assert all((row.target, row.draft) == pairs[row.run] for row in refs)
        assert {row.id for row in active} <= gated | self.chosen
        for text in texts:
            new = [row.run for row in had if row.seq == text.seq and row.role == Role.NEW]
            stands = [run for run in new if not RunState(states[run]).gives_texts_back]
            assert len({drafts[run] for run in stands}) == len(stands), "a draft has a text once"
            by_crash = text.quarantined_run is not None and states[text.quarantined_run] == RunState.CRASHED
            assert by_crash or (text.quarantined_run is not None) == bool(self.lost & set(stands))
            if by_crash:
                alone = [row.seq for row in had if row.run == text.quarantined_run]
                assert alone == [text.seq], "it crashed a run by itself"
        self.follow(self.run_states, RUN_MOVES, {row.id: RunState(row.state) for row in runs})
        self.follow(self.adapter_states, ADAPTER_MOVES, {row.id: AdapterState(row.state) for row in refs})

    @staticmethod
    def follow(before: dict[int, T], moves: Any, after: dict[int, T]) -> None:
        for name, state in after.items():
            assert name not in before or state == before[name] or state in moves[before[name]]
        before.update(after)

    def active(self, who: Provenance) -> AdapterRef | None:
        return Adapters(self.database, ADAPTERS).active(who.target, who.draft)

    def serving(self, who: Provenance) -> int:
        active = self.active(who)
        return active.id if active else 0

    def attempt(self, legal: bool, act: Callable[[], T]) -> T | None:
        """Legal moves succeed; illegal ones are refused and change nothing."""
        before = self.rows()
        try:
            done = act()
        except IllegalMove:
            assert not legal
            assert self.rows() == before
            return None
        assert legal
        if isinstance(done, TrainingRun):
            assert len(TrainingTexts(self.database).claimed(done.id)) == done.generations
        return done

    def rows(self) -> dict[str, list[Any]]:
        with self.database.read() as connection:
            return {table.name: list(connection.execute(select(table))) for table in metadata.sorted_tables}


@BY_NIGHT
@pytest.mark.parametrize("examples", [6, pytest.param(100, marks=pytest.mark.nightly)])
@pytest.mark.promise(8)
def test_any_order_of_events_keeps_runs_and_adapters_legal(databases: Databases, examples: int) -> None:
    class Here(Machine):
        pass

    Here.databases = databases
    if databases.kind == "postgres":  # four times as long
        examples //= 3
    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
