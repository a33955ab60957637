import threading
import time
from datetime import datetime, timedelta, tzinfo

import pytest

from service.lifecycle.clock import Clock


def test_it_ticks_until_it_is_stopped() -> None:
    ticks: list[float] = []
    enough = threading.Event()

    def tick() -> None:
        ticks.append(time.monotonic())
        if len(ticks) == 5:
            enough.set()

    clock = Clock(tick, 0.05)
    time.sleep(0.15)
    assert not ticks, "not before the start"
    began = time.monotonic()
    clock.start()
    try:
        assert enough.wait(5)
    finally:
        clock.stop()
    assert ticks[0] - began < 1.0
    seen = len(ticks)
    time.sleep(0.2)
    assert len(ticks) == seen
    clock.stop()


@pytest.mark.promise(16)
def test_slow_ticks_never_overlap_and_stop_waits_for_the_last() -> None:
    running, most, ended = 0, 0, 0
    begun = threading.Semaphore(0)

    def tick() -> None:
        nonlocal running, most, ended
        running += 1
        most = max(most, running)
        begun.release()
        time.sleep(0.15)
        running -= 1
        ended += 1

    clock = Clock(tick, 0.02)
    clock.start()
    for _ in range(3):
        assert begun.acquire(timeout=60)
    clock.stop()
    assert most == 1
    assert running == 0
    # About forty intervals passed in three ticks: one tick makes up for those that were missed.
    assert ended <= 5


def test_a_tick_that_fails_does_not_stop_the_clock() -> None:
    again = threading.Semaphore(0)

    def tick() -> None:
        again.release()
        raise RuntimeError("the database is away")

    clock = Clock(tick, 0.02)
    clock.start()
    try:
        for _ in range(3):
            assert again.acquire(timeout=60)
    finally:
        clock.stop()


def test_it_goes_on_where_the_machine_s_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hours, as when a machine starts before it has asked for the time."""

    class Now(datetime):
        back = timedelta(0)

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # pyright: ignore[reportIncompatibleMethodOverride]
            return datetime.now(tz) - cls.back

    monkeypatch.setattr("apscheduler.schedulers.base.datetime", Now)
    monkeypatch.setattr("service.lifecycle.clock.datetime", Now)
    ticks = threading.Semaphore(0)
    clock = Clock(ticks.release, 0.05)
    clock.start()
    try:
        assert ticks.acquire(timeout=5)
        Now.back = timedelta(hours=3)
        for _ in range(10):
            assert ticks.acquire(timeout=5)
    finally:
        clock.stop()
