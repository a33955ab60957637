"""The real supervisor on a real database under random sequences of events. Engine and children are scripted and run in this
process, so that thousands of steps take seconds."""

import os
import random
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import select

from service.core import BARE_DRAFT, AdapterState, BadRequest, Conflict, RunState, Selection, Trigger
from service.lifecycle.context import LifecycleContext, Rules
from service.lifecycle.machine import Strain
from service.lifecycle.practice_choice import PracticeChoice
from service.lifecycle.supervisor import Supervisor
from service.lifecycle.switching import Switching
from service.models.fingerprint import folder_sha256
from service.settings import GateSettings, TrainingSettings
from service.store.database import integrity
from service.store.log.run_texts import Role
from service.store.processes.members import Members
from service.store.stores import Stores
from service.store.tables import (
    adapters,
    evaluations,
    failure_cases,
    generations,
    replay_buffer,
    run_texts,
    training_runs,
)
from tests.support.databases import Databases
from tests.support.failing_database import FailingDatabase, Killed
from tests.support.lifecycle_server import WHO, FakeEngine, RecordedEvents, generation, held_out_texts, undrafted

WATCH = 16
CALLS = {"better": 0.8, "same": 1.0, "worse": 1.25}
"""Calls of the scored adapter, relative to those of the adapters it is compared with."""
LENGTHS = (1.4, 1.2, 1.0)
"""Calls by draft length, relative to those at the longest."""


class ScriptedJob:
    """core.JobHandle without a process, which sends scripted messages."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.spec = spec
        self.pid = os.getpid()
        self.messages: deque[Mapping[str, object]] = deque()
        self.code: int | None = None

    def poll(self) -> list[Mapping[str, object]]:
        return [self.messages.popleft() for _ in range(len(self.messages))]

    def exit_code(self) -> int | None:
        return self.code

    def pause(self, paused: bool) -> None:
        pass

    def stop(self, grace_seconds: float) -> None:
        self.code = -9 if self.code is None else self.code

    def send(self, kind: str, **message: object) -> None:
        self.messages.append({"type": kind, **message})

    def finish(self, quality: str) -> None:
        """Send everything that a successful child sends, and exit."""
        share = CALLS[quality]
        if self.spec["kind"] == "score":
            newest = max(self.spec["adapters"], key=int)
            names = self.spec["generations"]
            found = {name: _scores(names, share if name == newest else 1.0) for name in self.spec["adapters"]}
        else:
            self.send("texts", window=[], replay=[])
            folder = Path(self.spec["out"]) / f"run-{self.spec['run']}-{self.spec['fencing']}"
            folder.mkdir(parents=True)
            (folder / "adapters.safetensors").write_text(quality)
            sha256 = folder_sha256(folder)
            self.send("candidate", folder=str(folder), sha256=sha256, rank=4, scale=2.0, keys=["q"])
            names = [f"held-out-{i}" for i in range(16)]
            found = {name: _scores(names, 1.0) for name in (str(self.spec["parent_id"]), str(BARE_DRAFT))}
            found["candidate"] = _scores(names, share)
        self.send("scores", scores=found)
        self.send("done")
        self.code = 0


def _scores(names: list[str], share: float) -> list[dict[str, object]]:
    return [
        {
            "generation": n,
            "domain": "a",
            "tokens": 40,
            "agreed": 20,
            "calls": [(20 + i % 3) * share * more for more in LENGTHS],
            "rounds": 0,
            "accepted": 0,
            "predicted": 0.0,
        }
        for i, n in enumerate(names)
    ]


class ScriptedLauncher:
    """core.Launcher for scripted jobs."""

    def __init__(self) -> None:
        self.started: list[ScriptedJob] = []

    def launch(self, spec: Mapping[str, object]) -> ScriptedJob:
        self.started.append(ScriptedJob(spec))
        return self.started[-1]


class Machine(RuleBasedStateMachine):
    databases: Databases
    happened: Counter[str]

    @initialize()
    def begin(self) -> None:
        self.home = Path(tempfile.mkdtemp())
        # The sampler draws by name: with seeded names a sequence of steps has the same outcome each time.
        self.names = random.Random(0)
        self.url = self.databases.empty(self.home)
        self.clock_offset = timedelta()
        self.strain: Strain | None = None
        self.busy = False
        self.back: set[int] = set()
        self.revoked: set[int] = set()
        self.states: dict[int, AdapterState] = {}
        self.runs_before = 0
        self.open()

    def name(self) -> str:
        return self.names.randbytes(8).hex()

    def open(self) -> None:
        self.db = FailingDatabase(self.url)
        self.members = Members(self.db)
        self.members.join()
        stores = Stores.of(self.db, self.home / "adapters")
        self.runs, self.adapters, self.generations = stores.runs, stores.adapters, stores.generations
        self.generations.add(held_out_texts()).result(60)
        self.engine, self.events = FakeEngine(), RecordedEvents()
        self.children = ScriptedLauncher()
        context = LifecycleContext(
            stores=stores,
            members=self.members,
            switching=Switching(self.engine, self.adapters, WHO, self.events),
            launcher=self.children,
            events=self.events,
            rules=Rules(
                TrainingSettings(min_cases=8, min_tokens=1, cooldown_seconds=60.0),
                GateSettings(
                    min_prompts=8, min_tokens=100, bootstrap=100, watch_generations=WATCH, backoff_seconds=0.0
                ),
                max_generations=10_000,
                adapters=self.home / "adapters",
                spec={"out": str(self.home / "adapters")},
            ),
            who=WHO,
            machine="a test's machine",
            clock=lambda: datetime.now(UTC) + self.clock_offset,
        )
        self.supervisor = Supervisor(
            context,
            practice=PracticeChoice(context.rules.training, self.home),
            busy=lambda: self.busy,
            strain=lambda: self.strain,
        )
        self.supervisor.start()
        assert self.runs.current(WHO) is None, "a start leaves no run open"

    def close(self, *, stopping: bool) -> None:
        if stopping:
            self.supervisor.stop()
        self.db.writes_left = None
        self.db.close()
        self.engine.close()

    def teardown(self) -> None:
        if not hasattr(self, "db"):
            return
        # Whatever is under way ends by itself.
        self.strain, self.busy = None, False
        for _ in range(4):
            if self.child is not None:
                self.child.finish("same")
            self.supervisor.tick()
        assert self.runs.current(WHO) is None or self.child is not None
        assert integrity(self.db) == "ok"
        self.close(stopping=True)
        self.databases.give_back(self.url)
        shutil.rmtree(self.home)

    @property
    def child(self) -> ScriptedJob | None:
        """The one at work."""
        working = [child for child in self.children.started if child.code is None]
        assert len(working) <= 1
        return working[0] if working else None

    # ------------------------------------------------------------------------------------------------ what happens

    @rule(count=st.integers(1, WATCH), cases=st.integers(0, 4))
    def traffic(self, count: int, cases: int) -> None:
        adapter = self.engine.active
        made = [generation(self.name(), cases=cases) for _ in range(count)]
        made = [replace(one, rounds=tuple(replace(r, adapter=adapter) for r in one.rounds)) for one in made]
        self.generations.add(made).result(60)

    @rule(count=st.integers(1, WATCH))
    def draft_rests(self, count: int) -> None:
        adapter = self.engine.active
        made = [undrafted(f"undrafted {self.name()}") for _ in range(count)]
        made = [replace(one, rounds=tuple(replace(r, adapter=adapter) for r in one.rounds)) for one in made]
        self.generations.add(made).result(60)

    @rule(times=st.integers(1, 4))
    def tick(self, times: int) -> None:
        for _ in range(times):
            self.supervisor.tick()
            self.legal()
        active = self.adapters.active(WHO.target, WHO.draft)
        assert self.engine.active == (active.id if active else BARE_DRAFT)

    @rule(quality=st.sampled_from(["better", "better", "same", "worse"]), ticks=st.integers(0, 3))
    def child_finishes(self, quality: str, ticks: int) -> None:
        if self.child is not None:
            self.child.finish(quality)
        for _ in range(ticks):
            self.supervisor.tick()
            self.legal()

    @rule(how=st.sampled_from(["progress", "give up", "garbage", "silent", "killed"]))
    def child_does_something_else(self, how: str) -> None:
        child = self.child
        if child is None:
            return
        match how:
            case "progress":
                child.send("progress", step=1, steps=4, loss=1.0)
            case "give up":
                child.send("failed", reason="too few examples")
                child.code = 0
            case "garbage":
                child.send("hello")
            case "silent":
                child.code = 0
            case _:
                child.code = -9
        self.supervisor.tick()

    @rule(costs=st.sampled_from([None, (1.0, 1.1, 1.2), (1.0, 2.0, 3.0)]))
    def costs_are_measured(self, costs: tuple[float, ...] | None) -> None:
        self.engine.costs = costs

    @rule(minutes=st.sampled_from([2, 120]))
    def time_passes(self, minutes: int) -> None:
        self.clock_offset += timedelta(minutes=minutes)

    @rule(strain=st.sampled_from([None, None, Strain.BATTERY, Strain.MEMORY]), busy=st.booleans())
    def surroundings_change(self, strain: Strain | None, busy: bool) -> None:
        self.strain, self.busy = strain, busy
        self.tick(2)  # the first may be the one that starts the child
        run = self.runs.current(WHO)
        if run is not None and self.child is not None:
            waits = strain if run.trigger is not Trigger.MANUAL else None
            assert run.progress.paused == (waits or ("serving is busy" if busy else None))

    @rule()
    def operator_asks_for_a_run(self) -> None:
        try:
            self.supervisor.request_training(None)
        except (Conflict, BadRequest):
            return
        self.happened["manual"] += 1

    @rule(data=st.data())
    def operator_chooses(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from([BARE_DRAFT, *(ref.id for ref in self.adapters.all())]))
        try:
            self.supervisor.activate(chosen)
        except Conflict:
            return
        self.back.discard(chosen)

    @rule()
    def operator_rolls_back(self) -> None:
        try:
            self.supervisor.rollback()
        except Conflict:
            return

    @rule(data=st.data(), retire=st.booleans())
    def operator_erases(self, data: st.DataObject, retire: bool) -> None:
        names = [one.id for one in self.generations.by_ids(self.generations.names_after(WHO, 0, 40))]
        chosen = (
            frozenset(data.draw(st.lists(st.sampled_from(names), unique=True, max_size=8))) if names else frozenset()
        )
        erased = self.supervisor.erase(Selection(ids=chosen), retire_adapters=retire)
        assert erased.generations == len(chosen)
        assert not self.generations.by_ids(list(chosen))
        marked = {ref.id for ref in self.adapters.all() if ref.erased_texts}
        assert set(erased.adapters) <= marked
        self.happened["marked"] += len(erased.adapters)
        self.tick(1)
        if retire:
            assert self.engine.active not in marked

    @rule(stopping=st.booleans())
    def restart(self, stopping: bool) -> None:
        self.close(stopping=stopping)
        self.open()

    @rule(writes=st.integers(1, 3), after=st.booleans(), quality=st.sampled_from(["better", "worse"]))
    def kill_in_the_middle_of_a_tick(self, writes: int, after: bool, quality: str) -> None:
        if self.child is not None:
            self.child.finish(quality)
        self.db.arm(writes, after=after)
        try:
            self.supervisor.tick()
        except Killed:
            self.happened["kill"] += 1
            self.restart(stopping=False)
        self.db.writes_left = None

    @rule(quality=st.sampled_from(["better", "same", "worse"]))
    def whole_circle(self, quality: str) -> None:
        """A whole cycle up to the end of the watch, so that adapters often have ancestors."""
        self.strain, self.busy = None, False
        self.clock_offset += timedelta(minutes=2)
        for cases, end in ((4, "better"), (0, quality), (0, quality)):
            self.traffic(WATCH // 2, cases)
            for _ in range(2):
                self.supervisor.tick()
                self.legal()
                if self.child is not None:
                    self.child.finish(end)
            self.supervisor.tick()
            self.legal()

    # ----------------------------------------------------------------------------------------- what holds throughout

    @invariant()
    def legal(self) -> None:
        if not hasattr(self, "db"):
            return
        with self.db.read() as connection:
            runs = connection.execute(select(training_runs).order_by(training_runs.c.id)).all()
            refs = connection.execute(select(adapters)).all()
            cases = connection.execute(select(failure_cases)).all()
            replayed = set(connection.execute(select(replay_buffer.c.seq)).scalars())
            judged = connection.execute(select(evaluations)).all()
            texts = connection.execute(select(generations)).all()
            had = connection.execute(select(run_texts).where(run_texts.c.role == Role.NEW)).all()
        under_way = [run for run in runs if not RunState(run.state).over]
        assert len(under_way) <= 1, "two runs under way"
        assert all((run.finished_at is not None) == RunState(run.state).over for run in runs)
        active = [ref for ref in refs if ref.state == AdapterState.ACTIVE]
        assert len({ref.draft for ref in active}) == len(active), "two adapters serve one draft"
        gated = {row.adapter for row in judged if row.kind == "gate" and '"promoted": true' in row.verdict}
        assert {ref.id for ref in active} <= gated, "an adapter serves without a passed gate"
        assert not {ref.id for ref in active} & self.back, "a rolled-back adapter was activated again by itself"
        revoked = {ref.id for ref in refs if ref.state == AdapterState.REVOKED}
        assert self.revoked <= revoked, "a revoked adapter is something else again"
        self.revoked = revoked
        self.back |= {ref.id for ref in refs if ref.state == AdapterState.ROLLED_BACK}
        states = {run.id: RunState(run.state) for run in runs}
        aside = {row.seq for row in texts if row.quarantined_run is not None}
        assert not aside & replayed, "a quarantined text is replayed"
        assert not aside & {row.seq for row in had if not states[row.run].over}, "a run has quarantined texts"
        stands = Counter(row.seq for row in had if not states[row.run].gives_texts_back)
        assert set(stands.values()) <= {1}, "two runs had a text as new"
        found = Counter(case.seq for case in cases if not case.tie)
        assert all(text.cases in {None, found[text.seq]} for text in texts), "texts do not have the cases that they say"
        undrafted_texts = [text for text in texts if text.id.startswith("undrafted")]
        assert all(text.cases is not None for text in texts if text not in undrafted_texts)
        assert not any(text.cases for text in undrafted_texts), "nobody drafted them"
        for ref in refs:
            if self.states.get(ref.id) != ref.state:
                self.happened[ref.state] += 1
            self.states[ref.id] = AdapterState(ref.state)
        for run in runs[self.runs_before :]:
            self.happened[run.trigger] += 1
        self.runs_before = len(runs)
        self.happened["quarantined"] += len(aside & stands.keys())


@pytest.mark.parametrize(("examples", "steps"), [(8, 30), pytest.param(300, 50, marks=pytest.mark.nightly)])
@pytest.mark.promise(8)
def test_any_order_of_events_keeps_the_lifecycle_legal(databases: Databases, examples: int, steps: int) -> None:
    class Here(Machine):
        pass

    Here.databases, Here.happened = databases, Counter()
    if databases.kind == "postgres" and examples > 100:  # three times as long
        examples //= 2
    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
    seen = {
        AdapterState.ACTIVE,
        AdapterState.REJECTED,
        AdapterState.ROLLED_BACK,
        Trigger.CASES,
        "kill",
        "quarantined",
        "marked",
    }
    if examples > 100:
        seen |= {AdapterState.RETIRED, Trigger.MANUAL}
    assert all(Here.happened[what] for what in seen), Here.happened
