"""Backfill: generations decoded while speculation was parked get their cases later, exactly once, despite failures."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from service.core import RunState, StoreError, Trigger
from service.lifecycle.supply import ATTEMPTS
from tests.support.lifecycle_server import ENOUGH, WHO, Installation, Server, check_consistent, generation

RULES: dict[str, Any] = {"min_cases": 3 * ENOUGH, "min_tokens": 12 * ENOUGH}
HALF: dict[str, Any] = RULES | {"min_tokens": 12 * ENOUGH // 2}


def cases_each(server: Server) -> list[int]:
    """Number of cases of every generation."""
    query = text("select count(c.id) from generations g left join failure_cases c on c.seq = g.seq group by g.seq")
    with server.db.read() as connection:
        return list(connection.execute(query).scalars())


def settle(server: Server, children: int) -> None:
    """Tick until `children` were started and the last has ended, and check that no more follow."""
    launcher = server.launcher
    server.tick_until(lambda: len(launcher.started) >= children and launcher.started[-1].exit_code() is not None)
    for _ in range(5):
        server.supervisor.tick()
    assert len(launcher.started) == children


def test_undrafted_generations_are_backfilled_and_start_a_run(installation: Installation) -> None:
    with installation.server(**RULES) as server:
        names = server.undrafted_traffic()
        server.supervisor.tick()
        assert server.launcher.kinds == ["cases"]
        assert not server.runs.latest(9) and not server.events.states, "it is no training run"
        before = [g.rounds for g in server.generations.by_ids(names)]
        server.tick_until(server.ended(RunState.PROMOTED))
        assert server.launcher.kinds == ["cases", "train"]
        assert server.events.supplied == 3 * ENOUGH
        (run,) = server.runs.latest(9)
        assert (run.trigger, run.generations, run.cases) == (Trigger.CASES, ENOUGH, 3 * ENOUGH)
        assert [g.rounds for g in server.generations.by_ids(names)] == before, "rounds are history"
        assert cases_each(server) == [3] * ENOUGH
        check_consistent(server)


def test_too_few_wait_until_there_are_more(installation: Installation) -> None:
    with installation.server(**RULES) as server:
        server.undrafted_traffic(ENOUGH - 1)
        for _ in range(5):
            server.supervisor.tick()
        assert not server.launcher.started
        server.undrafted_traffic(1)
        server.supervisor.tick()
        assert server.launcher.kinds == ["cases"]


@pytest.mark.parametrize("plan", ["kill", "give up"])
def test_a_child_that_always_fails_is_started_three_times(installation: Installation, plan: str) -> None:
    installation.plan_children(cases=plan)
    with installation.server(**RULES) as server:
        server.undrafted_traffic()
        settle(server, ATTEMPTS)
        assert cases_each(server) == [0] * ENOUGH and not server.runs.latest(9)
        installation.plan_children()
        server.undrafted_traffic()
        server.tick_until(server.ended(RunState.PROMOTED))
        assert sorted(cases_each(server)) == [0] * ENOUGH + [3] * ENOUGH, "those that came later are not to blame"
        check_consistent(server)


def test_a_child_that_cannot_be_started_is_tried_three_times(installation: Installation) -> None:
    with installation.server(**RULES) as server:
        server.undrafted_traffic()
        server.launcher.missing = True
        for _ in range(ATTEMPTS):
            assert server.unseen.tokens(WHO)
            server.supervisor.tick()
        assert not server.unseen.tokens(WHO)


def test_generations_a_child_skips_are_not_asked_again(installation: Installation) -> None:
    installation.plan_children(cases="silent")
    with installation.server(**RULES) as server:
        server.undrafted_traffic()
        settle(server, 1)
        assert not server.unseen.tokens(WHO)


def test_a_second_child_finishes_after_one_died_half_way(installation: Installation) -> None:
    installation.plan_children(cases="kill half way")
    with installation.server(**HALF) as server:
        server.undrafted_traffic()
        server.tick_until(lambda: server.events.supplied == 3 * ENOUGH // 2)
        installation.plan_children()
        server.tick_until(server.ended(RunState.PROMOTED))
        assert server.launcher.kinds == ["cases", "cases", "train"]
        assert cases_each(server) == [3] * ENOUGH and server.events.supplied == 3 * ENOUGH


@pytest.mark.parametrize("killed", [False, True])
def test_the_next_server_finishes_a_backfill(installation: Installation, killed: bool) -> None:
    installation.plan_children(cases="hang half way")
    with installation.server(**HALF) as server:
        server.undrafted_traffic()
        server.tick_until(lambda: server.events.supplied > 0)
        child = server.launcher.started[0]
        if killed:
            server.kill()
        else:
            server.supervisor.stop()
        assert child.exit_code() is not None
    installation.plan_children()
    with installation.server(**HALF) as successor:
        successor.tick_until(successor.ended(RunState.PROMOTED))
        assert successor.events.supplied == 3 * ENOUGH // 2
        assert cases_each(successor) == [3] * ENOUGH
        check_consistent(successor)


@pytest.mark.parametrize("after", [False, True])
def test_a_failed_write_loses_no_cases(installation: Installation, after: bool) -> None:
    """A write fails before or after its commit."""
    with installation.server(**RULES) as server:
        server.undrafted_traffic()
        server.supervisor.tick()
        server.db.arm(1, after=after, error=StoreError("away"))
        with pytest.raises(StoreError):
            server.tick_until(lambda: False)
        server.tick_until(server.ended(RunState.PROMOTED))
        assert server.launcher.kinds == ["cases", "train"]
        assert cases_each(server) == [3] * ENOUGH


def test_two_servers_on_one_database_backfill_once(installation: Installation) -> None:
    with installation.server(**RULES) as one, installation.server(start=False, **RULES) as other:
        one.undrafted_traffic()
        one.supervisor.tick()
        other.supervisor.tick()
        assert one.launcher.kinds == other.launcher.kinds == ["cases"]
        for process in (*one.launcher.started, *other.launcher.started):
            one.tick_until(lambda process=process: process.exit_code() is not None)
        for _ in range(3):
            other.supervisor.tick()
            one.supervisor.tick()
        assert one.events.supplied + other.events.supplied == 3 * ENOUGH
        assert cases_each(one) == [3] * ENOUGH


def test_a_backfill_pauses_while_serving_is_busy(installation: Installation) -> None:
    installation.plan_children(cases="wait")
    with installation.server(**RULES) as server:
        server.undrafted_traffic()
        server.busy = True
        for _ in range(5):
            server.supervisor.tick()
        installation.clock_offset = timedelta(hours=2)  # longer than a child may take
        server.supervisor.tick()
        assert server.launcher.kinds == ["cases"] and not server.events.supplied
        server.busy = False
        server.tick_until(server.ended(RunState.PROMOTED))


def test_a_run_goes_before_a_backfill(installation: Installation) -> None:
    with installation.server(**RULES) as server:
        server.undrafted_traffic()
        server.traffic()
        server.tick_until(server.ended(RunState.PROMOTED))
        assert server.launcher.kinds == ["train"]
        assert server.unseen.tokens(WHO) == 12 * ENOUGH


def test_a_watch_goes_before_a_backfill(installation: Installation) -> None:
    with installation.server(**RULES) as server:
        ref = server.promote()
        server.undrafted_traffic()
        server.tick_until(server.watched(ref.id))
        server.tick_until(lambda: len(server.launcher.kinds) == 3)
        assert server.launcher.kinds == ["train", "score", "cases"]


def test_a_requested_run_does_not_wait_for_a_backfill(installation: Installation) -> None:
    installation.plan_children(cases="hang half way")
    with installation.server(**RULES) as server:
        server.undrafted_traffic()
        server.tick_until(lambda: server.events.supplied > 0)
        run = server.supervisor.request_training(None)
        assert (run.state, run.generations) == (RunState.TRAINING, ENOUGH // 2)
        assert server.launcher.started[0].exit_code() is not None
        assert server.unseen.tokens(WHO) == 12 * ENOUGH // 2
        server.tick_until(server.ended(RunState.PROMOTED))
        check_consistent(server)


def test_a_generation_that_was_trained_on_is_not_backfilled(installation: Installation) -> None:
    """A run trains on the whole generation once one of its cases is claimed."""
    with installation.server(**RULES) as server:
        server.undrafted_traffic()
        change = (
            "insert into failure_cases (seq, position, drafted, target, p, q, margin, tie)"
            " select seq, 1, 2, 3, 0.5, 0.5, 1.0, false from generations",
            "update generations set cases = 1",
        )
        server.db.write(lambda connection: [connection.execute(text(one)) for one in change]).result(60)
        server.supervisor.request_training(None)
        server.tick_until(server.ended(RunState.PROMOTED))
        server.supervisor.activate(server.adapters.all()[0].id)  # no watch
        for _ in range(5):
            server.supervisor.tick()
        assert server.launcher.kinds == ["train"] and cases_each(server) == [1] * ENOUGH


def test_disabled_training_starts_no_backfill(installation: Installation) -> None:
    with installation.server(**RULES, enabled=False) as server:
        server.undrafted_traffic()
        server.generations.add([generation("other")]).result(60)
        for _ in range(5):
            server.supervisor.tick()
        assert not server.launcher.started
