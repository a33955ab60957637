"""The supervisor of the training loop: an idempotent tick that handles the child, gates, watches, starts runs and cleans up.

The truth is in rows. What is held in memory (the child, a count of failed comparisons) may vanish at any moment: the next start
finds every run and adapter in a legal state and goes on from there. Where several processes share the database, one of a pair
leads: it starts runs and comparisons. All follow the rows.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from service.core import (
    BARE_DRAFT,
    AdapterRef,
    AdapterState,
    BadRequest,
    Conflict,
    Erased,
    Forget,
    GainsState,
    IllegalMove,
    LearningState,
    PracticeState,
    RunState,
    Selection,
    StoreError,
    TrainingRun,
    Trigger,
    Unavailable,
)
from service.lifecycle import policy, training
from service.lifecycle.cleaning import clean
from service.lifecycle.context import LifecycleContext
from service.lifecycle.erasing import Eraser
from service.lifecycle.gains import GainJob, GainMeter
from service.lifecycle.jobs import Demand, JobSlot
from service.lifecycle.loans import SHORT, Borrower
from service.lifecycle.machine import Strain, machine_strain, somebody_here
from service.lifecycle.practice_choice import PracticeChoice
from service.lifecycle.practice_starter import PracticeStarter
from service.lifecycle.run_timing import RUNS, RunTiming
from service.lifecycle.watch import Watch
from service.store.artifacts import remove_folder

log = logging.getLogger(__name__)

WATCHES = 16
"""Verdicts of the watch that are searched for adapters rolled back in a row."""
CLEAN_EVERY = 40
"""Ticks between two clean-ups."""
COSTS_SECONDS = 3600.0
"""How often a server records what rounds cost there."""


class Supervisor:
    """core.Operator, and the tick. context.members has joined. practice: whether it starts by itself, and who says so. busy:
    whether serving needs the machine for itself. idle_seconds: for how long nothing has been asked here. strain: why the
    machine cannot spare what training takes; user: that somebody uses it (None: by the rules, as far as the system tells).
    forget: every place outside the rows that keeps texts after their requests have ended, by name.

    At most one child at a time. A run is this supervisor's own from the moment it claimed it; another's is left alone as long
    as its process is a member.
    """

    def __init__(
        self,
        context: LifecycleContext,
        *,
        practice: PracticeChoice,
        busy: Callable[[], bool] = lambda: False,
        idle_seconds: Callable[[], float] = lambda: math.inf,
        strain: Callable[[], Strain | None] | None = None,
        user: Callable[[], str | None] | None = None,
        forget: Mapping[str, Forget] | None = None,
    ) -> None:
        self._context = context
        self._strain = strain or machine_strain(context.rules.training)
        self._practice = PracticeStarter(context, practice, idle_seconds, user or somebody_here())
        self._jobs = JobSlot(context, lambda: Demand(busy(), asked=idle_seconds() == 0.0), self._strain)
        self._timing = RunTiming(context, idle_seconds)
        self._gains = GainMeter(
            context,
            idle_seconds=idle_seconds,
            strain=self._strain,
            watching=lambda: self._watch.pending() is not None,
        )
        self._watch = Watch(context, on_scores=self._gains.record)
        self._eraser = Eraser(context, self._jobs, forget or {})
        self._lock = threading.RLock()
        self._switch_error = ""
        """Why the active adapter was not served last time."""
        self._costs_at = -math.inf
        self._ticks = 0
        self._stopped = False

    # -------------------------------------------------------------------------------------------------- start and stop

    def start(self) -> None:
        """Register the pair that is served, end what ended processes left open, and serve the active adapter."""
        with self._lock:
            self._context.members.register_pair(self._context.who, trains=self._context.trains)
            self._context.give_up_orphans()
            self._clean()
            if self._context.who.draft:
                self._serve_active()
            self._gains.announce()

    def stop(self) -> None:
        """End a child under way; its run becomes ENDED, which frees its texts. Idempotent."""
        with self._lock:
            self._stopped = True
            jobs = self._eraser.drop_ended_jobs()
            if (job := self._jobs.end()) is not None:
                jobs.append(job)
            try:
                for each in jobs:
                    each.abandon("the server was stopped")
            except StoreError as error:
                log.warning("the next start has to end the run: %s", error)

    @property
    def working(self) -> bool:
        """Whether a child is under way."""
        return self._jobs.job is not None

    def pause_child(self) -> None:
        """Pause the child under way while serving is busy, or resume it. Called whenever that changes; waits for no tick."""
        self._jobs.pause_for_requests()

    def tick(self) -> None:
        """Do everything that is due; safe to call at any time, from any thread, any number of times. Raises what went wrong:
        the next tick tries again."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._stopped:
                return
            self._jobs.poll()
            self._eraser.carry_out()
            self._context.give_up_orphans()
            if self._context.who.draft:
                self._tick_draft()
            if self._ticks % CLEAN_EVERY == 0:
                self._clean()
            self._ticks += 1
        finally:
            self._lock.release()

    def follow(self) -> None:
        """Do what must not wait for a tick: handle what the child sent, start a comparison that is due, and do what other
        processes of the database have decided: forget what they erase, serve what they promote, stop a child whose run they
        ended; and give up those that have ended. Called more often than `tick`; does nothing while that is at work."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._stopped:
                return
            self._eraser.carry_out()
            self._context.give_up_orphans()
            self._stop_ended_run()
            self._jobs.poll()
            if self._context.who.draft:
                if self._context.switching.behind():
                    self._serve_active()
                elif self._context.trains and not self.working and not self._eraser.under_way:
                    self._start_comparison()
        except StoreError:
            # Ticks report it, which are fewer.
            pass
        finally:
            self._lock.release()

    def rejoin(self) -> None:
        """This process did not answer for too long and was given up: forget everything, since what was erased meanwhile is not
        known, and join again."""
        with self._lock:
            if self._stopped:
                return
            log.warning(
                "others of the database gave this process up: its run is lost, and it forgets what it remembers"
            )
            self._jobs.end()
            self._eraser.forget_everything()
            # Only now may it write again: what it had to write was of texts that may be erased.
            self._context.members.join()
            self._context.members.register_pair(self._context.who, trains=self._context.trains)

    # --------------------------------------------------------------------------------------------- the tick's steps

    def _tick_draft(self) -> None:
        context = self._context
        self._record_costs()
        self._gains.announce()
        self._timing.observe()
        if context.switching.behind():
            self._serve_active()
        if not self.working:
            self._end_childless_run()
        # On top of what serves: where that cannot be loaded nothing is trained.
        leads = context.trains and context.members.leads() and not self.working
        if leads and not context.switching.behind() and not self._eraser.under_way:
            self._start_work()
        # A child that was just started, when serving was busy already.
        self.pause_child()

    def _end_childless_run(self) -> None:
        """End a run of this process that has no child: an error came between its claim and its start."""
        context = self._context
        run = context.stores.runs.current(context.who)
        if run is not None and run.owner == context.members.token and not self._eraser.waiting:
            context.end_run(run.id, RunState.FAILED, "its child could not be started")

    def _start_work(self) -> None:
        """Start what one process of the pair has to do: a run that waits, a comparison, or a run that is due."""
        context = self._context
        run = context.stores.runs.current(context.who)
        if run is not None:
            # Asked for where nobody trains.
            if (
                run.owner is None
                and self._borrow(run)
                and (taken := context.stores.runs.take(run.id, context.members.token)) is not None
            ):
                self._jobs.start(training.start(context, taken))
            return
        self._start_comparison()
        if not self.working:
            self._start_if_due()
        if not self.working:
            self._jobs.start(self._gains.start())

    def _start_comparison(self) -> None:
        if self._watch.pending() is not None and self._context.members.leads():
            self._jobs.start(self._watch.start())

    def _start_if_due(self) -> None:
        context, rules = self._context, self._context.rules.training
        counts = context.stores.training_texts.untrained(context.who)
        if context.rules.spec.get("k") == 0:
            # The draft is switched off: undrafted texts do not call for a better one.
            counts = replace(counts, undrafted=0)
        watched = context.stores.adapters.watched(context.who.target, context.who.draft, WATCHES)
        hindered = policy.hindrance(
            context.stores.runs.newest(context.who, RUNS),
            context.database_now(),
            cooldown_seconds=rules.cooldown_seconds,
            enabled=rules.enabled,
            watching=self._watch.blocks_runs(),
            waiting=policy.backoff(watched, context.rules.gate.backoff_seconds),
            strain=self._strain(),
        )
        decision = policy.decide(
            counts,
            hindered,
            min_cases=rules.min_cases,
            min_tokens=rules.min_tokens,
        )
        if isinstance(decision, Trigger):
            decision = self._timing.hindrance() or decision
        self._timing.waits = None if isinstance(decision, Trigger) else decision
        if not isinstance(decision, Trigger):
            run = self._practice.claim(hindered)
        elif context.loans.borrow(Borrower.RUN):
            run = training.claim(context, decision, None)
        else:
            self._timing.waits = SHORT
            return
        # Without a run what was borrowed goes back.
        self._jobs.start(None if run is None else training.start(context, run))

    def _borrow(self, run: TrainingRun) -> bool:
        practises = run.trigger is Trigger.PRACTICE
        return self._context.loans.borrow(Borrower.PRACTICE if practises else Borrower.RUN)

    def _record_costs(self) -> None:
        """Once, and again before they are too old for others to go by."""
        if time.monotonic() - self._costs_at > COSTS_SECONDS:
            self._context.record_costs()
            self._costs_at = time.monotonic()

    def _serve_active(self) -> None:
        try:
            self._context.switching.serve_active()
            self._switch_error = ""
        except (Unavailable, TimeoutError) as error:
            # It is tried again and again: logged once.
            if self._switch_error != str(error):
                log.warning("the engine does not serve the active adapter yet: %s", error)
            self._switch_error = str(error)

    def _stop_ended_run(self) -> None:
        """Stop the child whose run an operator has ended, here or in another process of the database."""
        job = self._jobs.job
        if isinstance(job, training.RunJob) and not job.child.ended and job.run_over:
            self._jobs.end()

    def _clean(self) -> None:
        clean(self._context, child_under_way=self.working)

    # --------------------------------------------------------------------------------------------------- core.Operator

    def request_training(self, idempotency_key: str | None, practice_minutes: float | None = None) -> TrainingRun:
        """See core.Operator. Claims a run and starts its child, or leaves that to the process that leads.

        Raises Conflict also during a comparison, without a draft, after `stop`, or where no process trains; BadRequest also for
        more minutes than a run may take.
        """
        context, runs = self._context, self._context.stores.runs
        with self._lock:
            if idempotency_key is not None and (known := runs.by_key(idempotency_key)) is not None:
                return known
            if self._stopped or not context.who.draft:
                raise Conflict("shutting down" if self._stopped else "this server runs without a draft model")
            if isinstance(self._jobs.job, GainJob):
                # It is made again when the server is idle.
                self._jobs.end()
            if self.working or runs.current(context.who) is not None:
                raise Conflict("a training run or a comparison is under way")
            if self._eraser.under_way:
                raise Conflict("texts are being erased")
            here = context.trains and context.members.leads()
            if not here and not context.members.has_trainer():
                raise Conflict("no process trains for this server: start `redraft trainer`")
            if here and not context.loans.borrow(Borrower.RUN if practice_minutes is None else Borrower.PRACTICE):
                raise Conflict(f"a run cannot start now: {SHORT}")
            if practice_minutes is None:
                run = training.claim(context, Trigger.MANUAL, idempotency_key, here=here)
            else:
                most = context.rules.training.timeout_seconds / 60
                if practice_minutes > most:
                    raise BadRequest(
                        f"a run may take {most:g} minutes (training.timeout_seconds)", field="practice_minutes"
                    )
                run = training.claim_practice(context, practice_minutes, idempotency_key, asked=True, here=here)
            if run is None:
                raise BadRequest("nothing has been recorded yet that a run could learn from")
            if here:
                self._jobs.start(training.start(context, run))
                self.pause_child()
            return runs.get(run.id)

    def run(self, run_id: int) -> TrainingRun:
        """The training run with this id. Raises NotFound."""
        return self._context.stores.runs.get(run_id)

    def runs(self, limit: int, before: int | None = None) -> list[TrainingRun]:
        """See core.Operator."""
        return self._context.stores.runs.latest(limit, before)

    def end_run(self, run_id: int) -> TrainingRun:
        """See core.Operator. The row decides: the process whose run it is stops its child when it sees that (`follow`)."""
        with self._lock:
            if self._stopped:
                raise Conflict("shutting down")
            run = self._context.stores.runs.get(run_id)
            if run.state.over:
                raise Conflict(f"run {run_id} is over ({run.state})")
            self._end_run(run, training.ENDED)
            return self._context.stores.runs.get(run_id)

    def _end_run(self, run: TrainingRun, reason: str) -> None:
        self._context.end_run(run.id, RunState.ENDED, reason)
        self._stop_ended_run()
        # The folder that its child may have left.
        self._clean()

    def learning(self) -> LearningState:
        """See core.Operator."""
        if not self._context.who.draft:
            raise Conflict("this server runs without a draft model")
        return self._timing.state(working=self.working)

    def gains(self) -> GainsState:
        """See core.Operator."""
        return self._gains.state()

    def practice(self) -> PracticeState:
        """See core.Operator."""
        return self._practice.state(working=self.working)

    def choose_practice(self, on: bool) -> PracticeState:
        """See core.Operator. Memory for practice is set aside at the start, where it is on then: turned on later it makes do
        with what is free."""
        with self._lock:
            if self._stopped:
                raise Conflict("shutting down")
            if (impossible := self._practice.impossible) is not None:
                raise Conflict(impossible)
            self._practice.choose(on)
            run = None if on else self._context.stores.runs.current(self._context.who)
            if run is not None and self._practice.started(run):
                self._end_run(run, training.TURNED_OFF)
            return self.practice()

    def adapters(self) -> list[AdapterRef]:
        """All adapters, newest first."""
        return self._context.stores.adapters.all()

    def activate(self, adapter_id: int) -> AdapterRef | None:
        """Serve this adapter and end its watch; BARE_DRAFT: no adapter, returns None.

        Raises NotFound, Conflict for an adapter that may not serve, AdapterRefused, Unavailable, TimeoutError.
        """
        adapters, switching, who = self._context.stores.adapters, self._context.switching, self._context.who
        with self._lock:
            ref = None if adapter_id == BARE_DRAFT else adapters.get(adapter_id)
            if ref is not None and (ref.state is AdapterState.CANDIDATE or not ref.state.may_serve):
                raise Conflict(f"adapter {adapter_id} is {ref.state}")
            if ref is not None and ref.draft != who.draft:
                raise Conflict(f"adapter {adapter_id} belongs to another draft")
            if ref is not None and ref.target != who.target:
                raise Conflict(f"adapter {adapter_id} was trained and proven with another target")
            started = time.perf_counter()
            staged = switching.stage(ref)
            try:
                ref = adapters.activate(adapter_id, who.target, who.draft)
            except IllegalMove as error:
                raise Conflict(str(error)) from error
            if ref is not None:
                self._watch.end(ref, "stays: an operator chose it")
            switching.switch(staged, ref, started)
            return ref

    def remove_adapter(self, adapter_id: int) -> AdapterRef:
        """Delete the files of an adapter that does not serve. Raises NotFound, Conflict."""
        adapters = self._context.stores.adapters
        with self._lock:
            ref = adapters.get(adapter_id)
            if ref.state in {AdapterState.ACTIVE, AdapterState.CANDIDATE}:
                raise Conflict(f"adapter {adapter_id} is {ref.state}: its files are needed")
            if ref.state.may_serve:
                try:
                    ref = adapters.remove(adapter_id)
                except IllegalMove as error:
                    raise Conflict(str(error)) from error
            elif not ref.folder.is_dir():
                raise Conflict(f"adapter {adapter_id} is {ref.state}: its files were deleted already")
            with suppress(FileNotFoundError):
                remove_folder(ref.folder)
            return ref

    def rollback(self, expected: int | None = None) -> AdapterRef | None:
        """Roll back the active adapter and return the one that serves now, None for the bare draft.

        expected: the id that has to be active. Raises Conflict when another is, or when the bare draft serves.
        """
        with self._lock:
            ref = self._context.active_ref()
            serving = BARE_DRAFT if ref is None else ref.id
            if expected is not None and expected != serving:
                raise Conflict(f"adapter {serving} serves, not {expected}: nothing was rolled back")
            if ref is None:
                raise Conflict("the bare draft serves: there is nothing to roll back")
            self._context.stores.adapters.roll_back(ref.id, ref.parent, policy.ROLLED_BACK)
            self._context.events.rolled_back()
            return self._context.switching.serve_active()

    def erase(self, selection: Selection, *, retire_adapters: bool = False) -> Erased:
        """See core.Operator. First every place that keeps texts forgets them, here and in the other processes of the database,
        so that none comes back, then the rows go. One that raised is to be asked for again: it does what is left."""
        with self._lock:
            if self._stopped:
                raise Conflict("shutting down")
            active = self._context.active_adapter()
            erased = self._eraser.erase(selection, retire_adapters=retire_adapters)
            if self._context.active_adapter() != active:
                # A run on top of the former one could only be rejected.
                if (job := self._jobs.end()) is not None:
                    job.abandon("the adapter that it was trained on top of was revoked")
                self._serve_active()
            # The folder of a run that was ended.
            self._clean()
            return erased
