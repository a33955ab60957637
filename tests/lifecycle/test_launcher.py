"""Processes that do one job after another: which are kept, for what, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.lifecycle import launcher
from service.lifecycle.launcher import Process, ProcessLauncher
from tests.support.waiting import until

CHILD = """
import json, sys
for line in sys.stdin:
    job = json.loads(line)
    if job.get("dies"):
        sys.exit(3)
    print(json.dumps({"type": "failed", "reason": "no"} if job.get("fails") else {"type": "done", "waits": True}), flush=True)
"""


class Started:
    """A launcher, and the cores that it left to this process."""

    def __init__(self, tmp_path: Path) -> None:
        self.cores: list[int] = []
        self.launcher = ProcessLauncher(tmp_path / "child.log", 1, ("-c", CHILD), self.cores.append)

    def do(self, kind: str, **job: object) -> Process:
        """One job, from its start to the end that its Child makes of it."""
        process = self.launcher.launch({"kind": kind, **job})
        until(lambda: any(message["type"] in {"done", "failed"} for message in process.poll()))
        process.stop(5.0)
        return process


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    started = Started(tmp_path)
    yield started
    started.launcher.end_ready()


def test_a_comparison_goes_to_the_process_that_trained(started: Started) -> None:
    first = started.do("train")
    assert first.exit_code() is None
    second = started.do("score")
    assert second.pid == started.do("score").pid == first.pid
    assert started.cores[-1] == started.launcher._cores, "a process that waits takes no core"


def test_training_starts_in_a_process_of_its_own(started: Started) -> None:
    first = started.do("train")
    second = started.do("train")
    assert second.pid != first.pid and first.exit_code() is not None, "at most one waits"


def test_a_process_whose_job_failed_is_not_kept(started: Started) -> None:
    failed = started.do("score", fails=True)
    assert failed.exit_code() is not None
    assert started.do("score").pid != failed.pid


def test_a_job_that_is_stopped_before_it_is_done_ends_its_process(started: Started) -> None:
    process = started.do("score")
    assert started.launcher.launch({"kind": "score"}) is process
    process.stop(5.0)
    assert process.exit_code() is not None


def test_a_process_that_died_while_it_waited_is_replaced(started: Started) -> None:
    first = started.do("train")
    first._write('{"dies": true}')
    until(lambda: first.exit_code() is not None)
    assert started.do("score").pid != first.pid


def test_it_waits_no_longer_than_a_minute(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "READY_SECONDS", 0.2)
    first = started.do("train")
    until(lambda: first.exit_code() is not None)
    assert started.do("score").pid != first.pid


def test_serving_has_every_core_during_practice_and_fewer_during_training(tmp_path: Path) -> None:
    cores: list[int] = []
    launch = ProcessLauncher(tmp_path / "child.log", 1, ("-c", CHILD), cores.append)
    launch._cores = 8
    for job in ({"practice": {"minutes": 1}}, {"practice": None}, {}):
        process = launch.launch({"kind": "train", **job})
        process.end(5.0)
    assert cores == [8, 8, 7, 8, 7, 8]


def test_an_erasure_ends_it(started: Started) -> None:
    first = started.do("train")
    started.launcher.end_ready()
    assert first.exit_code() is not None
    started.launcher.end_ready()


def test_the_log_of_children_is_rotated(started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, older = tmp_path / "child.log", tmp_path / "child.log.1"
    monkeypatch.setattr(launcher, "LOG_BYTES", 100)
    log.write_bytes(b"a" * 99)
    started.do("train", fails=True)
    assert log.read_bytes()[:99] == b"a" * 99 and not older.exists()
    log.write_bytes(b"b" * 100)
    started.do("train", fails=True)
    assert older.read_bytes() == b"b" * 100 and b"b" not in log.read_bytes()
    log.write_bytes(b"c" * 200)
    started.do("train", fails=True)
    assert older.read_bytes() == b"c" * 200, "one earlier file stays"
