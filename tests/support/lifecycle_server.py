"""A supervisor on a real database with real child processes; only the engine and the training are scripted."""

import itertools
import json
import math
import os
import signal
import time
import zlib
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from sqlalchemy import text

from service.core import (
    BARE_DRAFT,
    AdapterRef,
    AdapterRefused,
    AdapterState,
    FailureCase,
    FinishReason,
    Forget,
    Generation,
    MeasuredGain,
    Prompt,
    Provenance,
    Round,
    RunState,
    Sampling,
    Staged,
    Targets,
    TrainingRun,
    Unavailable,
)
from service.lifecycle.context import LifecycleContext, Rules
from service.lifecycle.launcher import Process, ProcessLauncher
from service.lifecycle.loans import Borrower, Loans, LoanSize
from service.lifecycle.machine import Strain
from service.lifecycle.practice_choice import PracticeChoice
from service.lifecycle.supervisor import Supervisor
from service.lifecycle.switching import Switching
from service.models.fingerprint import folder_sha256
from service.settings import GateSettings, TrainingSettings
from service.store.database import integrity
from service.store.log.generations import HELD_OUT, TRAIN, split_of
from service.store.processes.members import HostProcess, Members
from service.store.registry.adapters import EvaluationKind
from service.store.stores import Stores
from tests.support.databases import run_sql
from tests.support.failing_database import FailingDatabase

T = TypeVar("T")

WHO = Provenance("target", "tokenizer", "draft")
HERE = HostProcess.here()
_numbers = itertools.count()
LOANS = {
    Borrower.RUN: LoanSize(4000, 1000),
    Borrower.PRACTICE: LoanSize(3000, 3000),
    Borrower.COMPARISON: LoanSize(500, 500),
}
ENOUGH = 8
"""Generations that start a run, and that end a watch."""
HELD_OUT_TEXTS = 24
"""Held-out generations of an installation: enough to judge a run on after many refusals."""


def generation(
    name: str,
    *,
    cases: int = 3,
    tokens: int | None = None,
    store: bool = True,
    tie: bool = False,
    domain: str | None = "a",
    split: str = TRAIN,
) -> Generation:
    """One conversation of the training split, or of `split`, with four output tokens per case or `tokens` of them."""
    asked = (f"question {name} {i}" for i in itertools.count())
    tokens = tokens or 4 * max(cases, 1)
    return Generation(
        id=name,
        prompt=Prompt(
            # Of held-out texts each prompt counts once.
            (1, 2, 3) if split == TRAIN else (1, 2, zlib.crc32(name.encode())),
            Sampling(),
            domain="a",
            store=store,
            first_user=next(one for one in asked if split_of(one) == split),
        ),
        output=(*range(tokens - 1), zlib.crc32(name.encode())),
        finish=FinishReason.LENGTH,
        rounds=(Round(BARE_DRAFT, 0, 3, 1, 2),),
        cases=tuple(FailureCase(4 * i, 1, 2, 0.5, 0.5, 1.0, tie) for i in range(cases)),
        logprobs=(0.0,) * tokens,
        sampled_logprobs=(0.0,) * tokens,
        targets=None,
        provenance=WHO,
        created_at=datetime.now(UTC),
    )


def held_out_texts() -> list[Generation]:
    """Held-out generations, the same ones each time."""
    return [generation(f"held-out-{i}", cases=0, tokens=12, split=HELD_OUT) for i in range(HELD_OUT_TEXTS)]


def undrafted(name: str, *, tokens: int = 12) -> Generation:
    """Decoded while speculation was parked, with the target's distribution at every position."""
    made = generation(name, cases=tokens // 4)
    rounds = tuple(Round(BARE_DRAFT, at, 0, 0, 1) for at in range(tokens))
    targets = Targets(1, bytes(4 * tokens), bytes(2 * tokens), bytes(2 * tokens))
    return replace(made, rounds=rounds, cases=(), targets=targets)


@dataclass(frozen=True)
class Loaded:
    adapter: int


class FakeEngine:
    """core.DraftSwitch and core.MemoryLender on its own thread; it checks adapter folders as the real one does. dead: nothing
    can be staged or lent. costs: the measured seconds of a round."""

    def __init__(self) -> None:
        self.active = BARE_DRAFT
        self.dead = False
        self.switch_dead = False
        self.costs: tuple[float, ...] | None = None
        self.draft_step = 0.0
        """Seconds of one draft step, included in `costs`."""
        self.served: list[int] = []
        self.lendable = 2**40
        """Bytes that requests leave."""
        self.lent = 0
        self.loan_needed = False
        self._thread = ThreadPoolExecutor(1)

    def stage(self, ref: AdapterRef | None) -> Future[Staged]:
        def load() -> Staged:
            if self.dead:
                raise Unavailable("the engine is dead")
            if ref is not None and (not ref.folder.is_dir() or folder_sha256(ref.folder) != ref.sha256):
                raise AdapterRefused(f"adapter {ref.id}: its files are not the ones that were registered")
            return Loaded(ref.id if ref else BARE_DRAFT)

        return self._thread.submit(load)

    def switch(self, staged: Staged) -> Future[None]:
        def apply() -> None:
            if self.switch_dead:
                raise Unavailable("the engine is dead")
            self.active = staged.adapter
            self.served.append(staged.adapter)

        return self._thread.submit(apply)

    def lend(self, wanted: int, least: int) -> Future[int]:
        def lend() -> int:
            if self.dead:
                raise Unavailable("the engine is dead")
            self.lent = min(wanted, self.lendable) if self.lendable >= least else 0
            return self.lent

        return self._thread.submit(lend)

    def take_back(self) -> None:
        self.lent, self.loan_needed = 0, False

    def round_seconds(self, step: float = 1.0) -> tuple[float, ...] | None:
        if self.costs is None:
            return None
        return tuple(cost + k * self.draft_step * (step - 1.0) for k, cost in enumerate(self.costs, 1))

    def close(self) -> None:
        self._thread.shutdown()


class Launcher(ProcessLauncher):
    """The real launcher, which also records what it started."""

    def __init__(self, log: Path, command: tuple[str, ...]) -> None:
        super().__init__(log, command=command)
        self.started: list[Process] = []
        self.kinds: list[str] = []
        self.specs: list[Mapping[str, object]] = []
        self.missing = False

    def launch(self, spec: Mapping[str, object]) -> Process:
        if self.missing:
            raise FileNotFoundError("no such interpreter")
        process = super().launch(spec)
        self.started.append(process)
        self.kinds.append(str(spec["kind"]))
        self.specs.append(spec)
        return process


@dataclass
class RecordedEvents:
    """Records the events that the lifecycle reports to the metrics."""

    states: list[RunState] = field(default_factory=list[RunState])
    over: list[RunState] = field(default_factory=list[RunState])
    promotions: int = 0
    rollbacks: int = 0
    serving_now: int = BARE_DRAFT
    measured: MeasuredGain | None = None

    def training(self, run: TrainingRun) -> None:
        if not self.states or self.states[-1] is not run.state:
            self.states.append(run.state)

    def training_ended(self, state: RunState) -> None:
        self.over.append(state)

    def promoted(self) -> None:
        self.promotions += 1

    def rolled_back(self) -> None:
        self.rollbacks += 1

    def gain(self, measured: MeasuredGain | None) -> None:
        self.measured = measured

    def swapped(self, seconds: float) -> None:
        assert seconds >= 0

    def serving(self, ref: AdapterRef | None) -> None:
        self.serving_now = ref.id if ref else BARE_DRAFT


class Server:
    """One run of a server: a supervisor with its engine, on the installation's database."""

    def __init__(
        self, installation: "Installation", *, spec: Mapping[str, object] | None = None, **training: object
    ) -> None:
        self.installation = installation
        self.db = FailingDatabase(installation.url)
        root = installation.home / "adapters"
        self.stores = stores = Stores.of(self.db, root)
        self.generations, self.training_texts = stores.generations, stores.training_texts
        self.runs, self.adapters, self.replay, self.costs = stores.runs, stores.adapters, stores.replay, stores.costs
        # Processes of one machine each, but for SQLite, where each takes the place of the one before.
        machine = HERE.machine if self.db.kind == "SQLite" else f"machine {next(_numbers)}"
        self.members = Members(self.db, process=replace(HERE, machine=machine))
        self.members.join()
        self.engine, self.events = FakeEngine(), RecordedEvents()
        self.launcher = Launcher(
            installation.home / "child.log",
            (str(Path(__file__).with_name("scripted_child.py")), str(installation.plan)),
        )
        self.busy = False
        self.idle_seconds = math.inf
        self.strain: Strain | None = None
        self.user: str | None = None
        self.behind = installation.behind
        settings = {"min_cases": 3 * ENOUGH, "min_tokens": 10, "cooldown_seconds": 0.0, **training}
        context = LifecycleContext(
            stores=stores,
            members=self.members,
            switching=Switching(self.engine, self.adapters, installation.who, self.events),
            launcher=self.launcher,
            events=self.events,
            rules=Rules(
                TrainingSettings(**settings),  # pyright: ignore[reportArgumentType]
                GateSettings(
                    min_prompts=8,
                    min_tokens=100,
                    bootstrap=200,
                    watch_generations=installation.watch,
                    backoff_seconds=installation.backoff,
                ),
                max_generations=installation.keep,
                keep_adapters=installation.keep_adapters,
                max_days=installation.max_days,
                targets=installation.home / "targets",
                practice=installation.home / "practice",
                adapters=root,
                spec={"out": str(root), **(spec or {})},
            ),
            who=installation.who,
            machine="a test's machine",
            clock=None if self.behind else lambda: datetime.now(UTC) + installation.clock_offset,
            loans=Loans(self.engine, LOANS),
        )
        if installation.held_out:
            self.generations.add(held_out_texts()).result(60)
        self.supervisor = Supervisor(
            context,
            practice=PracticeChoice(context.rules.training, installation.home),
            busy=lambda: self.busy,
            idle_seconds=lambda: self.idle_seconds,
            strain=lambda: self.strain,
            user=lambda: self.user,
            forget=installation.forget,
        )

    def traffic(self, count: int = ENOUGH, *, cases: int = 3) -> None:
        """Add drafted generations; without cases they only feed a watch."""
        made = [generation(os.urandom(8).hex(), cases=cases) for _ in range(count)]
        self.generations.add([replace(one, created_at=one.created_at - self.behind) for one in made]).result(60)

    def undrafted_traffic(self, count: int = ENOUGH) -> None:
        """Add undrafted generations."""
        self.generations.add([undrafted(os.urandom(8).hex()) for _ in range(count)]).result(60)

    def tick_until(self, done: Callable[[], bool], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, f"not reached; runs: {self.runs.latest(3)}"
            self.supervisor.tick()
            time.sleep(0.01)

    def ended(self, state: RunState, count: int = 1) -> Callable[[], bool]:
        return lambda: [run.state for run in self.runs.latest(100)].count(state) == count

    def watched(self, adapter: int) -> Callable[[], bool]:
        return lambda: bool(self.adapters.evaluations(adapter, EvaluationKind.WATCH))

    def promote(self) -> AdapterRef:
        """Traffic, a run, its gate and the promotion, up to the start of the watch."""
        known = self.events.promotions
        self.traffic()
        self.tick_until(lambda: self.events.promotions > known)
        ref = self.adapters.active(WHO.target, WHO.draft)
        assert ref is not None
        return ref

    def kill(self) -> None:
        """As after kill -9: the child and the writer of the database end, and nothing is cleaned up. Others of its machine see
        that its process has ended."""
        for process in self.launcher.started:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.stop(1.0)
        self.db.writes_left = None
        self.db.close()
        self.engine.close()
        lapse(self.installation.url, self.members.token)

    def close(self) -> None:
        self.supervisor.stop()
        self.kill()


def lapse(url: str, token: str) -> None:
    """As if a process had not renewed its row for longer than its lease."""
    run_sql(url, f"UPDATE members SET renewed_at = '2026-01-01 00:00:00.000000' WHERE token = '{token}'")


class Installation:
    """What a server leaves to the next one: the home folder with its database, and the clock. behind: how much that of the
    machine of the next server is, of which it must not depend."""

    def __init__(self, home: Path, url: str) -> None:
        self.home, self.url = home, url
        self.plan = home / "plan.json"
        self.clock_offset = timedelta()
        self.who = WHO
        self.behind = timedelta()
        self.keep = 10_000
        self.keep_adapters = 3
        self.max_days: float | None = None
        self.watch, self.backoff = ENOUGH, 0.0
        self.forget: dict[str, Forget] = {}
        self.held_out = True
        """Whether the log begins with texts that runs can be judged on."""
        self.plan_children()

    def plan_children(self, train: str = "pass", score: str = "fair") -> None:
        """Set what the next children do, by the kind of their job."""
        self.plan.write_text(json.dumps({"train": train, "score": score}))

    @contextmanager
    def server(
        self, *, start: bool = True, spec: Mapping[str, object] | None = None, **training: object
    ) -> Generator[Server]:
        server = Server(self, spec=spec, **training)
        try:
            if start:
                server.supervisor.start()
            yield server
        finally:
            server.close()


def check_consistent(server: Server) -> None:
    """Check the invariants that hold after a start, and between ticks without a child."""
    with server.db.read() as connection:
        running = connection.execute(
            text("select count(*) from training_runs where state in ('claimed', 'training', 'scoring', 'staging')")
        ).scalar()
        twice = connection.execute(
            text(
                "select count(*) from (select 1 from run_texts t join training_runs r on r.id = t.run"
                " where t.role = 'new' and r.state in ('promoted', 'rejected')"
                " group by t.seq, r.draft having count(*) > 1) as twice"
            )
        ).scalar()
    assert running == 0
    assert twice == 0, "two runs of one draft had a text as new"
    refs = server.adapters.all()
    active = [ref for ref in refs if ref.state is AdapterState.ACTIVE]
    assert len(active) <= 1
    assert not [ref for ref in refs if ref.state is AdapterState.CANDIDATE], "a candidate whose run is over"
    for ref in active:
        assert folder_sha256(ref.folder) == ref.sha256
        assert [
            verdict for _, verdict in server.adapters.evaluations(ref.id, EvaluationKind.GATE) if verdict.promoted
        ], "ungated"
        assert all(verdict.promoted for _, verdict in server.adapters.evaluations(ref.id, EvaluationKind.WATCH)), (
            "proven worse"
        )
    assert server.engine.active == (active[0].id if active else BARE_DRAFT)
    assert integrity(server.db) == "ok"
