"""The loop's conscience: one idempotent tick that reaps, gates, promotes, watches, rolls back, starts and cleans up.

The truth is in rows. What is kept in memory (the child, a count of failed comparisons) may vanish at any moment: the
next start finds every run and adapter in a legal state and goes on from there.
"""

from __future__ import annotations

import logging
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
    Progress,
    Provenance,
    RunState,
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
from service.store.files import sweep
from service.store.generations import Generations
from service.store.lineage import Lineage
from service.store.replay import Replay
from service.store.runs import Runs

__all__ = ["Rules", "Supervisor"]

log = logging.getLogger(__name__)

WATCHES = 16
"""Verdicts of the watch that are looked through for adapters taken back in a row."""
CLEAN_EVERY = 40
"""Ticks between two looks at how much is stored."""


class Supervisor:
    """core.Operator, and the tick. `who` is what serves now; busy: whether serving needs the machine for itself; strain: why
    the machine cannot spare what training takes (None: as far as the system tells, by the rules); judge: decides about
    candidates; machine: the kind of machine that this is; forget: every place outside the rows that keeps texts when their
    requests have ended, by name.

    At most one child at a time. A run is this supervisor's own from the moment it claimed it; another's is left alone
    as long as it moves.
    """

    def __init__(
        self,
        *,
        runs: Runs,
        adapters: Adapters,
        lineage: Lineage,
        generations: Generations,
        replay: Replay,
        switching: Switching,
        launcher: Launcher,
        events: Events,
        rules: Rules,
        who: Provenance,
        busy: Callable[[], bool] = lambda: False,
        strain: Callable[[], str | None] | None = None,
        forget: Mapping[str, Forget] | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        judge: Callable[..., Verdict] = gate.judge,
        machine: str = "",
    ) -> None:
        self._parts = Parts(
            runs, adapters, lineage, generations, replay, switching, launcher, events, rules, who, now, judge, machine
        )
        self._watch = Watch(self._parts)
        self._traffic = Traffic(self._parts)
        self._busy = busy
        self._strain = strain or Surroundings.here(rules.training)
        self._forget = forget or {}
        self._lock = threading.RLock()
        self._pausing = threading.Lock()
        self._job: Job | None = None
        self._own: int | None = None
        self._stranger: tuple[int, RunState, Progress] | None = None
        self._stranger_since = now()
        self._ticks = 0
        self._stopped = False

    # -------------------------------------------------------------------------------------------------- start and stop

    def start(self) -> None:
        """Put right what an earlier process left, and serve what the rows say."""
        with self._lock:
            # Of any pair: one server a database, so nobody runs them.
            for run in self._parts.runs.unfinished():
                self._parts.crash(run, "the server ended while it ran")
            self._clean()
            if self._parts.who.draft:
                try:
                    self._parts.switching.serve_active()
                except (Unavailable, TimeoutError) as error:
                    log.warning("the engine does not serve the active adapter yet: %s", error)

    def stop(self) -> None:
        """End a child under way; its run becomes CRASHED and its cases are free again. Idempotent."""
        with self._lock:
            self._stopped = True
            job, self._job = self._job, None
            if job is None:
                return
            job.child.stop()
            try:
                job.abandon("the server was stopped")
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
            if self._parts.who.draft:
                if self._parts.switching.behind():
                    self._parts.switching.serve_active()
                if self._job is None:
                    self._take_over()
                if self._job is None:
                    self._job = self._watch.begin()
                if self._job is None:
                    self._start_if_due()
                # A child that was just started, when serving was busy already.
                self.pause_child()
            if self._ticks % CLEAN_EVERY == 0:
                self._clean()
            self._ticks += 1
        finally:
            self._lock.release()

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

    def _take_over(self) -> None:
        """A run that is under way without a child of ours: our own lost its child before it had one (an error in
        between); another's is given up when nothing about it has changed for as long as a run may take."""
        run = self._parts.runs.current(self._parts.who)
        if run is None:
            self._stranger = None
            return
        if run.id == self._own:
            self._parts.crash(run, "its child could not be started")
            return
        now, seen = self._parts.now(), (run.id, run.state, run.progress)
        if seen != self._stranger:
            self._stranger, self._stranger_since = seen, now
        elif (now - self._stranger_since).total_seconds() > self._parts.rules.training.timeout_seconds:
            self._parts.crash(run, "whoever ran it has gone")

    def _start_if_due(self) -> None:
        rules = self._parts.rules.training
        latest = self._parts.runs.latest(1)
        counts = self._parts.generations.counts(self._parts.who)
        if self._parts.rules.spec.get("k") == 0:
            # The draft is switched off: undrafted texts do not call for a better one.
            counts = replace(counts, undrafted=0)
        decision = policy.decide(
            counts,
            latest[0] if latest else None,
            self._parts.now(),
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
        self._own = run.id
        self._job = training.begin(self._parts, run)

    def _clean(self) -> None:
        """Old generations, and what crashed runs left. Folders only while nobody trains: one may be about to be
        named."""
        self._parts.generations.purge(self._parts.rules.max_generations).add_done_callback(_report)
        if self._job is not None or self._parts.runs.unfinished():
            return
        self._parts.discard("its run ended without a verdict")
        gone = sweep(self._parts.rules.adapters, [ref.folder for ref in self._parts.adapters.all()])
        if gone:
            log.info("removed %d adapter folders that no row knows", len(gone))

    # --------------------------------------------------------------------------------------------- operator's words

    def request_training(self, idempotency_key: str | None) -> TrainingRun:
        """Claim a run and start its child. The same key returns the same run.

        Raises Conflict during a run or comparison, without a draft or after `stop`; BadRequest with nothing to learn.
        """
        runs = self._parts.runs
        with self._lock:
            if idempotency_key is not None and (known := runs.by_key(idempotency_key)) is not None:
                return known
            if self._stopped or not self._parts.who.draft:
                raise Conflict("shutting down" if self._stopped else "this server runs without a draft model")
            if self._job is not None or runs.current(self._parts.who) is not None:
                raise Conflict("a training run or a comparison is under way")
            run = training.claim(self._parts, Trigger.MANUAL, idempotency_key)
            if run is None:
                raise BadRequest("nothing has been recorded yet that a run could learn from")
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
        """See core.Operator. First all that keeps texts forgets them, so that none comes back, then the rows go. One that
        raised is to be asked for again: it does what is left."""
        with self._lock:
            if self._stopped:
                raise Conflict("shutting down")
            # What the child has said by now may name its texts.
            self._reap()
            serving = self._parts.serving()
            job = self._job if self._may_hold(selection) else None
            if job is not None:
                self._job = None
                job.child.stop()
            try:
                for forget in self._forget.values():
                    forget(selection)
                erased = self._parts.lineage.erase(selection, retire_adapters=retire_adapters)
            finally:
                if job is not None:
                    # Only now: what the run had is deleted by it, which says that its candidate learnt an erased text.
                    job.abandon("a text that it had read was erased")
            if self._parts.serving() != serving:
                self._serve_another()
            # The folder of a run that was ended.
            self._clean()
            return erased

    def _serve_another(self) -> None:
        """The rows name another adapter: end a run on top of the former one, whose candidate could only be rejected."""
        if (job := self._job) is not None:
            self._job = None
            job.child.stop()
            job.abandon("the adapter that it was trained on top of was revoked")
        try:
            self._parts.switching.serve_active()
        except (Unavailable, TimeoutError) as error:
            log.warning("the engine does not serve the active adapter yet: %s", error)

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
