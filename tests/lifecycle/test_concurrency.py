"""Many threads, two supervisors and a clock start one run at a time."""

import threading
import time
from contextlib import suppress

import pytest

from service.core import (
    AdapterState,
    RunState,
    StoreError,
)
from service.lifecycle.clock import Clock
from tests.support.databases import BOTH, POSTGRES
from tests.support.lifecycle_server import WHO, Installation, check_consistent, lapse


@BOTH
def test_ticks_from_many_threads_start_one_run(installation: Installation) -> None:
    with installation.server() as server:
        server.traffic()
        stop = threading.Event()

        def hammer() -> None:
            while not stop.is_set():
                server.supervisor.tick()
                time.sleep(0.005)

        threads = [threading.Thread(target=hammer) for _ in range(8)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 60
        while not server.ended(RunState.PROMOTED)() and time.monotonic() < end:
            time.sleep(0.02)
        stop.set()
        for thread in threads:
            thread.join()
        assert [run.state for run in server.runs.latest(10)] == [RunState.PROMOTED]
        assert len(server.launcher.started) == 1


@POSTGRES
@pytest.mark.promise(15)
def test_two_supervisors_on_one_database_start_one_run(installation: Installation) -> None:
    with installation.server() as one, installation.server() as other:
        one.traffic()
        end = time.monotonic() + 60
        servers = [one, other]
        while not one.ended(RunState.PROMOTED)() and time.monotonic() < end:
            threads = [threading.Thread(target=server.supervisor.tick) for server in servers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert [run.state for run in one.runs.latest(10)] == [RunState.PROMOTED]
        assert len(one.launcher.started) + len(other.launcher.started) == 1
        one.supervisor.tick()  # the supervisor that did not start it follows the rows
        other.supervisor.tick()
        assert one.engine.active == other.engine.active == one.adapters.all()[0].id


@POSTGRES
@pytest.mark.promise(15)
def test_the_run_of_a_process_that_fell_silent_is_given_up(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server() as gone, installation.server(cooldown_seconds=300.0) as other:
        gone.traffic()
        gone.tick_until(lambda: gone.runs.current(WHO) is not None)
        for _ in range(3):
            other.supervisor.tick()
        assert other.runs.current(WHO) is not None
        lapse(installation.url, gone.members.token)
        other.supervisor.tick()
        assert [run.state for run in other.runs.latest(10)] == [RunState.LOST]
        # It was only slow: its late messages change nothing.
        with suppress(StoreError):
            gone.supervisor.tick()
        gone.supervisor.stop()
        assert gone.launcher.started[0].exit_code() is not None
        assert [run.state for run in other.runs.latest(10)] == [RunState.LOST]


@BOTH
def test_a_supervisor_that_lost_its_run_ends_its_child(installation: Installation) -> None:
    with installation.server() as server:
        server.traffic()
        server.tick_until(lambda: server.runs.current(WHO) is not None)
        run = server.runs.current(WHO)
        assert run is not None
        server.runs.move(run.id, run.fencing, RunState.ENDED, error="taken")
        installation.plan_children(train="hang")
        server.tick_until(lambda: server.launcher.started[0].exit_code() is not None)
        assert not [ref for ref in server.adapters.all() if ref.run == run.id and ref.state is AdapterState.ACTIVE]


@BOTH
def test_the_clock_drives_the_whole_cycle(installation: Installation) -> None:
    with installation.server() as server:
        server.traffic()
        clock = Clock(server.supervisor.tick, 0.05)
        clock.start()
        end = time.monotonic() + 60
        while not server.ended(RunState.PROMOTED)() and time.monotonic() < end:
            time.sleep(0.02)
        clock.stop()
        assert server.ended(RunState.PROMOTED)()
        check_consistent(server)
