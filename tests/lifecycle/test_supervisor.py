"""The whole cycle on a real database with real child processes."""

import os
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from service.core import (
    BARE_DRAFT,
    AdapterRef,
    AdapterState,
    Conflict,
    RunState,
    Staged,
    Trigger,
)
from tests.support.lifecycle_server import ENOUGH, WHO, Installation, check_consistent


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


def test_the_cooldown_delays_the_next_run(installation: Installation) -> None:
    installation.plan_children(train="lose")
    with installation.server(cooldown_seconds=300.0) as server:
        server.traffic()
        server.tick_until(server.ended(RunState.REJECTED))
        server.traffic()
        for _ in range(3):
            server.supervisor.tick()
        assert len(server.runs.latest(10)) == 1
        installation.clock_offset = timedelta(seconds=301)
        server.tick_until(server.ended(RunState.REJECTED, 2))


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
    installation.max_days = 2.0
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
