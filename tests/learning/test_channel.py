"""The child's line to its parent, over a real pipe."""

from __future__ import annotations

import io
import json
import os
import time
from threading import Thread

import pytest

from service.learning.channel import Channel
from tests.support.waiting import until

PIECE = 0.1
"""Seconds of work between two calls of `hold`."""


@pytest.fixture
def pipe() -> tuple[int, int]:
    # The writing end stays open: at its end the process would exit.
    return os.pipe()


def test_hold_waits_while_the_parent_pauses_and_says_for_how_long(pipe: tuple[int, int]) -> None:
    channel = Channel(pipe[0], io.StringIO())
    os.write(pipe[1], b"the job\npause\n")
    assert next(channel.jobs()) == "the job"
    until(lambda: channel.paused)

    def resume() -> None:
        time.sleep(0.3)
        os.write(pipe[1], b"resume\n")

    thread = Thread(target=resume)
    thread.start()
    assert channel.hold() >= 0.29
    thread.join()
    assert not channel.paused
    assert channel.hold() < 0.1


def test_work_is_throttled_to_its_share_of_the_time_which_is_no_pause(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.learning.channel._REPORT_SECONDS", 2.5 * PIECE)
    sent = io.StringIO()
    channel = Channel(pipe[0], sent)
    channel.share = 0.25
    channel.hold()
    started_at, paused = time.perf_counter(), 0.0
    for _ in range(3):
        time.sleep(PIECE)
        paused += channel.hold()
    assert 3 * PIECE / 0.25 <= time.perf_counter() - started_at < 8 * PIECE / 0.25
    assert paused < PIECE
    reported = [json.loads(line) for line in sent.getvalue().splitlines()]
    assert {message["type"] for message in reported} == {"throttled"} and len(reported) == 3
    assert reported[-1]["seconds"] >= 3 * PIECE * 3


def test_with_all_of_the_time_nothing_is_throttled(pipe: tuple[int, int]) -> None:
    channel = Channel(pipe[0], io.StringIO())
    time.sleep(0.2)
    started_at = time.perf_counter()
    channel.hold()
    assert time.perf_counter() - started_at < 0.1


def test_a_new_job_begins_without_the_pause_of_the_one_before(pipe: tuple[int, int]) -> None:
    channel = Channel(pipe[0], io.StringIO())
    jobs = channel.jobs()
    os.write(pipe[1], b"one\npause\n")
    assert next(jobs) == "one"
    until(lambda: channel.paused)
    os.write(pipe[1], b"two\n")
    assert next(jobs) == "two"
    assert channel.hold() < 0.1
