"""Whenever the server is killed, the next one finds consistent rows, serves the right adapter and continues the cycle."""

import time
from contextlib import suppress
from dataclasses import replace

import pytest

from service.core import BARE_DRAFT, AdapterState, RunState, StoreError, Trigger
from tests.support.databases import BOTH, POSTGRES, PostgresDatabases
from tests.support.failing_database import Killed
from tests.support.lifecycle_server import WHO, Installation, Server, check_consistent, generation

KILLED_DAILY = (("sqlite", False, "fair", 1), ("postgres", True, "worse", 8))


def live(server: Server, writes: int, *, after: bool) -> bool:
    """One cycle up to the end of the watch. Returns False if the server was killed on the way."""
    server.traffic()
    server.db.arm(writes, after=after)
    try:
        server.tick_until(lambda: server.events.promotions > 0)
        ref = server.adapters.active(WHO.target, WHO.draft)
        assert ref is not None
        server.db.writes_left, left = None, server.db.writes_left
        server.traffic(cases=0)
        server.db.writes_left = left
        server.tick_until(server.watched(ref.id))
        server.supervisor.tick()
    except Killed:
        return False
    return True


@pytest.mark.parametrize(
    ("databases", "after", "score", "first"),
    [
        pytest.param(
            database,
            after,
            score,
            first,
            id=f"{database}-{'after' if after else 'before'} the commit-{score}-{first}",
            marks=() if (database, after, score, first) in KILLED_DAILY else pytest.mark.nightly,
        )
        for database in ("sqlite", "postgres")
        for after in (False, True)
        for score, first in (("fair", 1), ("worse", 8), ("worse", 1))
    ],
    indirect=["databases"],
)
@pytest.mark.promise(9)
def test_a_kill_at_any_write_is_survived(installation: Installation, after: bool, score: str, first: int) -> None:
    """The server is killed at each write of the cycle in turn. Scores make no difference before the watch's verdict."""
    installation.plan_children(score=score)
    deaths, survived = 0, False
    for writes in range(first, 40):
        with installation.server() as server:
            server.supervisor.activate(BARE_DRAFT)
            survived = live(server, writes, after=after)
            server.kill()
        with installation.server() as successor:
            check_consistent(successor)
        deaths += not survived
        if survived:
            break
    assert survived, "the circle has fewer writes than that"
    assert deaths >= 10 - first


def test_the_same_server_recovers_from_a_failed_write(installation: Installation) -> None:
    """Each write of the cycle fails once in turn; no run stays unfinished, and only the right adapter serves."""
    failures = 0
    for writes in range(1, 40):
        with installation.server() as server:
            server.supervisor.activate(BARE_DRAFT)
            server.traffic()
            runs = len(server.runs.latest(100))
            server.db.arm(writes, error=StoreError("disk full"))
            for _ in range(1000):
                with suppress(StoreError):
                    server.supervisor.tick()
                if len(server.runs.latest(100)) > runs and server.runs.current(WHO) is None:
                    break
                time.sleep(0.01)
            failed = server.db.writes_left is not None and server.db.writes_left <= 0
            server.db.writes_left = None
            server.supervisor.tick()
            check_consistent(server)
        failures += failed
        if not failed:
            break
    assert failures >= 8


@BOTH
def test_a_server_killed_while_its_child_trains(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server() as server:
        server.traffic()
        server.tick_until(lambda: server.runs.current(WHO) is not None)
        cases = server.runs.latest(1)[0].cases
        server.kill()
    installation.plan_children()
    with installation.server() as successor:
        check_consistent(successor)
        assert successor.runs.latest(1)[0].state is RunState.LOST
        assert successor.training_texts.untrained(WHO).cases == cases
        successor.tick_until(successor.ended(RunState.PROMOTED))


@BOTH
def test_a_start_ends_the_open_runs_of_every_pair(installation: Installation) -> None:
    """Another target may have been served before: its run would be open for ever."""
    other = replace(WHO, target="other")
    with installation.server() as server:
        server.generations.add([replace(generation("theirs"), provenance=other)]).result(60)
        run = server.runs.claim(trigger=Trigger.MANUAL, who=other, parent=0, limit=1, owner=server.members.token)
        assert run is not None and server.runs.unfinished() == [run]
    with installation.server() as successor:
        assert successor.runs.unfinished() == []
        assert successor.runs.get(run.id).state is RunState.LOST
        check_consistent(successor)


@BOTH
def test_a_child_that_lost_its_server_ends(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server() as server:
        server.traffic()
        server.tick_until(lambda: server.runs.current(WHO) is not None)
        process = server.launcher.started[0]
        process.stop(5.0)
        assert process.exit_code() == 75, "by itself, at the end of its line"


def test_stopping_servers_during_training_quarantines_nothing(installation: Installation) -> None:
    installation.plan_children(train="hang")
    for _ in range(4):
        with installation.server() as server:
            server.traffic()
            server.tick_until(lambda server=server: server.runs.current(WHO) is not None)
            server.supervisor.stop()
            assert server.runs.latest(1)[0].state is RunState.ENDED
            assert server.generations.stats().quarantined == 0


@BOTH
def test_stopping_ends_the_child_and_frees_its_cases(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server() as server:
        server.traffic()
        server.tick_until(lambda: server.runs.current(WHO) is not None)
        server.supervisor.stop()
        assert server.launcher.started[0].exit_code() is not None
        assert server.runs.latest(1)[0].state is RunState.ENDED
        assert server.training_texts.untrained(WHO).cases > 0
        server.supervisor.stop()
        server.supervisor.tick()
        assert server.runs.current(WHO) is None, "no tick after the end"
        check_consistent(server)


@BOTH
def test_the_next_server_serves_the_active_adapter_and_finishes_its_watch(installation: Installation) -> None:
    with installation.server() as server:
        ref = server.promote()
    installation.plan_children(score="worse")
    with installation.server() as successor:
        assert successor.engine.active == ref.id
        successor.traffic(cases=0)
        successor.tick_until(successor.watched(ref.id))
        successor.supervisor.tick()
        assert successor.engine.active == BARE_DRAFT
        check_consistent(successor)


def grown(installation: Installation, generations: int) -> list[int]:
    """Promote adapters, each trained from the one before."""
    made: list[int] = []
    with installation.server() as server:
        for _ in range(generations):
            ref = server.promote()
            made.append(ref.id)
            server.supervisor.activate(ref.id)
    return made


def test_an_active_adapter_that_will_not_load_falls_back_to_its_parent_and_in_the_end_to_the_bare_draft(
    installation: Installation,
) -> None:
    installation.plan_children(train="better")
    first, second, third = grown(installation, 3)
    with installation.server() as server:
        assert server.engine.active == third
        folders = {ref.id: ref.folder for ref in server.adapters.all()}
    (folders[third] / "adapters.safetensors").write_text("damaged")
    (folders[second] / "adapters.safetensors").unlink()
    with installation.server() as server:
        assert server.engine.active == first
        states = {ref.id: ref.state for ref in server.adapters.all()}
        assert states == {first: AdapterState.ACTIVE, second: AdapterState.BROKEN, third: AdapterState.BROKEN}
        check_consistent(server)
    (folders[first] / "adapters.safetensors").write_text("damaged")
    with installation.server() as server:
        assert server.engine.active == BARE_DRAFT
        check_consistent(server)


@BOTH
def test_an_engine_that_does_not_answer_at_the_start_follows_later(installation: Installation) -> None:
    with installation.server() as server:
        ref = server.promote()
    with installation.server(start=False) as successor:
        successor.engine.dead = True
        successor.supervisor.start()
        assert successor.engine.active == BARE_DRAFT
        successor.engine.dead = False
        successor.supervisor.tick()
        assert successor.engine.active == ref.id
        assert successor.adapters.get(ref.id).state is AdapterState.ACTIVE


@POSTGRES
def test_a_run_outlives_a_restart_of_the_database(
    installation: Installation, databases: PostgresDatabases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ticks fail meanwhile, and the child's messages wait."""
    monkeypatch.setattr("service.store.backends.postgres.RETRY_SECONDS", 0.1)
    with installation.server() as server:
        for after in (RunState.CLAIMED, RunState.TRAINING, RunState.SCORING):
            runs = len(server.runs.latest(100))
            server.traffic()
            server.tick_until(lambda runs=runs: len(server.runs.latest(100)) > runs)
            while server.runs.latest(1)[0].state is not after and not server.runs.latest(1)[0].state.over:
                server.supervisor.tick()
            with databases.server.away():
                for _ in range(3):
                    with pytest.raises(StoreError):
                        server.supervisor.tick()
            server.tick_until(lambda: server.runs.latest(1)[0].state.over)
            server.supervisor.activate(server.engine.active)
        # Scores say the same of every candidate: the first is better than the bare draft, the others as good as the first.
        ends = [RunState.REJECTED, RunState.REJECTED, RunState.PROMOTED]
        assert [run.state for run in server.runs.latest(9)] == ends
        check_consistent(server)
