"""A waiting request pauses the child at once, without waiting for a tick: real engine, real child process."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service.core import Event, Finished, Generation, Prompt, Provenance, Round, Sampling
from service.engine.adapters import bare
from service.engine.decoder import Decoder
from service.engine.engine import Engine
from service.engine.thread import EngineThread
from service.engine.unloading import Unloaded
from service.lifecycle.child import Child, Pause
from service.lifecycle.launcher import ProcessLauncher
from service.lifecycle.request_monitor import RequestMonitor
from tests.support.lifecycle_server import WHO, Installation
from tests.support.oracle import noisy_copy, tiny_llama

ECHO = """
import json, sys, time
for line in sys.stdin:
    if line[0] != "{":
        print(json.dumps({"line": line.strip(), "at": time.monotonic()}), flush=True)
"""
SECONDS = 20.0


class Noop:
    """Detokenizer, recorder and observer that do nothing."""

    text = last_segment = ""

    def reset(self) -> None: ...

    def add_token(self, token: int) -> None: ...

    def finalize(self) -> None: ...

    def record(self, generation: Generation) -> None: ...

    def observe(self, rounds: Sequence[Round], seconds: float) -> None: ...

    def prompt_read(self, tokens: int, reused: int) -> None: ...

    def prefix_read(self, tokens: int) -> None: ...

    def preempted(self) -> None: ...

    def failure_cases(self, ties: int, others: int) -> None: ...

    def draft_failed(self, adapter: int) -> None: ...


class QueueSetup:
    """An engine that decodes one request at a time, its queue's monitor, and a child process that sends back each line."""

    def __init__(self, tmp_path: Path) -> None:
        self.waits: list[float] = []
        self.process = ProcessLauncher(tmp_path / "child.log", command=("-c", ECHO)).launch({"kind": "train"})
        self.child = Child(self.process)
        self.monitor = RequestMonitor(lambda: self.thread.status().waiting, self.pause)
        self.thread = EngineThread(
            self.build, max_rows=1, max_waiting=9, recorder=Noop(), observer=Noop(), on_wait=self.on_wait
        )
        self.thread.start(SECONDS)
        self.monitor.start()

    def build(self, before: Unloaded | None = None) -> Engine:
        base = bare(noisy_copy(tiny_llama(0), 1, 0.3))
        decoder = Decoder(tiny_llama(0), base, vocabulary=97, k=3, prefill_chunk=16)
        return Engine(decoder, base, frozenset(), 2048, Provenance("t", "k", "d"), Noop)

    def on_wait(self) -> None:
        self.waits.append(time.monotonic())
        self.monitor.notify()

    def pause(self) -> None:
        self.child.pause(Pause.BUSY, self.monitor.busy)

    def submit_prompt(self, tokens: int) -> threading.Event:
        ended = threading.Event()

        def sink(event: Event) -> None:
            if isinstance(event, Finished):
                ended.set()

        self.thread.submit(Prompt((5, 6, 7), Sampling(max_tokens=tokens)), sink)
        return ended

    def lines_read(self, count: int) -> list[tuple[str, float]]:
        """The next `count` lines that the child read, with their times."""
        end = time.monotonic() + SECONDS
        found: list[tuple[str, float]] = []
        while len(found) < count:
            assert time.monotonic() < end, found
            found += [(str(message["line"]), float(str(message["at"]))) for message in self.process.poll()]
            time.sleep(0.005)
        return found

    def close(self) -> None:
        self.monitor.stop()
        self.thread.stop()
        self.child.stop()


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[QueueSetup]:
    made = QueueSetup(tmp_path)
    yield made
    made.close()


def test_a_request_that_waits_pauses_the_child_at_once(setup: QueueSetup) -> None:
    setup.submit_prompt(4).wait(SECONDS)
    assert setup.waits == [], "a free row: no request waited"
    running = setup.submit_prompt(300)
    waiting = [setup.submit_prompt(4) for _ in range(3)]
    assert len(setup.waits) == 3
    ((line, at),) = setup.lines_read(1)
    assert line == "pause"
    # Takes 100 ms on an idle machine; a tick would come after 15 s.
    assert at - setup.waits[0] < 2.0
    assert not running.is_set(), "paused while requests waited"
    for ended in (running, *waiting):
        assert ended.wait(SECONDS)
    assert [line for line, _ in setup.lines_read(1)] == ["resume"]
    assert not setup.monitor.busy
    assert setup.process.poll() == []


def test_a_short_gap_in_the_queue_does_not_resume_training(setup: QueueSetup) -> None:
    ended = [setup.submit_prompt(200), setup.submit_prompt(4)]
    assert setup.lines_read(1)[0][0] == "pause"
    for _ in range(3):
        assert all(each.wait(SECONDS) for each in ended)
        ended = [setup.submit_prompt(50), setup.submit_prompt(4)]
    assert all(each.wait(SECONDS) for each in ended)
    assert [line for line, _ in setup.lines_read(1)] == ["resume"]


def test_a_stop_that_comes_just_before_the_flag_is_cleared_is_not_missed() -> None:
    class StoppedLate(threading.Event):
        def clear(self) -> None:
            monitor._stopping = True
            self.set()
            super().clear()

    monitor = RequestMonitor(lambda: 0, lambda: None)
    monitor._wake = StoppedLate()
    monitor.start()
    monitor.notify()
    monitor._thread.join(SECONDS)
    assert not monitor._thread.is_alive()


def test_a_child_pauses_while_there_is_any_reason(setup: QueueSetup) -> None:
    pauses = list[bool]()
    setup.process.pause = lambda paused: pauses.append(paused)
    pause = setup.child.pause
    pause(Pause.BUSY, True)
    pause(Pause.STRAIN, True)
    pause(Pause.BUSY, False)
    assert pauses == [True]
    pause(Pause.STRAIN, False)
    assert pauses == [True, False]


def test_the_supervisor_waits_for_no_tick(installation: Installation) -> None:
    """A long tick, staging an adapter for example, holds the supervisor's lock."""
    installation.plan_children(train="hang")
    with installation.server() as server:
        server.traffic()
        server.tick_until(lambda: server.runs.current(WHO) is not None)
        process, pauses = server.launcher.started[0], list[bool]()
        process.pause = lambda paused: pauses.append(paused)
        with ThreadPoolExecutor(1) as other, server.supervisor._lock:
            for busy in (True, True, False):
                server.busy = busy
                other.submit(server.supervisor.pause_child).result(SECONDS)
        assert pauses == [True, False]


def test_a_child_that_starts_while_serving_is_busy_pauses_at_once(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server() as server:
        server.busy = True
        server.traffic()
        server.tick_until(lambda: server.runs.current(WHO) is not None)
        assert server.supervisor._jobs.job is not None
        assert server.supervisor._jobs.job.child._reasons == {Pause.BUSY}
