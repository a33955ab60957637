"""The whole cycle on a real database with real child processes."""

import os
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from service.core import (
    BARE_DRAFT,
    AdapterRef,
    AdapterState,
    Conflict,
    RunState,
    Staged,
    Trigger,
)
from service.store.log.generations import HELD_OUT
from service.store.tables import training_runs
from tests.support.lifecycle_server import ENOUGH, WHO, Installation, check_consistent, generation


def test_enough_traffic_leads_to_a_better_adapter_that_serves(installation: Installation) -> None:
    with installation.server() as server:
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
        assert server.events.over == [RunState.PROMOTED]
        assert server.events.states[0] is RunState.TRAINING
        assert server.events.serving_now == ref.id
        assert server.training_texts.untrained(WHO).cases == 0, "each case is used once"
        assert server.replay.sizes() == {("a", ""): ENOUGH}

        server.traffic(cases=0)
        server.tick_until(server.watched(ref.id))
        assert server.engine.active == ref.id
        check_consistent(server)


def test_an_adapter_serves_with_no_other_target(installation: Installation) -> None:
    with installation.server() as server:
        ref = server.promote()
        server.traffic(2)
    installation.who = replace(WHO, target="another")
    with installation.server() as server:
        assert server.engine.active == BARE_DRAFT
        with pytest.raises(Conflict, match="another target"):
            server.supervisor.activate(ref.id)
        assert server.adapters.get(ref.id).state is AdapterState.ACTIVE
        assert server.supervisor.activate(BARE_DRAFT) is None
    installation.who = WHO
    with installation.server() as server:
        assert server.engine.active == ref.id
        check_consistent(server)


def test_the_next_run_starts_from_the_active_adapter_once_its_watch_is_over(installation: Installation) -> None:
    with installation.server() as server:
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
        check_consistent(server)


def test_a_rejected_run_uses_up_its_cases_and_changes_nothing_else(installation: Installation) -> None:
    installation.plan_children(train="lose")
    with installation.server() as server:
        server.traffic()
        server.tick_until(server.ended(RunState.REJECTED))
        (ref,) = server.adapters.all()
        assert ref.state is AdapterState.REJECTED
        assert server.engine.active == BARE_DRAFT
        assert server.training_texts.untrained(WHO).cases == 0
        for _ in range(5):
            server.supervisor.tick()
        assert len(server.runs.latest(10)) == 1, "no new run without new cases"
        check_consistent(server)


def test_a_candidate_that_loses_on_the_golden_set_is_refused(installation: Installation) -> None:
    installation.plan_children(train="golden")
    with installation.server() as server:
        server.traffic()
        server.tick_until(server.ended(RunState.REJECTED))
        verdict = server.runs.latest(1)[0].verdict
        assert verdict is not None and "worse on golden set" in verdict.reason
        assert verdict.gain == pytest.approx(0.25), "the logged texts alone are the gain"
        assert verdict.prompts == 16
        installation.plan_children(train="fair golden")
        server.promote()
        check_consistent(server)


def test_the_cooldown_delays_the_next_run_and_a_refusal_doubles_it(installation: Installation) -> None:
    installation.plan_children(train="lose")
    with installation.server(cooldown_seconds=300.0) as server:
        server.traffic()
        server.tick_until(server.ended(RunState.REJECTED))
        server.traffic()
        for _ in range(3):
            server.supervisor.tick()
        assert len(server.runs.latest(10)) == 1
        installation.clock_offset = timedelta(seconds=590)
        server.supervisor.tick()
        assert len(server.runs.latest(10)) == 1
        state = server.supervisor.learning()
        assert state.waits is not None and "1 runs were refused" in state.waits
        assert state.refused == 1 and state.level < state.level_after_promotion
        installation.clock_offset = timedelta(seconds=610)
        server.tick_until(server.ended(RunState.REJECTED, 2))


def test_no_run_starts_before_its_gate_can_judge_it(installation: Installation) -> None:
    installation.held_out = False
    with installation.server() as server:
        server.traffic()
        for _ in range(3):
            server.supervisor.tick()
        state = server.supervisor.learning()
        assert not server.runs.latest(1) and state.waits is not None
        assert state.waits == "not enough held-out text to judge a run: 0 of 8 held-out prompts"
        server.generations.add(
            [generation(f"h{i}", cases=0, tokens=20, split=HELD_OUT) for i in range(state.held_out_needed)]
        ).result(60)
        server.tick_until(server.ended(RunState.PROMOTED))
        found = server.supervisor.learning()
        assert found.held_out == 8 and found.refused == 0 and found.minutes < 1.0
        assert found.against_base.keys() == {"a"} and found.against_base["a"][0] > 0.0
        check_consistent(server)


def test_runs_take_so_many_minutes_of_a_day(installation: Installation) -> None:
    installation.plan_children(train="lose")
    with installation.server(minutes_per_day=10.0) as server:
        server.traffic()
        server.tick_until(server.ended(RunState.REJECTED))
        began = update(training_runs).values(created_at=datetime.now(UTC) - timedelta(minutes=6))
        server.db.write(lambda connection: connection.execute(began)).result(60)
        server.traffic()
        for _ in range(3):
            server.supervisor.tick()
        waits = server.supervisor.learning().waits
        assert waits == "trained for 6 of 10 minutes in the last 24 hours; a run takes about 6"
        installation.clock_offset = timedelta(hours=25)
        server.tick_until(server.ended(RunState.REJECTED, 2))


def test_a_run_that_is_due_waits_for_a_minute_without_requests(installation: Installation) -> None:
    with installation.server() as server:
        server.idle_seconds = 59.0
        server.traffic()
        for _ in range(3):
            server.supervisor.tick()
        waits = server.supervisor.learning().waits
        assert not server.runs.latest(1) and waits is not None and "waits for 60 s without requests" in waits
        server.idle_seconds = 60.0
        server.tick_until(server.ended(RunState.PROMOTED))


def test_a_busy_server_trains_when_the_expected_gain_pays_within_a_day(installation: Installation) -> None:
    with installation.server() as server:
        server.idle_seconds = 0.0
        server.traffic()
        server.supervisor.tick()
        assert not server.runs.latest(1), "it is not known yet that it is busy"
        installation.clock_offset = timedelta(minutes=30)
        server.tick_until(server.ended(RunState.PROMOTED))


def test_old_generations_are_purged(installation: Installation) -> None:
    installation.keep = 10
    with installation.server(enabled=False) as server:
        server.traffic(30)
        for _ in range(41):
            server.supervisor.tick()
        server.db.write(lambda connection: None, urgent=False).result(60)
        assert server.generations.stats().generations == 10


def test_what_is_too_old_is_purged_with_its_targets(installation: Installation) -> None:
    files = [
        installation.home / "targets" / "of a target" / name for name in ("old.npz", "new.npz", "half-written.part")
    ]
    files[0].parent.mkdir(parents=True)
    for path in files:
        path.touch()
    long_ago = (datetime.now(UTC) - timedelta(days=3)).timestamp()
    for path in (files[0], files[2]):
        os.utime(path, (long_ago, long_ago))
    installation.max_days, installation.held_out = 2.0, False
    with installation.server(enabled=False) as server:
        server.traffic(20)
        installation.clock_offset = timedelta(days=1)
        for _ in range(41):
            server.supervisor.tick()
        server.db.write(lambda connection: None, urgent=False).result(60)
        assert server.generations.stats().generations == 20
        assert [path.exists() for path in files] == [False, True, False]
        installation.clock_offset = timedelta(days=400)
        for _ in range(41):
            server.supervisor.tick()
        server.db.write(lambda connection: None, urgent=False).result(60)
        assert server.generations.stats().generations == 0
        assert not files[1].exists()


def test_a_parent_that_stops_serving_while_its_candidate_is_staged(installation: Installation) -> None:
    """As when another process rolls it back, which nothing in this one can prevent."""
    with installation.server() as server:
        first = server.promote()
        server.supervisor.activate(BARE_DRAFT)
        stage = server.engine.stage

        def meanwhile(ref: AdapterRef | None) -> Future[Staged]:
            if ref is not None and ref.id != first.id:
                server.adapters.activate(first.id, WHO.target, WHO.draft)
            return stage(ref)

        server.engine.stage = meanwhile
        server.traffic()
        server.tick_until(server.ended(RunState.REJECTED))
        verdict = server.runs.latest(1)[0].verdict
        assert verdict is not None and verdict.reason == "adapter 0, which it was compared with, no longer serves"
        assert server.adapters.active(WHO.target, WHO.draft) == server.adapters.get(first.id)
        server.tick_until(lambda: server.engine.active == first.id)
        assert server.events.promotions == 1
