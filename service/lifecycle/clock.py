"""What makes time pass for the supervisor: APScheduler in memory. It knows when to tick and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.background import BackgroundScheduler


class Clock:
    """Calls `tick` every `seconds`, on one thread of its own, never twice at once; missed ticks are made up by one."""

    def __init__(self, tick: Callable[[], object], seconds: float) -> None:
        self._scheduler = BackgroundScheduler(
            jobstores={"default": MemoryJobStore()}, executors={"default": ThreadPoolExecutor(1)}, timezone=UTC
        )
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
        """The first tick comes at once."""
        self._scheduler.start()

    def stop(self, *, wait: bool = True) -> None:
        """No tick after this; wait: for one under way, unless a tick itself calls this. Idempotent."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=wait)
