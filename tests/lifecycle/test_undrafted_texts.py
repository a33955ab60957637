"""Undrafted texts count towards a run with the cases that are expected of them; its child works these out first."""

from typing import Any

import pytest
from sqlalchemy import text

from service.core import RunState, StoreError, Trigger
from tests.support.databases import POSTGRES
from tests.support.lifecycle_server import ENOUGH, WHO, Installation, Server, check_consistent, generation

RULES: dict[str, Any] = {"min_cases": 3 * ENOUGH, "min_tokens": 12 * ENOUGH}


def cases_each(server: Server) -> list[int]:
    """Number of cases of every generation that runs may learn from, oldest first."""
    query = text(
        "select count(c.id) from generations g left join failure_cases c on c.seq = g.seq"
        " where g.split = 'train' group by g.seq order by g.seq"
    )
    with server.db.read() as connection:
        return list(connection.execute(query).scalars())


def undrafted_tokens(server: Server) -> int:
    return server.training_texts.untrained(WHO).undrafted


def test_a_run_works_out_the_cases_of_undrafted_texts_and_learns_from_them(installation: Installation) -> None:
    with installation.server(**RULES) as server:
        names = server.undrafted_traffic()
        before = [g.rounds for g in server.generations.by_ids(names)]
        installation.plan_children(cases=dict.fromkeys(names, 3))
        server.tick_until(server.ended(RunState.PROMOTED))
        assert server.launcher.kinds == ["train"]
        (run,) = server.runs.latest(9)
        assert (run.trigger, run.generations, run.cases) == (Trigger.CASES, ENOUGH, 3 * ENOUGH)
        assert [g.rounds for g in server.generations.by_ids(names)] == before, "rounds are history"
        assert cases_each(server) == [3] * ENOUGH and not undrafted_tokens(server)
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


def test_a_claim_that_turns_out_too_poor_is_given_back(installation: Installation) -> None:
    with installation.server(**RULES) as server:
        names = server.undrafted_traffic()
        installation.plan_children(cases={name: 3 * (i > 0) for i, name in enumerate(names)}, train="hang")
        server.tick_until(server.ended(RunState.FAILED))
        (run,) = server.runs.latest(9)
        assert run.error is not None and "21 of 24 failure cases" in run.error
        assert server.launcher.started[0].exit_code() is not None, "its child is ended"
        assert run.texts_given_back and server.events.over == [RunState.FAILED]
        for _ in range(5):
            server.supervisor.tick()
        assert len(server.launcher.started) == 1, "what is known to be too little starts nothing"
        assert server.training_texts.untrained(WHO).cases == 21 and not undrafted_tokens(server)
        installation.plan_children()
        server.traffic(1)
        server.tick_until(server.ended(RunState.PROMOTED))
        assert server.runs.latest(1)[0].generations == ENOUGH, "the text without cases stays"
        check_consistent(server)


def test_a_requested_run_needs_one_case(installation: Installation) -> None:
    with installation.server(min_cases=999, min_tokens=9999) as server:
        for found, state in ((0, RunState.FAILED), (1, RunState.PROMOTED)):
            (name,) = server.undrafted_traffic(1)
            installation.plan_children(cases={name: found})
            server.supervisor.request_training(None)
            server.tick_until(server.ended(state))


@pytest.mark.parametrize("plan", ["kill", "kill half way"])
def test_a_child_that_always_crashes_uses_none_of_them_up(installation: Installation, plan: str) -> None:
    with installation.server(**RULES) as server:
        names = server.undrafted_traffic()
        installation.plan_children(train=plan, cases=dict.fromkeys(names, 3))
        server.tick_until(server.ended(RunState.CRASHED, 3))
        assert server.generations.stats().quarantined == server.generations.stats().trained == 0
        later = server.undrafted_traffic()
        installation.plan_children(cases=dict.fromkeys([*names, *later], 3))
        server.tick_until(server.ended(RunState.PROMOTED))
        check_consistent(server)


@pytest.mark.parametrize("killed", [False, True])
def test_what_a_child_found_before_the_server_ended_is_not_asked_again(
    installation: Installation, killed: bool
) -> None:
    with installation.server(**RULES) as server:
        names = server.undrafted_traffic()
        installation.plan_children(train="hang half way", cases=dict.fromkeys(names, 3))
        server.tick_until(lambda: sum(cases_each(server)) > 0)
        child = server.launcher.started[0]
        if killed:
            server.kill()
        else:
            server.supervisor.stop()
        assert child.exit_code() is not None
    installation.plan_children(cases=dict.fromkeys(names, 2))
    with installation.server(min_cases=1, min_tokens=RULES["min_tokens"]) as successor:
        successor.tick_until(successor.ended(RunState.PROMOTED))
        assert sorted(cases_each(successor)) == [2] * (ENOUGH // 2) + [3] * (ENOUGH // 2)
        check_consistent(successor)


@pytest.mark.parametrize("after", [False, True])
def test_a_failed_write_loses_no_cases(installation: Installation, after: bool) -> None:
    """A write fails before or after its commit."""
    with installation.server(**RULES) as server:
        names = server.undrafted_traffic()
        installation.plan_children(cases=dict.fromkeys(names, 3))
        server.supervisor.tick()
        server.db.arm(1, after=after, error=StoreError("away"))
        with pytest.raises(StoreError):
            server.tick_until(lambda: False)
        server.tick_until(server.ended(RunState.PROMOTED))
        assert server.launcher.kinds == ["train"]
        assert cases_each(server) == [3] * ENOUGH and server.runs.latest(1)[0].cases == 3 * ENOUGH


@pytest.mark.parametrize("after", [False, True])
def test_a_failed_write_gives_a_poor_claim_back_all_the_same(installation: Installation, after: bool) -> None:
    with installation.server(**RULES) as server:
        names = server.undrafted_traffic()
        installation.plan_children(cases=dict.fromkeys(names, 1))
        server.tick_until(lambda: len(server.launcher.started) == 1)
        child = server.launcher.started[0]
        while child.exit_code() is None:
            pass
        server.db.arm(3, after=after, error=StoreError("away"))  # two messages with cases, then the end
        with pytest.raises(StoreError):
            server.tick_until(lambda: False)
        server.tick_until(server.ended(RunState.FAILED))
        assert server.events.over.count(RunState.FAILED) == (0 if after else 1)
        assert server.training_texts.untrained(WHO).cases == ENOUGH
        check_consistent(server)


@POSTGRES
def test_two_servers_on_one_database_learn_from_them_once(installation: Installation) -> None:
    with installation.server(**RULES) as one, installation.server(**RULES) as other:
        names = one.undrafted_traffic()
        installation.plan_children(cases=dict.fromkeys(names, 3))
        one.supervisor.tick()
        other.supervisor.tick()
        assert (one.launcher.kinds, other.launcher.kinds) == (["train"], [])
        one.tick_until(one.ended(RunState.PROMOTED))
        assert cases_each(one) == [3] * ENOUGH


@pytest.mark.parametrize("rules", [{"enabled": False}, {"spec": {"k": 0}}])
def test_they_start_nothing_where_training_or_the_draft_is_switched_off(
    installation: Installation, rules: dict[str, Any]
) -> None:
    with installation.server(**RULES | rules) as server:
        server.undrafted_traffic()
        for _ in range(5):
            server.supervisor.tick()
        assert not server.launcher.started
