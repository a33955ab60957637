"""Erases texts in all processes of a database: first everything outside the database forgets them, then the rows are
deleted."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Set

from service.core import Erased, Forget, Selection, Unavailable
from service.lifecycle.context import LifecycleContext
from service.lifecycle.jobs import Job, JobSlot
from service.lifecycle.training import RunJob

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
ABANDONED_SECONDS = 900.0
"""An erasure that takes longer than this has lost its caller and must be requested again."""
WAIT_SECONDS = 60.0
"""Longest wait for other processes to forget erased texts, and of an ended child's run for the erasure to end."""


class Eraser:
    """Carries out erasures in this process, those it started and those of other processes. forget: by name, every store
    of request text outside the database. A child that may have read an erased text is ended."""

    def __init__(self, context: LifecycleContext, slot: JobSlot, forget: Mapping[str, Forget]) -> None:
        self._context = context
        self._slot = slot
        self._forget = forget
        self._newest = 0
        """The newest erasure carried out here."""
        self._seen: dict[int, float] = {}
        """When an unfinished erasure was first seen here, by its number."""
        self._ended_jobs: dict[int, tuple[Job, float]] = {}
        """Jobs that were ended for an erasure, by its number, and until when their runs wait for the erasure's end."""

    @property
    def waiting(self) -> bool:
        """Whether a run of this process, whose child was ended, still waits for the end of an erasure."""
        return bool(self._ended_jobs)

    @property
    def under_way(self) -> bool:
        """Whether any process is erasing texts. The texts are still in the log, and nothing new may read them."""
        return bool(self._context.stores.erasures.asked())

    def erase(self, selection: Selection, *, retire_adapters: bool) -> Erased:
        """Makes every process of the database forget the texts, then deletes their rows. Raises Unavailable when a
        process does not answer, StoreError; calling it again completes what is left."""
        erasures = self._context.stores.erasures
        number = erasures.ask(selection)
        try:
            self._wait_for_all(number)
            return self._context.stores.lineage.erase(selection, retire_adapters=retire_adapters)
        finally:
            erasures.end(number)
            self.carry_out()

    def carry_out(self) -> None:
        """Forgets the texts that any process is erasing, and ends runs whose texts have been erased."""
        asked = self._context.stores.erasures.asked()
        open_numbers = {number for number, _ in asked}
        for number, (job, until) in list(self._ended_jobs.items()):
            # Not earlier: the erasure deletes the run's rows and notes that its candidate learnt an erased text.
            if number not in open_numbers or time.monotonic() > until:
                del self._ended_jobs[number]
                job.abandon("a text that it had read was erased")
        for number, selection in asked:
            if number > self._newest:
                self._end_job_for(number, selection)
                self._forget_here(selection)
                self._context.members.acknowledge_erasure(number)
                self._newest = number
        self._end_abandoned(open_numbers)

    def _end_abandoned(self, open_numbers: Set[int]) -> None:
        """Drops abandoned erasures: nothing starts during an erasure, so none may last forever."""
        now = time.monotonic()
        self._seen = {number: self._seen.get(number, now) for number in open_numbers}
        for number, since in self._seen.items():
            if now - since > ABANDONED_SECONDS:
                log.warning("an erasure was not finished: request it again")
                self._context.stores.erasures.end(number)

    def forget_everything(self) -> None:
        """For a process that was removed: it cannot know what was erased in the meantime."""
        self._ended_jobs.clear()
        self._forget_here(Selection(everything=True))

    def drop_ended_jobs(self) -> list[Job]:
        """Stops waiting for erasures and returns the jobs whose runs waited for one."""
        jobs = [job for job, _ in self._ended_jobs.values()]
        self._ended_jobs.clear()
        return jobs

    def _forget_here(self, selection: Selection) -> None:
        for forget in self._forget.values():
            forget(selection)

    def _end_job_for(self, number: int, selection: Selection) -> None:
        # Messages that the child has already sent may name its texts.
        self._slot.poll()
        if self._may_hold(selection) and (job := self._slot.end()) is not None:
            self._ended_jobs[number] = (job, time.monotonic() + WAIT_SECONDS)

    def _may_hold(self, selection: Selection) -> bool:
        """Whether the child may have read one of the texts. Jobs other than training are short and restart
        automatically: they are always ended."""
        lineage = self._context.stores.lineage
        if not isinstance(self._slot.job, RunJob):
            return True
        return self._slot.job.may_hold(lineage.runs(selection), held_out=lineage.held_out(selection))

    def _wait_for_all(self, number: int) -> None:
        """Carries out an erasure here and waits for all other processes. Raises Unavailable, naming one that has not
        answered."""
        members, end = self._context.members, time.monotonic() + WAIT_SECONDS
        # One of their erasures may be waiting for this process.
        self.carry_out()
        while others := members.still_to_erase(number):
            if time.monotonic() > end:
                where = f"process {others[0].pid} on host {others[0].host}"
                raise Unavailable(f"{where} has not forgotten the texts yet: repeat the request")
            time.sleep(POLL_SECONDS)
            self.carry_out()
        # A process that missed its lease has to rejoin, and forgets everything then.
        members.remove_ended()
