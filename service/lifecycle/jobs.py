"""The child at work: one at a time, its messages handled by the job that it was started for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from service.core import IllegalMove
from service.lifecycle.child import Child, Pause
from service.lifecycle.context import LifecycleContext
from service.lifecycle.messages import Message

log = logging.getLogger(__name__)


class Job(Protocol):
    """A child at work, and what its messages mean."""

    @property
    def child(self) -> Child:
        """The child process of this job."""
        ...

    @property
    def yields(self) -> bool:
        """Whether its child pauses while requests wait: the slot sees to that."""
        ...

    def pause(self, busy: bool, strain: str | None) -> None:
        """Pause while the machine cannot spare what the job takes (`strain` says why), else resume. busy: requests wait."""
        ...

    def handle(self, message: Message) -> None:
        """Act on the child's next message. May be called again with the same one after it raised."""
        ...

    def abandon(self, reason: str) -> None:
        """Record that the child was ended from outside."""
        ...


class JobSlot:
    """Holds the one job that may be under way. busy: whether serving needs the machine for itself. strain: why the machine
    cannot spare what training takes, None when it can. Not thread-safe but for `pause_for_requests`."""

    def __init__(self, context: LifecycleContext, busy: Callable[[], bool], strain: Callable[[], str | None]) -> None:
        self._context = context
        self._busy = busy
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

    def pause_for_requests(self) -> None:
        """Pause a child that yields while serving is busy, or resume it. May be called from any thread; waits for no tick. The
        run's row shows it at the next tick."""
        with self._pausing:
            if (job := self.job) is not None and job.yields:
                job.child.pause(Pause.BUSY, self._busy(), self._context.now())

    def poll(self) -> None:
        """Handle what the child has sent, and free the slot when it has ended. Raises what a handler raised: the message is
        handled again then."""
        job = self.job
        if job is None:
            return
        job.child.poll(self._context.now(), self._context.rules.training.timeout_seconds)
        try:
            self.pause_for_requests()
            job.pause(self._busy(), self._strain())
            while job.child.inbox:
                job.handle(job.child.inbox[0])
                # Taken off only now: had the database been away, the next tick would try again.
                job.child.inbox.popleft()
        except IllegalMove as error:
            log.warning("the child is ended, its run is not ours any more: %s", error)
            job.child.stop()
            self._job = None
            return
        if job.child.over:
            self._job = None

    def end(self) -> Job | None:
        """End the child under way and free the slot. Returns its job, which no row knows to be over yet."""
        job, self._job = self._job, None
        if job is not None:
            job.child.stop()
        return job
