"""The loop's conscience: one idempotent tick that reaps, gates, promotes, watches, rolls back, starts and cleans up.

The truth is in rows. What is kept in memory (the child, a count of failed comparisons) may vanish at any moment: the next start
finds every run and adapter in a legal state and goes on from there. Where several processes share the database, one of a pair
leads: it starts runs and comparisons. All follow the rows.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime

from service.core import (
    BARE_DRAFT,
    AdapterRef,
    AdapterState,
    BadRequest,
    Conflict,
    Erased,
    Forget,
    IllegalMove,
    Launcher,
    Provenance,
    Selection,
    StoreError,
    TrainingRun,
    Trigger,
    Unavailable,
    Verdict,
)
from service.lifecycle import gate, policy, training
from service.lifecycle.children import Pause
from service.lifecycle.parts import Job, Parts, Rules
from service.lifecycle.surroundings import Surroundings
from service.lifecycle.switching import Events, Switching
from service.lifecycle.traffic import Traffic
from service.lifecycle.watch import Watch
from service.store.adapters import Adapters
from service.store.erasures import Erasures
from service.store.files import sweep
from service.store.generations import Generations
from service.store.lineage import Lineage
from service.store.members import Members
from service.store.replay import Replay
from service.store.round_costs import MeasuredCosts
from service.store.runs import Runs

__all__ = ["Rules", "Supervisor"]

log = logging.getLogger(__name__)

WATCHES = 16
"""Verdicts of the watch that are looked through for adapters taken back in a row."""
CLEAN_EVERY = 40
"""Ticks between two looks at how much is stored."""
COSTS_SECONDS = 3600.0
"""How often a server says again what rounds cost there."""
SWEEP_GRACE_SECONDS = 86_400.0
"""How long a folder is left alone that no row knows, where another process may be about to name it."""
ERASE_POLL_SECONDS = 0.1
ERASE_SECONDS = 60.0
"""Longest wait for other processes to forget what is erased, and of a child's run for its texts to be."""


class Supervisor:
    """core.Operator, and the tick. members: this process, which has joined. `who` is what serves now; busy: whether serving
    needs the machine for itself; strain: why the machine cannot spare what training takes (None: as far as the system tells, by
    the rules); now: this machine's time, and that of the rows where it is given; judge: decides about candidates; machine: the
    kind of machine that this is; forget: every place outside the rows that keeps texts when their requests have ended, by name.

    At most one child at a time. A run is this supervisor's own from the moment it claimed it; another's is left alone as long
    as its process is a member.
    """

    def __init__(
        self,
        *,
        members: Members,
        runs: Runs,
        adapters: Adapters,
        lineage: Lineage,
        generations: Generations,
        replay: Replay,
        costs: MeasuredCosts,
        erasures: Erasures,
        switching: Switching,
        launcher: Launcher,
        events: Events,
        rules: Rules,
        who: Provenance,
        busy: Callable[[], bool] = lambda: False,
        strain: Callable[[], str | None] | None = None,
        forget: Mapping[str, Forget] | None = None,
        now: Callable[[], datetime] | None = None,
        judge: Callable[..., Verdict] = gate.judge,
        machine: str = "this machine",
    ) -> None:
        self._parts = Parts(
            members=members,
            runs=runs,
            adapters=adapters,
            lineage=lineage,
            generations=generations,
            replay=replay,
            costs=costs,
            erasures=erasures,
            switching=switching,
            launcher=launcher,
            events=events,
            rules=rules,
            who=who,
            now=now or (lambda: datetime.now(UTC)),
            judge=judge,
            machine=machine,
        )
        self._rows_now = now or members.now
        self._watch = Watch(self._parts)
        self._traffic = Traffic(self._parts)
        self._busy = busy
        self._strain = strain or Surroundings.here(rules.training)
        self._forget = forget or {}
        self._lock = threading.RLock()
        self._pausing = threading.Lock()
        self._job: Job | None = None
        self._erased = 0
        """The newest erasure that has been carried out here."""
        self._parked: dict[int, tuple[Job, float]] = {}
        """Jobs that were ended for an erasure, by its number, and until when their runs wait for its end."""
        self._not_served = ""
        """Why the active adapter was not served last time."""
        self._costs_at = -math.inf
        self._ticks = 0
        self._stopped = False

    # -------------------------------------------------------------------------------------------------- start and stop

    def start(self) -> None:
        """Say which pair is served, put right what processes left that ended, and serve what the rows say."""
        with self._lock:
            self._parts.members.serve(self._parts.who, trains=self._trains)
            self._give_up_the_dead()
            self._clean()
            if self._parts.who.draft:
                self._serve_active()

    def stop(self) -> None:
        """End a child under way; its run becomes CRASHED and its cases are free again. Idempotent."""
        with self._lock:
            self._stopped = True
            jobs = [parked for parked, _ in self._parked.values()]
            self._parked.clear()
            if (job := self._end_child()) is not None:
                jobs.append(job)
            try:
                for each in jobs:
                    each.abandon("the server was stopped")
            except StoreError as error:
                log.warning("the next start has to put the run right: %s", error)

    @property
    def working(self) -> bool:
        """Whether a child is under way."""
        return self._job is not None

    def pause_child(self) -> None:
        """Pause the child under way while serving is busy, or let it go on. Called whenever that changes, and by every tick;
        waits for no tick. The run's row says so at the next one."""
        with self._pausing:
            if (job := self._job) is not None:
                job.child.pause(Pause.BUSY, self._busy(), self._parts.now())

    def tick(self) -> None:
        """One look at everything; safe to call at any time, from any thread, any number of times. Raises what went
        wrong; the next tick tries again."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._stopped:
                return
            self._reap()
            self._carry_out_erasures()
            self._give_up_the_dead()
            if self._parts.who.draft:
                self._say_costs()
                if self._parts.switching.behind():
                    self._serve_active()
                if self._job is None:
                    self._end_own_run()
                # On top of what serves: where that cannot be loaded nothing is trained.
                if self._trains and self._parts.members.leads() and not self._parts.switching.behind():
                    self._work()
                # A child that was just started, when serving was busy already.
                self.pause_child()
            if self._ticks % CLEAN_EVERY == 0:
                self._clean()
            self._ticks += 1
        finally:
            self._lock.release()

    def follow(self) -> None:
        """Do at once what other processes of the database have decided: forget what they erase, serve what they promote; and
        give up those that have ended. Called more often than `tick`; does nothing while that is at work."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._stopped:
                return
            self._carry_out_erasures()
            self._give_up_the_dead()
            if self._parts.who.draft and self._parts.switching.behind():
                self._serve_active()
        except StoreError:
            # Ticks say so, which are fewer.
            pass
        finally:
            self._lock.release()

    def rejoin(self) -> None:
        """This process did not answer for too long and was given up: forget all, since what was erased meanwhile is not known,
        and join again."""
        with self._lock:
            if self._stopped:
                return
            log.warning(
                "others of the database gave this process up: its run is lost, and it forgets what it remembers"
            )
            self._end_child()
            self._parked.clear()
            for forget in self._forget.values():
                forget(Selection(everything=True))
            # Only now may it write again: what it had to write was of texts that may be erased.
            self._parts.members.join()
            self._parts.members.serve(self._parts.who, trains=self._trains)

    # --------------------------------------------------------------------------------------------- the tick's steps

    def _reap(self) -> None:
        job = self._job
        if job is None:
            return
        job.child.listen(self._parts.now(), self._parts.rules.training.timeout_seconds)
        try:
            self.pause_child()
            job.pause(self._busy(), self._strain())
            while job.child.inbox:
                job.heed(job.child.inbox[0])
                # Taken off only now: had the database been away, the next tick would try again.
                job.child.inbox.popleft()
        except IllegalMove as error:
            log.warning("the child is ended, its run is not ours any more: %s", error)
            job.child.stop()
            self._job = None
            return
        if job.child.over:
            self._job = None

    @property
    def _trains(self) -> bool:
        return self._parts.rules.training.run_here and bool(self._parts.who.draft)

    def _end_own_run(self) -> None:
        """A run of this process without a child: an error came between its claim and its start."""
        parts = self._parts
        run = parts.runs.current(parts.who)
        if run is not None and run.owner == parts.members.token and not self._parked:
            parts.crash(run, "its child could not be started")

    def _give_up_the_dead(self) -> None:
        """Processes that have ended, and their runs, of whatever pair."""
        self._parts.members.give_up_the_dead()
        for run in self._parts.runs.orphaned():
            self._parts.give_up(run)

    def _work(self) -> None:
        """Begin what is to be done by one process of the pair."""
        parts = self._parts
        if self._job is not None:
            return
        run = parts.runs.current(parts.who)
        if run is not None:
            # Asked for where nobody trains.
            if run.owner is None and (taken := parts.runs.take(run.id, parts.members.token)) is not None:
                self._begin(taken)
            return
        self._job = self._watch.begin()
        if self._job is None:
            self._start_if_due()

    def _say_costs(self) -> None:
        """Once, and again before they are too old for others to go by."""
        if time.monotonic() - self._costs_at > COSTS_SECONDS:
            self._parts.record_costs()
            self._costs_at = time.monotonic()

    def _serve_active(self) -> None:
        try:
            self._parts.switching.serve_active()
            self._not_served = ""
        except (Unavailable, TimeoutError) as error:
            # It is tried again and again: said once.
            if self._not_served != str(error):
                log.warning("the engine does not serve the active adapter yet: %s", error)
            self._not_served = str(error)

    def _carry_out_erasures(self) -> None:
        """Forget what other processes erase, and let the runs go whose texts are erased by now."""
        asked = self._parts.erasures.asked()
        open_ones = {number for number, _ in asked}
        for number, (job, until) in list(self._parked.items()):
            # Only now: what the run had is deleted by it, which says that its candidate learnt an erased text.
            if number not in open_ones or time.monotonic() > until:
                del self._parked[number]
                job.abandon("a text that it had read was erased")
        for number, selection in asked:
            if number > self._erased:
                self._end_job_for(number, selection)
                for forget in self._forget.values():
                    forget(selection)
                self._parts.members.erased(number)
                self._erased = number

    def _end_job_for(self, number: int, selection: Selection) -> None:
        """End the child where it may have read a text that is erased; its run ends with the erasure."""
        # What the child has said by now may name its texts.
        self._reap()
        if self._may_hold(selection) and (job := self._end_child()) is not None:
            self._parked[number] = (job, time.monotonic() + ERASE_SECONDS)

    def _end_child(self) -> Job | None:
        """End the child under way; its job, of which no row says yet what became."""
        job, self._job = self._job, None
        if job is not None:
            job.child.stop()
        return job

    def _start_if_due(self) -> None:
        rules = self._parts.rules.training
        counts = self._parts.generations.counts(self._parts.who)
        if self._parts.rules.spec.get("k") == 0:
            # The draft is switched off: undrafted texts do not call for a better one.
            counts = replace(counts, undrafted=0)
        decision = policy.decide(
            counts,
            self._parts.runs.newest(self._parts.who),
            self._rows_now(),
            min_cases=rules.min_cases,
            min_tokens=rules.min_tokens,
            cooldown_seconds=rules.cooldown_seconds,
            enabled=rules.enabled,
            watching=self._watch.pending() is not None,
            drifted=rules.enabled and self._traffic.drift().alarm,
            waiting=policy.backoff(
                self._parts.adapters.watched(self._parts.who.draft, WATCHES), self._parts.rules.gate.backoff_seconds
            ),
            strain=self._strain(),
        )
        if isinstance(decision, Trigger) and (run := training.claim(self._parts, decision, None)) is not None:
            self._begin(run)

    def _begin(self, run: TrainingRun) -> None:
        self._job = training.begin(self._parts, run)

    def _clean(self) -> None:
        """Old generations, and what crashed runs left. Folders only while nobody trains: one may be about to be
        named. Of other databases' folders this knows nothing, nor how far their processes are: they have their time."""
        self._parts.generations.purge(self._parts.rules.max_generations).add_done_callback(_report)
        if self._job is not None or self._parts.runs.unfinished():
            return
        self._parts.discard("its run ended without a verdict")
        known = [ref.folder for ref in self._parts.adapters.all()]
        gone = sweep(self._parts.rules.adapters, known, SWEEP_GRACE_SECONDS if self._parts.members.shared else 0.0)
        if gone:
            log.info("removed %d adapter folders that no row knows", len(gone))

    # --------------------------------------------------------------------------------------------- operator's words

    def request_training(self, idempotency_key: str | None) -> TrainingRun:
        """Claim a run and start its child, or leave that to the process that leads. The same key returns the same run.

        Raises Conflict during a run or comparison, without a draft, after `stop`, or where no process trains; BadRequest with
        nothing to learn.
        """
        runs = self._parts.runs
        with self._lock:
            if idempotency_key is not None and (known := runs.by_key(idempotency_key)) is not None:
                return known
            if self._stopped or not self._parts.who.draft:
                raise Conflict("shutting down" if self._stopped else "this server runs without a draft model")
            if self._job is not None or runs.current(self._parts.who) is not None:
                raise Conflict("a training run or a comparison is under way")
            members = self._parts.members
            here = self._trains and members.leads()
            if not here and not members.trained():
                raise Conflict("no process trains for this server: start `redraft trainer`")
            run = training.claim(self._parts, Trigger.MANUAL, idempotency_key, here=here)
            if run is None:
                raise BadRequest("nothing has been recorded yet that a run could learn from")
            if here:
                self._begin(run)
                self.pause_child()
            return runs.get(run.id)

    def run(self, run_id: int) -> TrainingRun:
        """The training run with this id. Raises NotFound."""
        return self._parts.runs.get(run_id)

    def adapters(self) -> list[AdapterRef]:
        """All adapters, newest first."""
        return self._parts.adapters.all()

    def activate(self, adapter_id: int) -> AdapterRef | None:
        """Serve this adapter and end its watch; BARE_DRAFT: no adapter, returns None.

        Raises NotFound, Conflict for an adapter that may not serve, AdapterRefused, Unavailable, TimeoutError.
        """
        adapters, switching = self._parts.adapters, self._parts.switching
        with self._lock:
            ref = None if adapter_id == BARE_DRAFT else adapters.get(adapter_id)
            if ref is not None and ref.state in {AdapterState.CANDIDATE, AdapterState.REJECTED, AdapterState.BROKEN}:
                raise Conflict(f"adapter {adapter_id} is {ref.state}")
            if ref is not None and ref.draft != self._parts.who.draft:
                raise Conflict(f"adapter {adapter_id} belongs to another draft")
            begun = time.perf_counter()
            staged = switching.stage(ref)
            try:
                ref = adapters.activate(adapter_id, self._parts.who.draft)
            except IllegalMove as error:
                raise Conflict(str(error)) from error
            if ref is not None:
                self._watch.excuse(ref, "stays: an operator chose it")
            switching.switch(staged, ref, begun)
            return ref

    def rollback(self, expected: int | None = None) -> AdapterRef | None:
        """Roll back the active adapter and return the one that serves now, None for the bare draft.

        expected: the id that has to be active. Raises Conflict when another is, or when the bare draft serves.
        """
        with self._lock:
            ref = self._parts.adapters.active(self._parts.who.draft)
            serving = BARE_DRAFT if ref is None else ref.id
            if expected is not None and expected != serving:
                raise Conflict(f"adapter {serving} serves, not {expected}: nothing was rolled back")
            if ref is None:
                raise Conflict("the bare draft serves: there is nothing to roll back")
            self._parts.adapters.take_back(ref.id, ref.parent, policy.ROLLED_BACK)
            self._parts.events.rolled_back()
            return self._parts.switching.serve_active()

    def erase(self, selection: Selection, *, retire_adapters: bool = False) -> Erased:
        """See core.Operator. First all that keeps texts forgets them, here and in the other processes of the database, so that
        none comes back, then the rows go. One that raised is to be asked for again: it does what is left."""
        erasures = self._parts.erasures
        with self._lock:
            if self._stopped:
                raise Conflict("shutting down")
            serving = self._parts.serving()
            number = erasures.ask(selection)
            try:
                self._wait_for_all(number)
                erased = self._parts.lineage.erase(selection, retire_adapters=retire_adapters)
            finally:
                erasures.end(number)
                self._carry_out_erasures()
            if self._parts.serving() != serving:
                self._serve_another()
            # The folder of a run that was ended.
            self._clean()
            return erased

    def _wait_for_all(self, number: int) -> None:
        """Carry out an erasure here, and wait until all other processes have. Raises Unavailable, naming one that has not."""
        members, end = self._parts.members, time.monotonic() + ERASE_SECONDS
        # One of theirs may wait for this process meanwhile.
        self._carry_out_erasures()
        while others := members.still_to_erase(number):
            if time.monotonic() > end:
                where = f"process {others[0].pid} on host {others[0].host}"
                raise Unavailable(f"{where} has not forgotten the texts yet: ask again")
            time.sleep(ERASE_POLL_SECONDS)
            self._carry_out_erasures()
        # One that did not answer for too long has to join again, and forgets all by that.
        members.give_up_the_dead()

    def _serve_another(self) -> None:
        """The rows name another adapter: end a run on top of the former one, whose candidate could only be rejected."""
        if (job := self._end_child()) is not None:
            job.abandon("the adapter that it was trained on top of was revoked")
        self._serve_active()

    def _may_hold(self, selection: Selection) -> bool:
        """Whether the child under way may have read one of these texts. Other jobs than training are short, and begin again by
        themselves: they are not asked."""
        lineage = self._parts.lineage
        if not isinstance(self._job, training.TrainingJob):
            return True
        return self._job.may_hold(lineage.runs(selection), held_out=lineage.held_out(selection))


def _report(purge: Future[int]) -> None:
    if (error := purge.exception()) is not None:
        log.warning("old generations were not removed: %s", error)
    elif purge.result():
        log.info("removed %d old generations", purge.result())
