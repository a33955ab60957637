"""The supervisor's timer: an in-memory APScheduler that only decides when to tick."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.background import BackgroundScheduler


class _Scheduler(BackgroundScheduler):
    """Continues when the system clock is set back, where APScheduler would wait until it has caught up. seconds: tick
    interval."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            jobstores={"default": MemoryJobStore()}, executors={"default": ThreadPoolExecutor(1)}, timezone=UTC
        )
        self._seconds = seconds

    def _process_jobs(self) -> float | None:
        latest = datetime.now(UTC) + timedelta(seconds=self._seconds + 1.0)
        for job in self.get_jobs():
            if job.next_run_time > latest:
                job.modify(next_run_time=datetime.now(UTC))
        wait: float | None = super()._process_jobs()
        return None if wait is None else min(wait, self._seconds)


class Clock:
    """Calls `tick` every `seconds` on a dedicated thread, never concurrently. Missed ticks are replaced by a single one."""

    def __init__(self, tick: Callable[[], object], seconds: float) -> None:
        self._scheduler = _Scheduler(seconds)
        self._scheduler.add_job(
            tick,
            "interval",
            seconds=seconds,
            coalesce=True,
            max_instances=1,
            misfire_grace_time=None,
            next_run_time=datetime.now(UTC),
        )

    def start(self) -> None:
        """Starts the timer; the first tick comes at once."""
        self._scheduler.start()

    def stop(self, *, wait: bool = True) -> None:
        """Stops the timer. wait: wait for a running tick, unless the tick itself calls this. Idempotent."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=wait)
