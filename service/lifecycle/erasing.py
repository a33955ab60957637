"""Erasing texts, over all processes of a database: first everything outside the rows forgets them, then the rows go."""

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
"""An erasure that is not over after so long has lost whoever asked for it. It is to be asked for again."""
WAIT_SECONDS = 60.0
"""Longest wait for other processes to forget what is erased, and of an ended child's run for the erasure to end."""


class Eraser:
    """Carries out erasures in this process, its own and those of other processes. forget: every place outside the rows that
    keeps texts after their requests have ended, by name. A child that may have read an erased text is ended."""

    def __init__(self, context: LifecycleContext, slot: JobSlot, forget: Mapping[str, Forget]) -> None:
        self._context = context
        self._slot = slot
        self._forget = forget
        self._newest = 0
        """The newest erasure that has been carried out here."""
        self._seen: dict[int, float] = {}
        """When an erasure that is not over was first seen here, by its number."""
        self._ended_jobs: dict[int, tuple[Job, float]] = {}
        """Jobs that were ended for an erasure, by its number, and until when their runs wait for its end."""

    @property
    def waiting(self) -> bool:
        """Whether a run of this process, without a child by now, still waits for an erasure to end."""
        return bool(self._ended_jobs)

    @property
    def under_way(self) -> bool:
        """Whether texts are being erased, by whatever process: they are in the log still, and nothing may read them anew."""
        return bool(self._context.stores.erasures.asked())

    def erase(self, selection: Selection, *, retire_adapters: bool) -> Erased:
        """Have every process of the database forget the texts, then delete their rows. Raises Unavailable when a process does
        not answer, StoreError; asking again does what is left."""
        erasures = self._context.stores.erasures
        number = erasures.ask(selection)
        try:
            self._wait_for_all(number)
            return self._context.stores.lineage.erase(selection, retire_adapters=retire_adapters)
        finally:
            erasures.end(number)
            self.carry_out()

    def carry_out(self) -> None:
        """Forget what any process erases, and end runs whose texts are erased by now."""
        asked = self._context.stores.erasures.asked()
        open_numbers = {number for number, _ in asked}
        for number, (job, until) in list(self._ended_jobs.items()):
            # Only now: the run's rows are deleted by the erasure, which notes that its candidate learnt an erased text.
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
        """Nothing starts while texts are being erased: that must not be for ever."""
        now = time.monotonic()
        self._seen = {number: self._seen.get(number, now) for number in open_numbers}
        for number, since in self._seen.items():
            if now - since > ABANDONED_SECONDS:
                log.warning("an erasure was not finished: it has to be asked for again")
                self._context.stores.erasures.end(number)

    def forget_everything(self) -> None:
        """For a process that was given up: what was erased meanwhile is not known."""
        self._ended_jobs.clear()
        self._forget_here(Selection(everything=True))

    def drop_ended_jobs(self) -> list[Job]:
        """Wait for no erasure any more; the jobs whose runs did."""
        jobs = [job for job, _ in self._ended_jobs.values()]
        self._ended_jobs.clear()
        return jobs

    def _forget_here(self, selection: Selection) -> None:
        for forget in self._forget.values():
            forget(selection)

    def _end_job_for(self, number: int, selection: Selection) -> None:
        # What the child has sent by now may name its texts.
        self._slot.poll()
        if self._may_hold(selection) and (job := self._slot.end()) is not None:
            self._ended_jobs[number] = (job, time.monotonic() + WAIT_SECONDS)

    def _may_hold(self, selection: Selection) -> bool:
        """Whether the child may have read one of these texts. Other jobs than training are short and are started again by
        themselves: they are always ended."""
        lineage = self._context.stores.lineage
        if not isinstance(self._slot.job, RunJob):
            return True
        return self._slot.job.may_hold(lineage.runs(selection), held_out=lineage.held_out(selection))

    def _wait_for_all(self, number: int) -> None:
        """Carry out an erasure here, and wait until all other processes have. Raises Unavailable, naming one that has not."""
        members, end = self._context.members, time.monotonic() + WAIT_SECONDS
        # One of theirs may wait for this process meanwhile.
        self.carry_out()
        while others := members.still_to_erase(number):
            if time.monotonic() > end:
                where = f"process {others[0].pid} on host {others[0].host}"
                raise Unavailable(f"{where} has not forgotten the texts yet: ask again")
            time.sleep(POLL_SECONDS)
            self.carry_out()
        # One that did not answer for too long has to join again, and forgets everything by that.
        members.remove_ended()
