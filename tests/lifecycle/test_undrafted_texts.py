"""Undrafted texts count towards a run with the cases that are expected of them, and a run learns from them."""

from typing import Any

import pytest

from service.core import RunState, Trigger
from tests.support.databases import POSTGRES
from tests.support.lifecycle_server import ENOUGH, WHO, Installation, Server, check_consistent, generation

RULES: dict[str, Any] = {"min_cases": 3 * ENOUGH, "min_tokens": 12 * ENOUGH}


def undrafted_tokens(server: Server) -> int:
    return server.training_texts.untrained(WHO).undrafted


def test_a_run_learns_from_undrafted_texts_once(installation: Installation) -> None:
    with installation.server(**RULES) as server:
        server.undrafted_traffic()
        server.tick_until(server.ended(RunState.PROMOTED))
        assert server.launcher.kinds == ["train"]
        (run,) = server.runs.latest(9)
        assert (run.trigger, run.generations, run.cases) == (Trigger.CASES, ENOUGH, 0)
        assert undrafted_tokens(server) == 0
        check_consistent(server)


def test_too_few_wait_until_there_are_more(installation: Installation) -> None:
    with installation.server(**RULES) as server:
        server.undrafted_traffic(ENOUGH - 1)
        for _ in range(5):
            server.supervisor.tick()
        assert not server.launcher.started
        server.undrafted_traffic(1)
        server.supervisor.tick()
        assert server.launcher.kinds == ["train"]


@pytest.mark.parametrize(("cases", "starts"), [(1, False), (2, True)])
def test_they_count_at_the_last_known_rate_of_cases(installation: Installation, cases: int, starts: bool) -> None:
    """Two cases in each text of twelve tokens are enough with those that there are, one is not."""
    with installation.server(min_cases=4 * ENOUGH, min_tokens=1) as server:
        server.undrafted_traffic()
        server.generations.add([generation(f"{i}", cases=cases, tokens=12) for i in range(ENOUGH)]).result(60)
        assert server.training_texts.untrained(WHO).rate == cases / 12
        for _ in range(3):
            server.supervisor.tick()
        assert bool(server.launcher.started) is starts


def test_a_child_that_always_crashes_uses_none_of_them_up(installation: Installation) -> None:
    with installation.server(**RULES) as server:
        server.undrafted_traffic()
        installation.plan_children(train="kill")
        server.tick_until(server.ended(RunState.CRASHED, 3))
        assert server.generations.stats().quarantined == server.generations.stats().trained == 0
        installation.plan_children()
        server.undrafted_traffic()
        server.tick_until(server.ended(RunState.PROMOTED))
        check_consistent(server)


@POSTGRES
def test_two_servers_on_one_database_learn_from_them_once(installation: Installation) -> None:
    with installation.server(**RULES) as one, installation.server(**RULES) as other:
        one.undrafted_traffic()
        one.supervisor.tick()
        other.supervisor.tick()
        assert (one.launcher.kinds, other.launcher.kinds) == (["train"], [])
        one.tick_until(one.ended(RunState.PROMOTED))


@pytest.mark.parametrize("rules", [{"enabled": False}, {"spec": {"k": 0}}])
def test_they_start_nothing_where_training_or_the_draft_is_switched_off(
    installation: Installation, rules: dict[str, Any]
) -> None:
    with installation.server(**RULES | rules) as server:
        server.undrafted_traffic()
        for _ in range(5):
            server.supervisor.tick()
        assert not server.launcher.started
