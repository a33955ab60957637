"""The slot for the running child: one at a time; its messages are handled by the job it was started for."""

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
    """A running child and the handling of its messages."""

    @property
    def child(self) -> Child:
        """The child process of this job."""
        ...

    @property
    def limit_seconds(self) -> float:
        """Working time allowed for its child; paused and throttled time does not count."""
        ...

    def yields(self, demand: Demand) -> bool:
        """Whether its child should pause for serving; the slot pauses it. Called from any thread."""
        ...

    def pause(self, demand: Demand, strain: Strain | None) -> None:
        """Pauses or ends the child while the machine cannot spare what it takes (`strain` is the reason), otherwise
        resumes it."""
        ...

    def give_back_memory(self) -> None:
        """Ends the child because requests need its memory."""
        ...

    def handle(self, message: Message) -> None:
        """Handles the child's next message. If it raises, it may be called again with the same message."""
        ...

    def abandon(self, reason: str) -> None:
        """Records that the child was ended from outside."""
        ...


class JobSlot:
    """Holds the one job that may run. demand: what serving needs now. strain: why the machine cannot spare what
    training takes, or None. Not thread-safe, except `pause_for_requests`."""

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
        """The running job."""
        return self._job

    def start(self, job: Job | None) -> None:
        """Takes a job whose child has just been started; None: nothing was started. The slot must be free."""
        assert self._job is None, "one child at a time"
        self._job = job
        if job is None:
            self._context.loans.give_back()

    def pause_for_requests(self) -> None:
        """Pauses the child while it has to yield to serving, or resumes it. May be called from any thread,
        independently of the tick. The run's row shows the pause at the next tick."""
        with self._pausing:
            if (job := self.job) is not None:
                job.child.pause(Pause.BUSY, job.yields(self._demand()))

    def poll(self) -> None:
        """Handles the child's messages and frees the slot when it has ended. Raises a handler's error; the message is
        then handled again."""
        job, loans = self.job, self._context.loans
        if job is None:
            loans.give_back()
            return
        job.child.poll(job.limit_seconds)
        if loans.needed_back and not job.child.ended:
            job.give_back_memory()
        if job.child.ended:
            # Its memory is free, although its messages may have to wait for the database.
            loans.give_back()
        try:
            self.pause_for_requests()
            job.pause(self._demand(), self._strain())
            while job.child.inbox:
                job.handle(job.child.inbox[0])
                # Removed only after handling: if the database was unavailable, the next tick tries again.
                job.child.inbox.popleft()
        except IllegalMove as error:
            log.warning("the child is ended because its run no longer belongs to this process: %s", error)
            job.child.stop()
            loans.give_back()
            self._job = None
            return
        if job.child.over:
            self._job = None

    def end(self) -> Job | None:
        """Ends the running child and frees the slot. Returns its job, whose row does not say yet that it is over."""
        job, self._job = self._job, None
        if job is not None:
            job.child.stop()
            self._context.loans.give_back()
        return job
