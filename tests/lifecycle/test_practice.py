"""Practice runs: when they start, what they are given, and that they yield."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from service.core import BadRequest, Conflict, PracticeState, RunState, Trigger
from service.lifecycle import policy
from service.lifecycle.machine import Strain, untouched_seconds, user_on_macos
from service.lifecycle.practice_choice import FILE
from service.lifecycle.practice_starter import PracticeStarter
from service.lifecycle.supervisor import CLEAN_EVERY
from service.lifecycle.training import MAX_PRACTICE_PAUSE_SECONDS, MEMORY_GIVEN_BACK
from service.store.registry.practice import Practised, practised
from service.store.tables import training_runs
from tests.support.lifecycle_server import ENOUGH, WHO, Installation, Server

FEW = 5
"""Texts that are too few for a run on logged texts."""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, policy.RUN_MINUTES),
        ({"idle_seconds": policy.IDLE_SECONDS - 1}, "requests are being answered"),
        ({"user": "the machine is in use"}, "the machine is in use"),
        ({"done": Practised(seconds=50 * 60)}, 10.0),
        ({"done": Practised(seconds=59 * 60)}, "practiced for 59 of 60 minutes in the last 24 hours"),
        ({"done": Practised(refused=1)}, policy.RUN_MINUTES),
        ({"done": Practised(refused=2, new=99)}, "2 consecutive practice runs were refused: 99 of 100 new generations"),
        ({"done": Practised(refused=2, new=100)}, policy.RUN_MINUTES),
    ],
)
def test_when_practice_may_start(changes: dict[str, object], expected: float | str) -> None:
    given: dict[str, object] = {"done": Practised(), "per_day": 60.0, "idle_seconds": 1e9, "user": None, **changes}
    assert policy.practice_minutes(given.pop("done"), **given) == expected  # pyright: ignore[reportArgumentType]


def practising(server: Server) -> bool:
    run = server.runs.current(WHO)
    return run is not None and run.trigger is Trigger.PRACTICE


def test_it_starts_by_itself_when_nothing_is_asked(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server(practice=True) as server:
        server.supervisor.tick()
        assert server.runs.current(WHO) is None, "nothing was logged that it could begin like"
        server.traffic(FEW)
        server.idle_seconds = policy.IDLE_SECONDS / 2
        server.supervisor.tick()
        assert server.runs.current(WHO) is None
        server.idle_seconds = policy.IDLE_SECONDS
        server.supervisor.tick()
        assert practising(server)
        run = server.runs.current(WHO)
        assert run is not None
        assert (run.cases, run.generations, server.runs.texts(run.id)) == (0, FEW, FEW)
        assert len(server.training_texts.seeds_of(run.id)) == FEW
        assert server.launcher.specs[-1]["practice"] == {
            "folder": str(installation.home / "practice"),
            "minutes": policy.RUN_MINUTES,
        }
        # The texts are new to runs that learn from them, whatever becomes of this one.
        assert server.training_texts.untrained(WHO).generations == FEW


def test_off_by_default_and_texts_that_are_enough_come_first(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server() as server:
        server.traffic(FEW)
        server.supervisor.tick()
        assert server.runs.current(WHO) is None
    with installation.server(practice=True) as server:
        server.traffic(ENOUGH)
        server.supervisor.tick()
        run = server.runs.current(WHO)
        assert run is not None and run.trigger is Trigger.CASES


def test_it_pauses_while_anything_is_asked_and_gives_up_in_the_end(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server(practice=True) as server:
        server.traffic(FEW)
        server.supervisor.tick()
        pauses: list[bool] = []
        process, pause = server.launcher.started[0], server.launcher.started[0].pause
        process.pause = lambda paused: (pauses.append(paused), pause(paused))[0]  # pyright: ignore
        for seconds in (9.0, 0.0, 0.0, 3.0):
            server.idle_seconds = seconds
            server.supervisor.pause_child()
        assert pauses == [True, False], "no request has to wait for a row for that"
        server.idle_seconds = 0.0
        server.supervisor.tick()
        run = server.runs.current(WHO)
        assert run is not None and run.progress.paused == "requests are being answered"
        installation.clock_offset = timedelta(seconds=MAX_PRACTICE_PAUSE_SECONDS - 5)
        server.supervisor.tick()
        assert practising(server)
        installation.clock_offset = timedelta(seconds=MAX_PRACTICE_PAUSE_SECONDS + 5)
        server.tick_until(server.ended(RunState.ENDED))
        (ended,) = server.runs.latest(9)
        assert ended.error == "paused for 10 minutes longer than it worked: requests are being answered"
        assert not server.supervisor.working and process.exit_code() is not None


@pytest.mark.parametrize(("working", "goes_on"), [(1.0, False), (9.0, True)])
def test_pauses_add_up_less_the_time_that_it_works(installation: Installation, working: float, goes_on: bool) -> None:
    """A request every few seconds leaves a run with the target in memory, and all other runs waiting for it."""
    installation.plan_children(train="hang")
    with installation.server(practice=True) as server:
        server.traffic(FEW)
        server.supervisor.tick()
        for _ in range(200):
            server.idle_seconds = 0.0
            server.supervisor.tick()
            installation.clock_offset += timedelta(seconds=5)
            server.idle_seconds = 9.0
            server.supervisor.tick()
            installation.clock_offset += timedelta(seconds=working)
        assert practising(server) is goes_on


def test_a_machine_that_is_short_of_memory_gets_it_back(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server(practice=True) as server:
        server.traffic(FEW)
        server.supervisor.tick()
        server.strain = Strain.MEMORY
        server.tick_until(server.ended(RunState.OUT_OF_MEMORY))
        assert server.runs.latest(9)[0].error == MEMORY_GIVEN_BACK
        assert not server.supervisor.working


def test_text_on_disk_is_bounded_whatever_runs(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server(practice_gb=1000 / 2**30) as server:
        server.traffic(FEW)
        server.supervisor.request_training(None, 3.0)
        folder = installation.home / "practice" / "target"
        folder.mkdir(parents=True)
        for age in range(4):
            (folder / f"{age}.npz").write_bytes(b"." * 400)
            os.utime(folder / f"{age}.npz", (1e9 - age, 1e9 - age))
        for _ in range(CLEAN_EVERY + 1):
            server.supervisor.tick()
        assert server.supervisor.working and {path.name for path in folder.iterdir()} == {"0.npz", "1.npz"}


def test_a_draft_that_is_switched_off_is_not_practised(installation: Installation) -> None:
    with installation.server(practice=True, spec={"k": 0}) as server:
        server.traffic(FEW)
        server.supervisor.tick()
        state = PracticeState(False, "this server does not draft (engine.num_draft_tokens is 0)")
        assert server.supervisor.practice() == state and server.runs.current(WHO) is None


def test_neither_a_night_without_a_server_nor_a_clock_that_went_back_counts_as_practice(
    installation: Installation,
) -> None:
    installation.plan_children(train="hang")
    with installation.server() as server:
        server.traffic(FEW)
        run = server.supervisor.request_training(None, 3.0)
        server.supervisor.end_run(run.id)
        now = datetime.now(UTC)

        def seconds(began: datetime) -> float:
            server.db.write(
                lambda connection: connection.execute(update(training_runs).values(created_at=began))
            ).result(60)
            return practised(server.db, WHO, now).seconds

        assert seconds(now - timedelta(hours=10)) == 180.0
        assert 0 <= seconds(now + timedelta(hours=2)) < 1.0


def test_what_it_makes_goes_through_the_gate_and_is_counted(installation: Installation) -> None:
    with installation.server(practice=True, practice_minutes_per_day=0.0) as server:
        server.traffic(FEW)
        server.supervisor.tick()
        assert server.runs.current(WHO) is None, "no minute is left today"
        with pytest.raises(BadRequest, match="60 minutes"):
            server.supervisor.request_training(None, 61.0)
        run = server.supervisor.request_training("once", 3.0)
        assert server.supervisor.request_training("once", 3.0).id == run.id
        assert run.trigger is Trigger.PRACTICE
        server.tick_until(lambda: server.events.promotions == 1)
        now = datetime.now(UTC)
        assert practised(server.db, WHO, now + timedelta(hours=25)) == Practised()
        done = practised(server.db, WHO, now)
        assert 0 < done.seconds < 60 and not done.refused
        installation.plan_children(train="worse")
        server.supervisor.activate(server.events.serving_now)
        for count in (1, 2):
            server.supervisor.request_training(None, 3.0)
            server.tick_until(server.ended(RunState.REJECTED, count))
            assert practised(server.db, WHO, datetime.now(UTC)).refused == count
        server.traffic(4)
        assert practised(server.db, WHO, datetime.now(UTC)).new == 4


def test_it_has_its_minutes_and_then_time_to_score(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server(timeout_seconds=600.0) as server:
        server.traffic(FEW)
        run = server.supervisor.request_training(None, 10.0)
        installation.clock_offset = timedelta(minutes=19, seconds=50)
        server.supervisor.tick()
        assert server.runs.get(run.id).state is RunState.TRAINING and server.supervisor.working
        installation.clock_offset = timedelta(minutes=20, seconds=10)
        server.tick_until(server.ended(RunState.TIMED_OUT))
        assert server.runs.get(run.id).error == "the child did not end within 1200 s of work"


def test_what_crashes_is_not_tried_for_ever(installation: Installation) -> None:
    installation.plan_children(train="kill")
    with installation.server(practice=True) as server:
        server.traffic(FEW)
        server.tick_until(server.ended(RunState.CRASHED, 2))
        server.supervisor.tick()
        assert (
            server.supervisor.practice().waits == "2 consecutive practice runs were refused: 0 of 100 new generations"
        )
        assert [run.state for run in server.runs.latest(9)] == [RunState.CRASHED] * 2
        # They claimed nothing, and say nothing about the texts.
        assert server.training_texts.untrained(WHO).generations == FEW


def test_what_was_asked_for_goes_on_where_the_machine_is_strained(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server(practice=True) as server:
        server.traffic(FEW)
        server.supervisor.tick()
        server.strain = Strain.BATTERY
        server.supervisor.tick()
        (run,) = server.runs.latest(9)
        assert run.progress.paused == "on battery", "nobody asked for it"
        server.supervisor.end_run(run.id)
        run = server.supervisor.request_training(None, 3.0)
        server.supervisor.tick()
        assert server.runs.get(run.id).progress.paused is None and server.supervisor.working


def test_a_mac_says_whether_somebody_uses_it() -> None:
    text = '  | |   "HIDIdleTime" = 12000000000\n'
    assert untouched_seconds(text) == 12.0
    assert untouched_seconds("nothing") is None
    assert user_on_macos(lambda *command: text) == "the machine is in use"
    assert user_on_macos(lambda *command: text.replace("12000000000", "900000000000")) is None
    assert user_on_macos(lambda *command: "") is None


def test_it_is_turned_on_and_off_while_the_server_runs(installation: Installation) -> None:
    """Off ends what started by itself, and the next start remembers."""
    installation.plan_children(train="hang")
    with installation.server() as server:
        server.traffic(FEW)
        server.supervisor.tick()
        assert server.supervisor.practice() == PracticeState(False)
        assert server.supervisor.choose_practice(True) == PracticeState(True)
        server.idle_seconds = 0.0
        server.supervisor.tick()
        assert server.supervisor.practice() == PracticeState(True, waits="requests are being answered")
        server.idle_seconds = math.inf
        server.supervisor.tick()
        assert practising(server) and server.supervisor.practice() == PracticeState(True)
        assert server.supervisor.choose_practice(False) == PracticeState(False)
        (ended,) = server.runs.latest(9)
        assert (ended.state, ended.error) == (RunState.ENDED, "practice was turned off")
        assert not server.supervisor.working and server.launcher.started[0].exit_code() is not None
        server.supervisor.tick()
        assert server.runs.current(WHO) is None
        server.supervisor.choose_practice(True)
    with installation.server() as server:
        server.supervisor.tick()
        assert practising(server)


def test_turned_off_it_leaves_what_was_asked_for(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server() as server:
        server.traffic(FEW)
        server.supervisor.choose_practice(True)
        server.supervisor.tick()
        assert practising(server)
        server.supervisor.choose_practice(False)
        run = server.supervisor.request_training(None, 3.0)
        server.supervisor.choose_practice(True)
        server.supervisor.choose_practice(False)
        assert server.supervisor.run(run.id).state is RunState.TRAINING and server.supervisor.working


def test_why_none_starts_is_told(installation: Installation) -> None:
    with installation.server(practice=True, cooldown_seconds=600.0) as server:
        server.supervisor.tick()
        nothing = "no recorded prompt to start from yet"
        assert server.supervisor.practice().waits == nothing
        server.traffic(FEW)
        server.strain = Strain.BATTERY
        server.supervisor.tick()
        assert server.supervisor.practice().waits == "on battery"
        server.strain = None
        server.supervisor.request_training(None)
        assert server.supervisor.practice().waits is None, "a run is under way"
        server.tick_until(lambda: server.supervisor.runs(1)[0].state.over and not server.supervisor.working)
        server.tick_until(lambda: server.supervisor.practice().waits is not None)


@pytest.mark.parametrize(
    ("training", "why"),
    [
        ({"practice": True}, "training.practice is set in the configuration"),
        ({"practice": False}, "training.practice is set in the configuration"),
        ({"enabled": False}, "runs do not start automatically (training.enabled is false)"),
        ({"run_here": False, "practice": True}, "this server leaves runs to others (training.run_here is false)"),
    ],
)
def test_where_it_is_fixed_nobody_turns_it(installation: Installation, training: dict[str, object], why: str) -> None:
    with installation.server(**training) as server:  # pyright: ignore[reportArgumentType]
        on = training.get("practice") is True and "run_here" not in training
        assert server.supervisor.practice() == PracticeState(on, why)
        for wanted in (True, False):
            with pytest.raises(Conflict, match=re.escape(why)):
                server.supervisor.choose_practice(wanted)
        assert not (installation.home / FILE).exists()


def test_without_a_draft_or_after_the_end_nobody_turns_it(installation: Installation) -> None:
    with installation.server() as server:
        practice = server.supervisor._practice
        undrafted = replace(server.supervisor._context, who=replace(WHO, draft=""))
        server.supervisor._practice = PracticeStarter(undrafted, practice._choice, lambda: 0.0, lambda: None)
        assert server.supervisor.practice() == PracticeState(False, "this server runs without a draft model")
        with pytest.raises(Conflict, match="without a draft model"):
            server.supervisor.choose_practice(True)
        server.supervisor._practice = practice
        server.supervisor.stop()
        with pytest.raises(Conflict, match="shutting down"):
            server.supervisor.choose_practice(True)
        assert not (installation.home / FILE).exists()
