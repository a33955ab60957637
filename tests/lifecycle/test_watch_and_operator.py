"""Taking promotions back, and what an operator may ask."""

import time
from pathlib import Path

import pytest
from circle import WHO, World, check_legal, generation
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
    Verdict,
)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


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
