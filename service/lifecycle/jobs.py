"""The child at work: one at a time, its messages handled by the job that it was started for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from service.core import IllegalMove
from service.lifecycle.child import Child, Pause
from service.lifecycle.context import LifecycleContext
from service.lifecycle.machine import Strain
from service.lifecycle.messages import Message

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Demand:
    """What serving needs now. waiting: requests wait for a row. asked: a request is being answered, or was a moment ago."""

    waiting: bool = False
    asked: bool = False


class Job(Protocol):
    """A child at work, and what its messages mean."""

    @property
    def child(self) -> Child:
        """The child process of this job."""
        ...

    @property
    def limit_seconds(self) -> float:
        """How long its child may work: time for which it is paused or throttled does not count."""
        ...

    def yields(self, demand: Demand) -> bool:
        """Whether its child pauses for what serving needs: the slot sees to that. Called from any thread."""
        ...

    def pause(self, demand: Demand, strain: Strain | None) -> None:
        """Pause, or end, while the machine cannot spare what the job takes (`strain` says why), else resume."""
        ...

    def give_back_memory(self) -> None:
        """End the child, because requests need the memory that it takes."""
        ...

    def handle(self, message: Message) -> None:
        """Act on the child's next message. May be called again with the same one after it raised."""
        ...

    def abandon(self, reason: str) -> None:
        """Record that the child was ended from outside."""
        ...


class JobSlot:
    """Holds the one job that may be under way. demand: what serving needs now. strain: why the machine cannot spare what
    training takes, None when it can. Not thread-safe but for `pause_for_requests`."""

    def __init__(
        self, context: LifecycleContext, demand: Callable[[], Demand], strain: Callable[[], Strain | None]
    ) -> None:
        self._context = context
        self._demand = demand
        self._strain = strain
        self._pausing = threading.Lock()
        self._job: Job | None = None

    @property
    def job(self) -> Job | None:
        """The job under way."""
        return self._job

    def start(self, job: Job | None) -> None:
        """Take a job whose child has just been started; None: there was nothing to start. The slot must be free."""
        assert self._job is None, "one child at a time"
        self._job = job
        if job is None:
            self._context.loans.give_back()

    def pause_for_requests(self) -> None:
        """Pause the child while it yields to what serving needs, or resume it. May be called from any thread; waits for no
        tick. The run's row shows it at the next tick."""
        with self._pausing:
            if (job := self.job) is not None:
                job.child.pause(Pause.BUSY, job.yields(self._demand()))

    def poll(self) -> None:
        """Handle what the child has sent, and free the slot when it has ended. Raises what a handler raised: the message is
        handled again then."""
        job, loans = self.job, self._context.loans
        if job is None:
            loans.give_back()
            return
        job.child.poll(job.limit_seconds)
        if loans.needed_back and not job.child.ended:
            job.give_back_memory()
        if job.child.ended:
            # Its memory is free; its messages may have to wait for the database.
            loans.give_back()
        try:
            self.pause_for_requests()
            job.pause(self._demand(), self._strain())
            while job.child.inbox:
                job.handle(job.child.inbox[0])
                # Taken off only now: had the database been away, the next tick would try again.
                job.child.inbox.popleft()
        except IllegalMove as error:
            log.warning("the child is ended, its run is not ours any more: %s", error)
            job.child.stop()
            loans.give_back()
            self._job = None
            return
        if job.child.over:
            self._job = None

    def end(self) -> Job | None:
        """End the child under way and free the slot. Returns its job, which no row knows to be over yet."""
        job, self._job = self._job, None
        if job is not None:
            job.child.stop()
            self._context.loans.give_back()
        return job
