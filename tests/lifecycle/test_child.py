"""Messages that a child may send, and how its exit is detected."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from service.core import Progress, RunState, Score
from service.lifecycle.child import Child, Pause
from service.lifecycle.launcher import Process, ProcessLauncher
from service.lifecycle.messages import Candidate, Done, Failed, Scores, Throttled, parse

ROUNDS = {"rounds": 3, "accepted": 5, "predicted": 4.5}
SCORE = {"generation": "g", "domain": "", "tokens": 40, "agreed": 20, "calls": [30, 20], **ROUNDS}
CANDIDATE = {"type": "candidate", "folder": "/a/b", "sha256": "ff", "rank": 4, "scale": 2, "keys": ["q"], "frozen": 9}


def test_every_message_of_the_protocol_is_understood() -> None:
    assert parse({"type": "progress", "step": 1, "steps": 2, "loss": 0.5}) == Progress(1, 2, 0.5)
    assert parse({"type": "progress", "step": 1, "steps": 2, "grad_norm": float("inf")}) == Progress(1, 2)
    assert parse(CANDIDATE) == Candidate(Path("/a/b"), "ff", 4, 2.0, ("q",))
    score = Score("g", "", 40, 20, (30.0, 20.0), rounds=3, accepted=5, predicted=4.5)
    assert parse({"type": "scores", "scores": {"0": [SCORE]}}) == Scores({"0": (score,)}, {})
    chat = {"0": [SCORE | {"conversation": "c"}]}
    assert parse({"type": "scores", "scores": chat, "golden": {"0": [SCORE]}}) == Scores(
        {"0": (replace(score, conversation="c"),)}, {"0": (score,)}
    )
    assert parse({"type": "failed", "reason": "no"}) == Failed("no", RunState.FAILED)
    assert parse({"type": "failed", "reason": "no", "memory": True}) == Failed("no", RunState.OUT_OF_MEMORY)
    assert parse({"type": "throttled", "seconds": 1.5}) == Throttled(1.5)
    assert parse({"type": "done"}) == Done()


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"type": "hello"},
        {"type": "progress"},
        {"type": "progress", "step": "1", "steps": 2},
        {"type": "progress", "step": True, "steps": 2},
        {"type": "progress", "step": 1, "steps": 2, "loss": "low"},
        {"type": "failed"},
        {"type": "failed", "reason": ""},
        {"type": "scores"},
        {"type": "scores", "scores": [SCORE]},
        {"type": "scores", "scores": {"0": SCORE}},
        *({"type": "scores", "scores": {"0": [{**SCORE, name: None}]}} for name in SCORE),
        {"type": "scores", "scores": {"0": [{**SCORE, "calls": 20}]}},
        {"type": "scores", "scores": {"0": [{**SCORE, "calls": [30, None]}]}},
        {"type": "scores", "scores": {"0": [{**SCORE, "calls": [30, float("nan")]}]}},
        {"type": "scores", "scores": {"0": [{**SCORE, "tokens": -1}]}},
        {"type": "scores", "scores": {"0": [SCORE]}, "steps": {"0": 0.0}},
        {"type": "scores", "scores": {"0": [SCORE]}, "steps": {"0": float("nan")}},
        {"type": "scores", "scores": {"0": [SCORE]}, "steps": [1.0]},
        *({**CANDIDATE, name: None} for name in ("folder", "sha256", "rank", "scale", "keys")),
        {**CANDIDATE, "scale": float("inf")},
    ],
)
def test_anything_else_is_refused(message: Mapping[str, object]) -> None:
    with pytest.raises(
        ValueError,
        match=r"unknown message type|is not (an object|a list|a string|a non-empty string|a count|a finite number|positive)",
    ):
        parse(message)


def started(tmp_path: Path, code: str) -> tuple[Child, Process]:
    process = ProcessLauncher(tmp_path / "child.log", command=("-c", code)).launch({"kind": "train"})
    return Child(process), process


def listen(child: Child, seconds: float = 10.0) -> None:
    """Wait until the child has ended."""
    end = time.monotonic() + seconds
    while not any(isinstance(message, Done | Failed) for message in child.inbox):
        assert time.monotonic() < end
        child.poll(60.0)
        time.sleep(0.01)


def test_the_last_messages_are_read_before_the_end(tmp_path: Path) -> None:
    child, process = started(tmp_path, """print('{"type": "progress", "step": 1, "steps": 1}\\n{"type": "done"}')""")
    listen(child)
    assert list(child.inbox) == [Progress(1, 1), Done()]
    assert process.exit_code() == 0
    assert not child.over, "it has not been acted on yet"
    child.inbox.clear()
    assert child.over


def test_messages_after_the_last_one_are_ignored(tmp_path: Path) -> None:
    text = '{"type": "done"}\\n{"type": "failed", "reason": "late"}'
    child, _ = started(tmp_path, f"print('{text}')")
    listen(child)
    child.poll(60.0)
    assert list(child.inbox) == [Done()]


@pytest.mark.parametrize(
    ("code", "state", "reason"),
    [
        ("import sys; sys.exit(3)", RunState.CRASHED, "exit code 3"),
        ("pass", RunState.CRASHED, "exit code 0"),
        ("import os; os.abort()", RunState.CRASHED, "exit code -6 (SIGABRT)"),
        ("print('[1, 2]', flush=True); import sys; sys.stdin.read()", RunState.CRASHED, "unreadable"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", RunState.OUT_OF_MEMORY, "memory is short"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", RunState.ENDED, "ended by SIGTERM"),
        (
            # Under nohup it would be ignored.
            "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGHUP)",
            RunState.ENDED,
            "ended by SIGHUP",
        ),
    ],
)
def test_an_exit_without_a_final_message_says_how_the_child_ended(
    tmp_path: Path, code: str, state: RunState, reason: str
) -> None:
    child, process = started(tmp_path, code)
    listen(child)
    (last,) = child.inbox
    assert isinstance(last, Failed) and last.state is state and reason in last.reason
    assert process.exit_code() is not None


def test_time_is_limited(tmp_path: Path) -> None:
    _, process = started(tmp_path, "import sys; sys.stdin.read()")
    times = [1000.0]
    child = Child(process, lambda: times[0])
    times[0] += 60
    child.poll(60.0)
    assert not child.inbox and process.exit_code() is None
    times[0] += 1
    child.poll(60.0)
    assert child.inbox[0] == Failed("the child did not end within 60 s of work", RunState.TIMED_OUT)
    assert process.exit_code() is not None


def test_time_for_which_it_was_throttled_or_paused_does_not_count(tmp_path: Path) -> None:
    text = """print('{"type": "throttled", "seconds": 100}', flush=True); import sys; sys.stdin.read()"""
    _, process = started(tmp_path, text)
    times = [1000.0]
    child = Child(process, lambda: times[0])
    end = time.monotonic() + 10
    times[0] += 160
    while True:
        # It is over only until the message is read.
        child.poll(1000.0)
        if child.throttled:
            break
        assert time.monotonic() < end
        time.sleep(0.01)
    child.poll(60.0)
    child.pause(Pause.BUSY, True)
    times[0] += 3600
    child.poll(60.0)
    child.pause(Pause.BUSY, False)
    child.poll(60.0)
    assert not child.inbox and not child.ended
    times[0] += 1
    child.poll(60.0)
    assert child.ended


def test_a_child_that_does_not_listen_is_ended_by_force(tmp_path: Path) -> None:
    _, process = started(tmp_path, "import time; time.sleep(60)")
    began = time.monotonic()
    process.stop(0.2)
    assert process.exit_code() == -9
    assert time.monotonic() - began < 10


def test_progress_arrives_as_it_was_sent() -> None:
    sent = Progress(3, 9, loss=0.5, grad_norm=0.1, tokens_per_second=7.0, seconds_left=2.0, writing=True)
    assert parse(json.loads(json.dumps({"type": "progress", **asdict(sent)}))) == sent
