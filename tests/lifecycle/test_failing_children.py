"""After failures of children, engines and candidates the old adapter serves and all rows are consistent."""

from datetime import timedelta

import pytest
from sqlalchemy import text

from service.core import (
    BARE_DRAFT,
    AdapterState,
    RunState,
)
from service.lifecycle import cleaning
from tests.support.lifecycle_server import ENOUGH, WHO, Installation, check_consistent, generation

CRASHES = ("kill", "garbage", "leave", "kill before publishing", "kill after the candidate")


@pytest.mark.parametrize(
    ("plan", "state"),
    [
        *((plan, RunState.CRASHED) for plan in CRASHES),
        ("give up", RunState.FAILED),
        ("memory ran out", RunState.OUT_OF_MEMORY),
        ("killed", RunState.OUT_OF_MEMORY),
        ("ended by a signal", RunState.ENDED),
        ("other texts", RunState.FAILED),
        ("no parent", RunState.FAILED),
    ],
)
def test_a_child_that_ends_without_a_result_frees_its_texts(
    installation: Installation, plan: str, state: RunState
) -> None:
    installation.plan_children(train=plan)
    with installation.server(cooldown_seconds=300.0) as server:
        server.traffic()
        cases = server.training_texts.untrained(WHO).cases
        server.tick_until(server.ended(state))
        assert server.runs.latest(1)[0].error
        assert server.generations.stats().quarantined == server.generations.stats().trained == 0
        assert server.training_texts.untrained(WHO).cases == cases
        assert server.engine.active == BARE_DRAFT
        assert server.launcher.started[0].exit_code() is not None
        check_consistent(server)
        installation.plan_children()
        installation.clock_offset = timedelta(seconds=301)
        server.tick_until(server.ended(RunState.PROMOTED))
        check_consistent(server)


def test_a_folder_published_by_a_killed_child_is_removed(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where processes share a database, such a folder is left alone for a day: another may be about to name it.
    monkeypatch.setattr(cleaning, "SWEEP_GRACE_SECONDS", 0.0)
    installation.plan_children(train="kill after publishing")
    with installation.server(cooldown_seconds=300.0) as server:
        server.traffic()
        server.tick_until(server.ended(RunState.CRASHED))
        assert list((installation.home / "adapters").iterdir())
        for _ in range(41):
            server.supervisor.tick()
        assert not list((installation.home / "adapters").iterdir())


def test_the_folder_of_a_running_child_is_never_removed(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server() as server:
        server.traffic()
        server.tick_until(lambda: server.runs.current(WHO) is not None)
        (installation.home / "adapters" / ".run-1-1.part").mkdir(parents=True)
        for _ in range(41):
            server.supervisor.tick()
        assert (installation.home / "adapters" / ".run-1-1.part").is_dir()


def test_a_hanging_child_is_killed(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server(timeout_seconds=60.0, cooldown_seconds=300.0) as server:
        server.traffic()
        server.tick_until(lambda: bool(server.runs.latest(1)) and server.runs.latest(1)[0].progress.step == 1)
        installation.clock_offset = timedelta(seconds=61)
        server.tick_until(server.ended(RunState.TIMED_OUT))
        assert "60 s" in str(server.runs.latest(1)[0].error)
        assert server.launcher.started[0].exit_code() is not None
        check_consistent(server)


def test_what_a_child_learns_from_is_named(installation: Installation) -> None:
    well = [generation(name, cases=0) for name in ("well", "better")]
    installation.plan_children(train="learn well better general-1")
    with installation.server() as server:
        server.generations.add(well).result(60)
        server.traffic()
        server.tick_until(server.ended(RunState.PROMOTED))
        query = text("select g.id, t.role from run_texts t join generations g on g.seq = t.seq where t.role <> 'new'")
        with server.db.read() as connection:
            assert sorted(connection.execute(query).all()) == [("better", "replay"), ("well", "window")]
        check_consistent(server)


def test_a_child_that_cannot_be_started_fails_its_run(installation: Installation) -> None:
    with installation.server(cooldown_seconds=300.0) as server:
        server.launcher.missing = True
        server.traffic()
        server.tick_until(server.ended(RunState.FAILED))
        assert "no such interpreter" in str(server.runs.latest(1)[0].error)
        check_consistent(server)


def test_a_candidate_that_will_not_load_changes_nothing(installation: Installation) -> None:
    with installation.server() as server:
        first = server.promote()
        server.supervisor.activate(first.id)
        installation.plan_children(train="broken")
        server.traffic()
        server.tick_until(server.ended(RunState.REJECTED))
        verdict = server.runs.latest(1)[0].verdict
        assert verdict is not None and "cannot be loaded" in verdict.reason and not verdict.promoted
        assert server.engine.active == first.id
        assert server.adapters.all()[0].state in {AdapterState.REJECTED, AdapterState.BROKEN}
        check_consistent(server)


def test_a_dead_engine_loses_the_candidate_but_not_its_cases(installation: Installation) -> None:
    with installation.server(cooldown_seconds=300.0) as server:
        server.traffic()
        server.tick_until(lambda: bool(server.launcher.started))
        server.engine.dead = True
        server.tick_until(server.ended(RunState.FAILED))
        assert server.training_texts.untrained(WHO).cases == 3 * ENOUGH
        server.engine.dead = False
        check_consistent(server)
        installation.clock_offset = timedelta(seconds=301)
        server.tick_until(server.ended(RunState.PROMOTED))


def test_an_engine_that_fails_at_the_switch_catches_up_later(installation: Installation) -> None:
    with installation.server() as server:
        server.engine.switch_dead = True
        server.traffic()
        server.tick_until(server.ended(RunState.PROMOTED))
        for _ in range(3):
            server.supervisor.tick()
        assert [run.state for run in server.runs.latest(10)] == [RunState.PROMOTED]
        assert server.engine.active == BARE_DRAFT
        server.engine.switch_dead = False
        server.supervisor.tick()
        check_consistent(server)
        assert server.engine.active == server.adapters.all()[0].id


def test_the_child_pauses_while_serving_is_busy(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server() as server:
        server.traffic()
        server.tick_until(lambda: server.runs.current(WHO) is not None)
        pauses: list[bool] = []
        process, pause = server.launcher.started[0], server.launcher.started[0].pause
        process.pause = lambda paused: (pauses.append(paused), pause(paused))[0]  # pyright: ignore
        for busy in (False, True, True, False, False):
            server.busy = busy
            server.supervisor.tick()
        assert pauses == [True, False]
