"""The whole circle over real rows and real child processes."""

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from circle import ENOUGH, WHO, World, check_legal, generation
from sqlalchemy import text

from service.core import (
    BARE_DRAFT,
    AdapterRefused,
    AdapterState,
    BadRequest,
    Conflict,
    NotFound,
    RunState,
    Trigger,
    Unavailable,
    Verdict,
)
from service.lifecycle.clock import Clock


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# --------------------------------------------------------------------------------------------------------- the circle


def test_enough_traffic_becomes_a_better_adapter_that_serves(world: World) -> None:
    with world.server() as server:
        for _ in range(3):
            server.supervisor.tick()
        assert not server.runs.latest(1), "nothing to learn from yet"

        ref = server.promote()
        (run,) = server.runs.latest(10)
        assert (run.state, run.trigger, run.adapter) == (RunState.PROMOTED, Trigger.CASES, ref.id)
        assert run.verdict is not None and run.verdict.promoted
        assert run.verdict.gain == pytest.approx(0.25)
        assert run.generations == ENOUGH
        assert server.runs.loss_curve(run.id) == [(1, 1.5), (2, 1.0)]
        assert server.engine.active == ref.id
        assert server.told.over == [RunState.PROMOTED]
        assert server.told.states[0] is RunState.TRAINING
        assert server.told.serving_now == ref.id
        assert server.generations.counts(WHO).cases == 0, "each case is used once"
        assert server.replay.sizes() == {"a": ENOUGH}

        server.traffic(cases=0)
        server.tick_until(server.watched(ref.id))
        assert server.engine.active == ref.id
        check_legal(server)


def test_the_next_run_starts_from_the_active_adapter_once_its_watch_is_over(world: World) -> None:
    with world.server() as server:
        first = server.promote()
        server.traffic(ENOUGH - 1, cases=6)
        for _ in range(5):
            server.supervisor.tick()
        assert len(server.runs.latest(10)) == 1, "still being watched"
        server.traffic(1)
        server.tick_until(server.ended(RunState.REJECTED))
        assert server.watched(first.id)()
        (run, _) = server.runs.latest(10)
        assert run.parent == first.id
        assert run.verdict is not None and run.verdict.gain == pytest.approx(0.0)
        check_legal(server)


def test_a_run_that_lost_leaves_everything_as_it_was_and_its_cases_are_used_up(world: World) -> None:
    world.act(train="lose")
    with world.server() as server:
        server.traffic()
        server.tick_until(server.ended(RunState.REJECTED))
        (ref,) = server.adapters.all()
        assert ref.state is AdapterState.REJECTED
        assert server.engine.active == BARE_DRAFT
        assert server.generations.counts(WHO).cases == 0
        for _ in range(5):
            server.supervisor.tick()
        assert len(server.runs.latest(10)) == 1, "no new run without new cases"
        check_legal(server)


def test_a_verdict_on_the_general_texts_says_so(world: World) -> None:
    world.act(train="golden")
    with world.server() as server:
        server.promote()
        verdict = server.runs.latest(1)[0].verdict
        assert verdict is not None and "general held-out set" in verdict.reason


def test_cool_down_holds_the_next_run_back(world: World) -> None:
    world.act(train="lose")
    with world.server(cooldown_seconds=300.0) as server:
        server.traffic()
        server.tick_until(server.ended(RunState.REJECTED))
        server.traffic()
        for _ in range(3):
            server.supervisor.tick()
        assert len(server.runs.latest(10)) == 1
        world.ahead = timedelta(seconds=301)
        server.tick_until(server.ended(RunState.REJECTED, 2))


def test_old_generations_are_purged(world: World) -> None:
    world.keep = 10
    with world.server(enabled=False) as server:
        server.traffic(30)
        for _ in range(41):
            server.supervisor.tick()
        server.db.write(lambda connection: None, urgent=False).result(10)
        assert server.generations.stats().generations == 10


# -------------------------------------------------------------------------------------------------- children that fail


@pytest.mark.parametrize("act", ["kill", "garbage", "leave", "kill before publishing", "kill after the candidate"])
def test_a_child_that_breaks_off_gives_its_cases_back(world: World, act: str) -> None:
    world.act(train=act)
    with world.server(cooldown_seconds=300.0) as server:
        server.traffic()
        cases = server.generations.counts(WHO).cases
        server.tick_until(server.ended(RunState.CRASHED))
        assert server.runs.latest(1)[0].error
        assert server.generations.counts(WHO).cases == cases
        assert server.engine.active == BARE_DRAFT
        assert server.launcher.started[0].exit_code() is not None
        check_legal(server)
        world.act()
        world.ahead = timedelta(seconds=301)
        server.tick_until(server.ended(RunState.PROMOTED))


def test_what_a_killed_child_had_published_is_removed(world: World) -> None:
    world.act(train="kill after publishing")
    with world.server(cooldown_seconds=300.0) as server:
        server.traffic()
        server.tick_until(server.ended(RunState.CRASHED))
        assert list((world.home / "adapters").iterdir())
        for _ in range(41):
            server.supervisor.tick()
        assert not list((world.home / "adapters").iterdir())


def test_the_folder_of_a_child_at_work_is_never_removed(world: World) -> None:
    world.act(train="hang")
    with world.server() as server:
        server.traffic()
        server.tick_until(lambda: server.runs.current() is not None)
        (world.home / "adapters" / ".run-1.part").mkdir(parents=True)
        for _ in range(41):
            server.supervisor.tick()
        assert (world.home / "adapters" / ".run-1.part").is_dir()


def test_a_child_that_never_ends_is_ended(world: World) -> None:
    world.act(train="hang")
    with world.server(timeout_seconds=60.0, cooldown_seconds=300.0) as server:
        server.traffic()
        server.tick_until(lambda: bool(server.runs.latest(1)) and server.runs.latest(1)[0].progress.step == 1)
        world.ahead = timedelta(seconds=61)
        server.tick_until(server.ended(RunState.CRASHED))
        assert "60 s" in str(server.runs.latest(1)[0].error)
        assert server.launcher.started[0].exit_code() is not None


def test_a_run_that_gives_up_says_why_and_uses_its_cases_up(world: World) -> None:
    world.act(train="give up")
    with world.server() as server:
        server.traffic()
        server.tick_until(server.ended(RunState.FAILED))
        assert server.runs.latest(1)[0].error == "too few examples"
        assert server.generations.counts(WHO).cases == 0
        check_legal(server)


@pytest.mark.parametrize("act", ["other texts", "no parent"])
def test_scores_that_do_not_compare_fail_the_run(world: World, act: str) -> None:
    world.act(train=act)
    with world.server() as server:
        server.traffic()
        server.tick_until(server.ended(RunState.FAILED))
        assert "scores" in str(server.runs.latest(1)[0].error)
        check_legal(server)


def test_cases_under_three_crashes_are_put_aside(world: World) -> None:
    world.act(train="kill")
    with world.server() as server:
        server.traffic()
        server.tick_until(server.ended(RunState.CRASHED, 3))
        for _ in range(5):
            server.supervisor.tick()
        assert len(server.runs.latest(10)) == 3
        assert server.generations.stats().quarantined == 3 * ENOUGH
        world.act()
        server.promote()
        check_legal(server)


def test_a_child_that_cannot_be_started_is_a_crash(world: World) -> None:
    with world.server(cooldown_seconds=300.0) as server:
        server.launcher.missing = True
        server.traffic()
        server.tick_until(server.ended(RunState.CRASHED))
        assert "no such interpreter" in str(server.runs.latest(1)[0].error)
        check_legal(server)


def test_a_candidate_that_will_not_load_changes_nothing(world: World) -> None:
    with world.server() as server:
        first = server.promote()
        server.supervisor.activate(first.id)
        world.act(train="broken")
        server.traffic()
        server.tick_until(server.ended(RunState.REJECTED))
        verdict = server.runs.latest(1)[0].verdict
        assert verdict is not None and "will not load" in verdict.reason and not verdict.promoted
        assert server.engine.active == first.id
        assert server.adapters.all()[0].state in {AdapterState.REJECTED, AdapterState.BROKEN}
        check_legal(server)


def test_an_engine_that_does_not_answer_costs_the_candidate_not_its_cases(world: World) -> None:
    with world.server(cooldown_seconds=300.0) as server:
        server.engine.dead = True
        server.traffic()
        server.tick_until(server.ended(RunState.CRASHED))
        assert server.generations.counts(WHO).cases == 3 * ENOUGH
        server.engine.dead = False
        check_legal(server)
        world.ahead = timedelta(seconds=301)
        server.tick_until(server.ended(RunState.PROMOTED))


def test_an_engine_that_fails_at_the_switch_follows_the_rows_later(world: World) -> None:
    with world.server() as server:
        server.engine.switch_dead = True
        server.traffic()
        with pytest.raises(Unavailable):
            server.tick_until(server.ended(RunState.PROMOTED, 2))
        assert [run.state for run in server.runs.latest(10)] == [RunState.PROMOTED]
        assert server.engine.active == BARE_DRAFT
        server.engine.switch_dead = False
        server.supervisor.tick()
        check_legal(server)
        assert server.engine.active == server.adapters.all()[0].id


def test_the_child_holds_still_while_serving_is_busy(world: World) -> None:
    world.act(train="hang")
    with world.server() as server:
        server.traffic()
        server.tick_until(lambda: server.runs.current() is not None)
        said: list[bool] = []
        process, pause = server.launcher.started[0], server.launcher.started[0].pause
        process.pause = lambda paused: (said.append(paused), pause(paused))[0]  # pyright: ignore
        for busy in (False, True, True, False, False):
            server.busy = busy
            server.supervisor.tick()
        assert said == [True, False]


# ------------------------------------------------------------------------------------------------------------ watching


def test_a_promotion_that_turns_out_worse_is_taken_back(world: World) -> None:
    world.act(score="worse")
    with world.server() as server:
        ref = server.promote()
        server.traffic(cases=0)
        server.tick_until(server.watched(ref.id))
        server.supervisor.tick()
        (_, verdict) = server.adapters.evaluations(ref.id, "watch")[0]
        assert not verdict.promoted and verdict.high90 < 0
        assert server.adapters.get(ref.id).state is AdapterState.ROLLED_BACK
        assert server.engine.active == BARE_DRAFT
        assert server.told.rollbacks == 1
        server.traffic(cases=0)
        for _ in range(5):
            server.supervisor.tick()
        assert server.engine.active == BARE_DRAFT, "it does not come back by itself"
        check_legal(server)


def test_a_forced_bad_promotion_goes_back_to_its_parent(world: World) -> None:
    with world.server() as server:
        parent = server.promote()
        server.supervisor.activate(parent.id)
        world.act(train="lose", score="fair")
        server.traffic()
        server.tick_until(server.ended(RunState.REJECTED))
        # Whoever waves this one through is wrong: its folder says that it needs more calls.
        bad = server.adapters.all()[0]
        force = text("update adapters set state = 'retired' where id = :id").bindparams(id=bad.id)
        server.db.write(lambda connection: connection.execute(force)).result(10)
        server.adapters.activate(bad.id, WHO.draft)
        server.adapters.record_evaluation(bad.id, "gate", Verdict(True, "forced", 0, 0, 0.0, 0.0, 0.0))
        server.supervisor.tick()
        assert server.engine.active == bad.id
        server.traffic(cases=0)
        server.tick_until(server.watched(bad.id))
        server.supervisor.tick()
        assert server.engine.active == parent.id
        check_legal(server)


def test_a_watch_that_cannot_compare_ends_and_keeps_the_adapter(world: World) -> None:
    world.act(score="kill")
    with world.server() as server:
        ref = server.promote()
        server.traffic(cases=0)
        server.tick_until(server.watched(ref.id))
        assert len(server.launcher.started) == 1 + 3
        assert server.engine.active == ref.id
        check_legal(server)


def test_an_operators_choice_ends_the_watch(world: World) -> None:
    world.act(score="worse")
    with world.server() as server:
        ref = server.promote()
        server.traffic(cases=0)
        server.tick_until(lambda: len(server.launcher.started) == 2)
        assert server.supervisor.activate(ref.id) == server.adapters.get(ref.id)
        for _ in range(30):
            server.supervisor.tick()
            time.sleep(0.01)
        assert server.engine.active == ref.id
        assert len(server.adapters.evaluations(ref.id, "watch")) == 1
        check_legal(server)


# ------------------------------------------------------------------------------------------------------------ operator


def test_a_forced_run_needs_no_minimum_and_the_same_key_is_the_same_run(world: World) -> None:
    with world.server() as server:
        with pytest.raises(BadRequest):
            server.supervisor.request_training("first")
        server.traffic(1)
        run = server.supervisor.request_training("first")
        assert (run.state, run.trigger, run.generations) == (RunState.TRAINING, Trigger.MANUAL, 1)
        assert server.supervisor.request_training("first").id == run.id
        with pytest.raises(Conflict):
            server.supervisor.request_training("second")
        with pytest.raises(Conflict):
            server.supervisor.request_training(None)
        server.tick_until(server.ended(RunState.PROMOTED))
        assert server.supervisor.request_training("first").state is RunState.PROMOTED
        assert server.supervisor.run(run.id).state is RunState.PROMOTED
        assert len(server.launcher.started) == 1
        with pytest.raises(NotFound):
            server.supervisor.run(99)


def test_only_ties_are_nothing_to_learn_from(world: World) -> None:
    with world.server() as server:
        server.generations.add([generation("tie", tie=True)]).result(10)
        with pytest.raises(BadRequest):
            server.supervisor.request_training(None)


def test_an_operator_may_go_back_and_forth(world: World) -> None:
    with world.server() as server:
        ref = server.promote()
        assert server.supervisor.rollback() is None
        assert server.engine.active == BARE_DRAFT
        with pytest.raises(Conflict):
            server.supervisor.rollback()
        again = server.supervisor.activate(ref.id)
        assert again is not None and again.state is AdapterState.ACTIVE
        assert server.engine.active == ref.id
        assert server.supervisor.activate(BARE_DRAFT) is None
        assert server.engine.active == BARE_DRAFT
        assert [ref.state for ref in server.supervisor.adapters()] == [AdapterState.RETIRED]
        with pytest.raises(NotFound):
            server.supervisor.activate(99)
        check_legal(server)


def test_what_the_gate_refused_no_operator_can_activate(world: World) -> None:
    world.act(train="lose")
    with world.server() as server:
        server.traffic()
        server.tick_until(server.ended(RunState.REJECTED))
        with pytest.raises(Conflict):
            server.supervisor.activate(server.adapters.all()[0].id)
        check_legal(server)


def test_activating_a_damaged_adapter_changes_nothing(world: World) -> None:
    with world.server() as server:
        ref = server.promote()
        server.supervisor.activate(BARE_DRAFT)
        (ref.folder / "adapters.safetensors").write_text("0.5")
        with pytest.raises(AdapterRefused):
            server.supervisor.activate(ref.id)
        assert server.engine.active == BARE_DRAFT
        check_legal(server)


def test_a_candidate_is_not_promoted_over_what_it_was_not_compared_with(world: World) -> None:
    with world.server() as server:
        first = server.promote()
        server.supervisor.activate(first.id)
        server.traffic()
        server.tick_until(lambda: server.runs.current() is not None)
        server.supervisor.activate(BARE_DRAFT)
        server.tick_until(server.ended(RunState.REJECTED))
        verdict = server.runs.latest(1)[0].verdict
        assert verdict is not None and "no longer serves" in verdict.reason
        assert server.engine.active == BARE_DRAFT
        check_legal(server)


# ------------------------------------------------------------------------------------------------ many at the same time


def test_many_threads_ticking_make_one_run(world: World) -> None:
    with world.server() as server:
        server.traffic()
        stop = threading.Event()

        def hammer() -> None:
            while not stop.is_set():
                server.supervisor.tick()
                time.sleep(0.005)

        threads = [threading.Thread(target=hammer) for _ in range(8)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 10
        while not server.ended(RunState.PROMOTED)() and time.monotonic() < end:
            time.sleep(0.02)
        stop.set()
        for thread in threads:
            thread.join()
        assert [run.state for run in server.runs.latest(10)] == [RunState.PROMOTED]
        assert len(server.launcher.started) == 1


def test_two_supervisors_on_one_database_make_one_run(world: World) -> None:
    with world.server() as one, world.server() as other:
        one.traffic()
        end = time.monotonic() + 10
        servers = [one, other]
        while not one.ended(RunState.PROMOTED)() and time.monotonic() < end:
            threads = [threading.Thread(target=server.supervisor.tick) for server in servers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert [run.state for run in one.runs.latest(10)] == [RunState.PROMOTED]
        assert len(one.launcher.started) + len(other.launcher.started) == 1
        other.supervisor.tick()
        assert one.engine.active == other.engine.active == one.adapters.all()[0].id


def test_a_run_of_a_supervisor_that_has_gone_is_given_up_after_its_time(world: World) -> None:
    world.act(train="hang")
    with world.server() as gone, world.server(timeout_seconds=60.0, cooldown_seconds=300.0) as other:
        gone.traffic()
        gone.tick_until(lambda: gone.runs.current() is not None)
        for _ in range(3):
            other.supervisor.tick()
        assert other.runs.current() is not None
        world.ahead = timedelta(seconds=61)
        other.supervisor.tick()
        assert [run.state for run in other.runs.latest(10)] == [RunState.CRASHED]
        # It was not gone after all, only slow: what it still says changes nothing.
        gone.supervisor.stop()
        assert gone.launcher.started[0].exit_code() is not None
        assert [run.state for run in other.runs.latest(10)] == [RunState.CRASHED]


def test_a_supervisor_whose_run_was_taken_ends_its_child(world: World) -> None:
    with world.server() as server:
        server.traffic()
        server.tick_until(lambda: server.runs.current() is not None)
        run = server.runs.current()
        assert run is not None
        server.runs.move(run.id, run.fencing, RunState.CRASHED, error="taken")
        world.act(train="hang")
        for _ in range(100):
            server.supervisor.tick()
            if server.launcher.started[0].exit_code() is not None:
                break
            time.sleep(0.02)
        assert server.launcher.started[0].exit_code() is not None
        assert not [ref for ref in server.adapters.all() if ref.run == run.id and ref.state is AdapterState.ACTIVE]


def test_the_clock_drives_the_whole_circle(world: World) -> None:
    with world.server() as server:
        server.traffic()
        clock = Clock(server.supervisor.tick, 0.05)
        clock.start()
        end = time.monotonic() + 10
        while not server.ended(RunState.PROMOTED)() and time.monotonic() < end:
            time.sleep(0.02)
        clock.stop()
        assert server.ended(RunState.PROMOTED)()
        check_legal(server)
