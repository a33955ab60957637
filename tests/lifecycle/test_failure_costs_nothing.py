"""Runs that fail, time out, run out of memory, are ended or paused for too long use no text up, and quarantine none. A text
that crashes runs by itself is found and quarantined alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from service.core import RunState, TrainingRun
from service.lifecycle import policy
from service.lifecycle.machine import Strain
from service.lifecycle.training import MEMORY_GIVEN_BACK
from tests.support.databases import BOTH
from tests.support.lifecycle_server import WHO, Installation, Server, check_consistent, generation

TEXTS = 16
RULES: dict[str, Any] = {"min_cases": 1, "min_tokens": 1, "max_generations": TEXTS, "timeout_seconds": 60.0}


@pytest.fixture
def server(installation: Installation) -> Iterator[Server]:
    """One that has recorded TEXTS texts; its children hang."""
    installation.plan_children(train="hang")
    with installation.server(**RULES, spec={"url": installation.url}) as made:
        made.generations.add([generation(f"text {i}") for i in range(TEXTS)]).result(60)
        yield made


def begin(server: Server) -> TrainingRun:
    """The next run, whose child is at work."""
    newest = server.runs.latest(1)
    known = newest[0].id if newest else 0

    def at_work() -> bool:
        run = server.runs.current(WHO)
        return run is not None and run.id > known and run.progress.step > 0

    server.tick_until(at_work)
    run = server.runs.current(WHO)
    assert run is not None
    return run


def ended(server: Server, run: TrainingRun) -> TrainingRun:
    """The run, when it is over; no other has begun, since only a tick begins one."""
    end = time.monotonic() + 60
    while server.supervisor.working:
        assert time.monotonic() < end
        server.supervisor.follow()
        time.sleep(0.01)
    return server.runs.get(run.id)


def nothing_lost(server: Server) -> None:
    counts = server.training_texts.untrained(WHO)
    assert (counts.generations, counts.cases) == (TEXTS, 3 * TEXTS)
    stats = server.generations.stats()
    assert (stats.trained, stats.quarantined) == (0, 0)
    assert server.stores.quarantine.all() == []
    check_consistent(server)


def time_out(server: Server) -> None:
    server.installation.clock_offset += timedelta(seconds=61)


def kill_for_memory(server: Server) -> None:
    os.kill(server.launcher.started[-1].pid, signal.SIGKILL)


def end(server: Server) -> None:
    server.supervisor.end_run(server.runs.latest(1)[0].id)


def shut_down_with_its_service(server: Server) -> None:
    os.kill(server.launcher.started[-1].pid, signal.SIGTERM)


def crash(server: Server) -> None:
    os.kill(server.launcher.started[-1].pid, signal.SIGSEGV)


def memory_is_short(server: Server) -> None:
    server.strain = Strain.MEMORY
    server.supervisor.follow()
    server.strain = None


def pause_for_an_hour(server: Server) -> None:
    server.busy = True
    server.supervisor.follow()
    server.installation.clock_offset += timedelta(hours=1)
    server.supervisor.follow()
    server.busy = False


def on_battery_for_an_hour(server: Server) -> None:
    server.strain = Strain.BATTERY
    server.supervisor.follow()
    server.installation.clock_offset += timedelta(hours=1)
    server.supervisor.follow()
    server.strain = None


@pytest.mark.parametrize(
    ("how", "state", "reason", "next_texts"),
    [
        (time_out, RunState.TIMED_OUT, "the child did not end within 60 s of work", TEXTS // 2),
        (kill_for_memory, RunState.OUT_OF_MEMORY, "as the system does when memory is short", TEXTS // 2),
        (memory_is_short, RunState.OUT_OF_MEMORY, MEMORY_GIVEN_BACK, TEXTS // 2),
        (end, RunState.ENDED, "ended by an operator", TEXTS),
        (shut_down_with_its_service, RunState.ENDED, "ended by SIGTERM", TEXTS),
        (pause_for_an_hour, RunState.ENDED, "30 minutes longer than it worked: serving is busy", TEXTS),
        (on_battery_for_an_hour, RunState.ENDED, "30 minutes longer than it worked: on battery", TEXTS),
        (crash, RunState.CRASHED, "the next run learns from 8 of 16 suspected texts alone", TEXTS // 2),
    ],
)
def test_each_ending_gives_texts_back_and_says_why(
    server: Server, how: Callable[[Server], None], state: RunState, reason: str, next_texts: int
) -> None:
    run = begin(server)
    how(server)
    run = ended(server, run)
    assert run.state is state and reason in str(run.error) and run.texts_given_back
    assert server.events.over == [state] and server.launcher.started[0].exit_code() is not None
    nothing_lost(server)
    assert begin(server).generations == next_texts


@BOTH
def test_three_time_outs_a_kill_for_memory_and_an_operators_end_in_a_row(server: Server) -> None:
    sizes: list[int] = []
    for how in (time_out, time_out, time_out, kill_for_memory, end):
        run = begin(server)
        sizes.append(run.generations)
        how(server)
        assert ended(server, run).texts_given_back
        nothing_lost(server)
    assert sizes == [16, 8, 4, 2, 1]
    server.installation.plan_children()
    server.tick_until(server.ended(RunState.PROMOTED))
    server.supervisor.activate(server.adapters.all()[0].id)
    server.installation.plan_children(train="hang")
    assert begin(server).generations == 2, "doubled after a verdict"


def test_a_server_that_was_killed_costs_its_run_nothing(installation: Installation) -> None:
    installation.plan_children(train="hang")
    for start in range(4):
        with installation.server(**RULES) as server:
            if start == 0:
                server.generations.add([generation(f"text {i}") for i in range(TEXTS)]).result(60)
            assert begin(server).generations == TEXTS
            server.kill()
    rules: dict[str, Any] = {**RULES, "enabled": False}
    with installation.server(**rules) as server:
        assert {run.state for run in server.runs.latest(9)} == {RunState.LOST}
        nothing_lost(server)


@BOTH
@pytest.mark.parametrize("bad", ["text 0", pytest.param("text 11", marks=pytest.mark.nightly)])
def test_a_text_that_crashes_every_child_is_quarantined_alone(server: Server, bad: str) -> None:
    """Real children, which end by SIGSEGV when they read it. The window holds it too."""
    server.installation.plan_children(train=f"crash on {bad}")

    def all_done() -> bool:
        if (active := server.adapters.active(WHO.target, WHO.draft)) is not None:
            server.supervisor.activate(active.id)  # which ends its watch
        return server.training_texts.untrained(WHO).generations == 0 and server.runs.current(WHO) is None

    server.tick_until(all_done)
    runs = server.runs.latest(100)[::-1]
    found = next(run for run in runs if "a text is quarantined" in str(run.error))
    assert runs.index(found) < 8, "in so many runs: the crash, two halves, one for each halving, one alone"
    (aside,) = server.stores.quarantine.all()
    assert (aside.run, aside.generations) == (None, 1)
    assert bad not in {one.id for one in server.training_texts.window(WHO, 0, 100)}
    assert server.generations.stats().trained == 3 * (TEXTS - 1), "all the others were learnt"
    check_consistent(server)


def test_crashes_on_any_texts_quarantine_none_and_wait_longer_and_longer(installation: Installation) -> None:
    installation.plan_children(train="kill")
    with installation.server(**RULES, cooldown_seconds=300.0) as server:
        server.generations.add([generation(f"text {i}") for i in range(TEXTS)]).result(60)
        server.supervisor.tick()
        for wait in (300, 600, 1200, 2400, 4800, 9600, 9600):
            ended(server, server.runs.latest(1)[0])
            runs = len(server.runs.latest(100))
            installation.clock_offset = timedelta(seconds=wait - 60)
            server.supervisor.tick()
            assert len(server.runs.latest(100)) == runs, f"it waits for {wait} s"
            installation.clock_offset = timedelta(seconds=wait + 1)
            server.supervisor.tick()
            assert len(server.runs.latest(100)) == runs + 1
        last = ended(server, server.runs.latest(1)[0])
        assert "runs crash whatever texts they learn from" in str(last.error)
        nothing_lost(server)


def test_a_run_is_half_as_large_after_each_that_was_too_large_and_twice_after_each_verdict() -> None:
    too_large, judged, other = RunState.OUT_OF_MEMORY, RunState.REJECTED, RunState.CRASHED
    sizes = [
        ([], 800),
        ([(too_large, 800)], 400),
        ([(too_large, 800), (RunState.TIMED_OUT, 400)], 200),
        ([(too_large, 100)], 50),
        ([(too_large, 800), (other, 400), (RunState.ENDED, 400), (RunState.LOST, 400), (RunState.FAILED, 400)], 400),
        ([(too_large, 800), (judged, 400)], 800),
        ([(too_large, 800), (too_large, 400), (judged, 20)], 400),
        ([(too_large, 1), (too_large, 1)], 1),
    ]
    for past, expected in sizes:
        assert policy.run_size(past, 800) == expected, past
