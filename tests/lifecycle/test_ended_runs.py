"""Runs that an operator ends: the child is gone, the texts are free, and whichever process of the database may be asked."""

from __future__ import annotations

import psutil
import pytest

from service.core import AdapterState, Conflict, NotFound, RunState, TrainingRun
from tests.support.databases import POSTGRES
from tests.support.lifecycle_server import ENOUGH, WHO, Installation, Server, check_consistent

REASON = "ended by an operator"


def started(server: Server, state: RunState = RunState.TRAINING) -> TrainingRun:
    """A run whose child has said that it is at work."""
    if server.runs.latest(1) == []:
        server.traffic()
    run = server.supervisor.request_training(None)
    server.tick_until(lambda: server.runs.get(run.id).state is state and server.runs.get(run.id).progress.step > 0)
    return server.runs.get(run.id)


def alive(server: Server) -> bool:
    pid = server.launcher.started[-1].pid
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.promise(19)
def test_a_run_under_way_is_ended_with_its_child(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server(cooldown_seconds=300.0) as server:
        for _ in range(3):
            run = started(server)
            assert alive(server)
            ended = server.supervisor.end_run(run.id)
            assert (ended.state, ended.error) == (RunState.ENDED, REASON)
            assert ended == server.supervisor.run(run.id)
            assert not alive(server) and not server.supervisor.working
            assert server.events.over[-1] is RunState.ENDED
            assert server.training_texts.untrained(WHO).generations == ENOUGH
            with pytest.raises(Conflict, match=f"run {run.id} is over \\(ended\\)"):
                server.supervisor.end_run(run.id)
        assert server.stores.quarantine.all() == []
        server.supervisor.tick()
        assert server.runs.current(WHO) is None, "none starts by itself before the cooldown is over"
        with pytest.raises(NotFound):
            server.supervisor.end_run(99)
        check_consistent(server)


def test_the_candidate_of_a_run_that_is_ended_never_serves(installation: Installation) -> None:
    installation.plan_children(train="hang after the candidate")
    with installation.server() as server:
        run = started(server, RunState.SCORING)
        server.supervisor.end_run(run.id)
        (ref,) = server.adapters.all()
        assert ref.state is AdapterState.BROKEN
        check_consistent(server)


def test_a_run_that_is_decided_cannot_be_ended(installation: Installation) -> None:
    with installation.server() as server:
        ref = server.promote()
        assert ref.run is not None
        with pytest.raises(Conflict, match="promoted"):
            server.supervisor.end_run(ref.run)
        assert server.adapters.active(WHO.target, WHO.draft) == ref
        server.supervisor.stop()
        with pytest.raises(Conflict, match="shutting down"):
            server.supervisor.end_run(ref.run)


@POSTGRES
def test_a_run_of_another_process_is_ended_and_that_process_stops_its_child(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server() as first, installation.server() as second:
        run = started(first)
        assert second.supervisor.end_run(run.id).error == REASON
        assert alive(first), "only its own process can stop it"
        first.supervisor.follow()
        assert not alive(first) and not first.supervisor.working
        assert first.runs.get(run.id).error == REASON
        installation.plan_children()
        first.tick_until(first.ended(RunState.PROMOTED))
        check_consistent(first)


@POSTGRES
def test_a_run_that_waits_for_a_process_is_ended(installation: Installation) -> None:
    with installation.server(), installation.server(run_here=False) as second:
        second.traffic()
        run = second.supervisor.request_training(None)
        assert run.owner is None
        assert second.supervisor.end_run(run.id).state is RunState.ENDED
        assert second.runs.unfinished() == []
