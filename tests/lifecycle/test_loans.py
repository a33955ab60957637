"""Children borrow memory of serving: they wait for it, and end when requests need it, at no cost to any text."""

from datetime import timedelta

import pytest

from service.core import Conflict, RunState
from service.lifecycle.loans import SHORT
from service.lifecycle.training import MEMORY_NEEDED
from service.lifecycle.watch import MEMORY_SECONDS
from tests.support.lifecycle_server import ENOUGH, WHO, Installation, Server, check_consistent


def under_way(server: Server) -> None:
    server.tick_until(lambda: (run := server.runs.current(WHO)) is not None and run.progress.step > 0)


def test_a_run_waits_until_memory_is_lent_and_plans_with_it(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server() as server:
        server.engine.lendable = 999
        server.traffic()
        for _ in range(3):
            server.supervisor.tick()
        assert server.runs.latest(9) == [] and server.launcher.started == []
        with pytest.raises(Conflict, match=SHORT):
            server.supervisor.request_training(None)
        server.engine.lendable = 1500
        under_way(server)
        assert server.launcher.specs[0]["memory"] == 1500 == server.engine.lent
        server.supervisor.end_run(server.runs.latest(1)[0].id)
        server.tick_until(lambda: server.engine.lent == 0 or len(server.launcher.started) > 1)
        check = server.launcher.started[0].exit_code()
        assert check is not None


def test_a_run_ends_when_requests_need_its_memory(installation: Installation) -> None:
    """An operator's too: requests would wait for its end."""
    installation.plan_children(train="hang")
    with installation.server(cooldown_seconds=3600.0) as server:
        server.traffic()
        run = server.supervisor.request_training(None)
        under_way(server)
        assert server.engine.lent == 4000
        server.engine.loan_needed = True
        server.supervisor.follow()
        assert server.engine.lent == 0 and server.launcher.started[0].exit_code() is not None
        server.supervisor.follow()
        run = server.runs.get(run.id)
        assert (run.state, run.error, run.texts_given_back) == (RunState.OUT_OF_MEMORY, MEMORY_NEEDED, True)
        assert server.training_texts.untrained(WHO).generations == ENOUGH
        assert server.supervisor.request_training(None).generations == ENOUGH // 2, "the next one is smaller"
        server.supervisor.end_run(server.runs.latest(1)[0].id)
        while server.supervisor.working:
            server.supervisor.follow()
        check_consistent(server)


def test_the_memory_is_back_before_the_database_is(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server() as server:
        server.traffic()
        under_way(server)
        server.db.writes_left = 0
        server.engine.loan_needed = True
        server.supervisor.follow()
        assert server.engine.lent == 0 and server.launcher.started[0].exit_code() is not None
        server.db.writes_left = None
        server.tick_until(server.ended(RunState.OUT_OF_MEMORY))


def test_a_comparison_waits_and_one_that_is_ended_is_no_failure(installation: Installation) -> None:
    with installation.server() as server:
        ref = server.promote()
        server.engine.lendable = 499
        server.traffic(cases=0)
        for _ in range(3):
            server.supervisor.tick()
        assert "score" not in server.launcher.kinds
        installation.plan_children(score="hang")
        server.engine.lendable = 2**40
        installation.clock_offset += timedelta(seconds=MEMORY_SECONDS)
        for _ in range(5):
            server.tick_until(lambda: server.supervisor.working)
            assert server.launcher.kinds[-1] == "score" and server.engine.lent == 500
            server.engine.loan_needed = True
            server.supervisor.follow()
            assert not server.supervisor.working and server.engine.lent == 0
            installation.clock_offset += timedelta(seconds=MEMORY_SECONDS)
        assert not server.watched(ref.id)()
        installation.plan_children()
        server.tick_until(server.watched(ref.id))


def test_what_an_engine_that_died_meanwhile_lends_is_nothing(installation: Installation) -> None:
    with installation.server() as server:
        server.engine.dead = True
        server.traffic()
        server.supervisor.tick()
        assert server.runs.latest(9) == []
