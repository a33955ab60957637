"""The supervisor of the training loop. Its idempotent tick handles the child process, gates, watches, new runs and clean-up.

The database is the source of truth. State in memory (the child, a count of failed comparisons) can be lost at any time:
after a restart every run and adapter is in a legal state, and the supervisor continues from there. When several
processes share the database, one process per pair leads: it starts runs and comparisons. Every process follows the
rows.
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
"""Number of recent watch verdicts searched for consecutive rollbacks."""
CLEAN_EVERY = 40
"""Ticks between clean-ups."""
COSTS_SECONDS = 3600.0
"""Interval at which a server records its measured round costs."""


class Supervisor:
    """Implements core.Operator and the tick. `context.members` must have joined.

    practice: whether practice starts automatically, and who decided that. busy: whether serving needs the whole
    machine. idle_seconds: seconds since this server last handled a request. strain: why the machine cannot spare what
    training takes. user: a message when a person is using the machine (None: detect it with the system's tools).
    forget: by name, every store of request text outside the database.

    At most one child runs at a time. A run belongs to this supervisor from the moment it claims it. Another process's
    run is left alone as long as that process is a member.
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
        """Why the engine could not serve the active adapter the last time."""
        self._costs_at = -math.inf
        self._ticks = 0
        self._stopped = False

    # -------------------------------------------------------------------------------------------------- start and stop

    def start(self) -> None:
        """Registers the served pair, ends what dead processes left open, and serves the active adapter."""
        with self._lock:
            self._context.members.register_pair(self._context.who, trains=self._context.trains)
            self._context.give_up_orphans()
            self._clean()
            if self._context.who.draft:
                self._serve_active()
            self._gains.announce()

    def stop(self) -> None:
        """Ends the running child. Its run becomes ENDED, which frees its texts. Idempotent."""
        with self._lock:
            self._stopped = True
            jobs = self._eraser.drop_ended_jobs()
            if (job := self._jobs.end()) is not None:
                jobs.append(job)
            try:
                for each in jobs:
                    each.abandon("the server was stopped")
            except StoreError as error:
                log.warning("the run could not be ended in the database; the next start will end it: %s", error)

    @property
    def working(self) -> bool:
        """Whether a child is running."""
        return self._jobs.job is not None

    def pause_child(self) -> None:
        """Pauses the running child while serving is busy, or resumes it. Called on every change, independently of the tick."""
        self._jobs.pause_for_requests()

    def tick(self) -> None:
        """Does everything that is due. Safe to call at any time, from any thread, any number of times. Errors are
        raised; the next tick tries again."""
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
        """Does what cannot wait for a tick: handles the child's messages, starts a comparison that is due, and follows
        decisions of other processes that share the database (forgets texts they erase, serves adapters they promote,
        stops a child whose run they ended). Also removes processes that have died. Called more often than `tick`; does
        nothing while `tick` is running."""
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
            # `tick` reports the error, and runs less often.
            pass
        finally:
            self._lock.release()

    def rejoin(self) -> None:
        """Rejoins after this process missed its lease and was removed. It forgets all request text, because it cannot
        know what was erased in the meantime."""
        with self._lock:
            if self._stopped:
                return
            log.warning(
                "this process missed its lease and was removed: its run is lost, and it forgets all request text held in memory"
            )
            self._jobs.end()
            self._eraser.forget_everything()
            # Only now may it write again: its pending writes were about texts that may have been erased.
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
        # A run trains on top of the serving adapter: if that cannot be loaded, nothing is trained.
        leads = context.trains and context.members.leads() and not self.working
        if leads and not context.switching.behind() and not self._eraser.under_way:
            self._start_work()
        # Serving may already have been busy when the child was started.
        self.pause_child()

    def _end_childless_run(self) -> None:
        """Ends a run of this process that has no child because an error occurred between its claim and its start."""
        context = self._context
        run = context.stores.runs.current(context.who)
        if run is not None and run.owner == context.members.token and not self._eraser.waiting:
            context.end_run(run.id, RunState.FAILED, "its child could not be started")

    def _start_work(self) -> None:
        """Starts the work of the process that leads the pair: a waiting run, a comparison, or a run that is due."""
        context = self._context
        run = context.stores.runs.current(context.who)
        if run is not None:
            # It was requested on a process that does not train.
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
            # Drafting is switched off: undrafted texts do not call for a better draft.
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
        # Without a run, the borrowed memory is returned.
        self._jobs.start(None if run is None else training.start(context, run))

    def _borrow(self, run: TrainingRun) -> bool:
        practises = run.trigger is Trigger.PRACTICE
        return self._context.loans.borrow(Borrower.PRACTICE if practises else Borrower.RUN)

    def _record_costs(self) -> None:
        """Records the round costs once, and again before they are too old for other processes to use."""
        if time.monotonic() - self._costs_at > COSTS_SECONDS:
            self._context.record_costs()
            self._costs_at = time.monotonic()

    def _serve_active(self) -> None:
        try:
            self._context.switching.serve_active()
            self._switch_error = ""
        except (Unavailable, TimeoutError) as error:
            # It is retried often: log each error once.
            if self._switch_error != str(error):
                log.warning("the engine cannot serve the active adapter yet: %s", error)
            self._switch_error = str(error)

    def _stop_ended_run(self) -> None:
        """Stops the child whose run an operator has ended, in this or another process."""
        job = self._jobs.job
        if isinstance(job, training.RunJob) and not job.child.ended and job.run_over:
            self._jobs.end()

    def _clean(self) -> None:
        clean(self._context, child_under_way=self.working)

    # --------------------------------------------------------------------------------------------------- core.Operator

    def request_training(self, idempotency_key: str | None, practice_minutes: float | None = None) -> TrainingRun:
        """See core.Operator. Claims a run and starts its child, or leaves the run to the process that leads.

        Also raises Conflict during a comparison, without a draft, after `stop`, or when no process trains; BadRequest
        for more minutes than a run may take.
        """
        context, runs = self._context, self._context.stores.runs
        with self._lock:
            if idempotency_key is not None and (known := runs.by_key(idempotency_key)) is not None:
                return known
            if self._stopped or not context.who.draft:
                raise Conflict("shutting down" if self._stopped else "this server runs without a draft model")
            if isinstance(self._jobs.job, GainJob):
                # The measurement is repeated when the server is idle.
                self._jobs.end()
            if self.working or runs.current(context.who) is not None:
                raise Conflict("a training run or a comparison is already running")
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
                        f"a run may take at most {most:g} minutes (training.timeout_seconds)", field="practice_minutes"
                    )
                run = training.claim_practice(context, practice_minutes, idempotency_key, asked=True, here=here)
            if run is None:
                raise BadRequest("no recorded text to train on yet")
            if here:
                self._jobs.start(training.start(context, run))
                self.pause_child()
            return runs.get(run.id)

    def run(self, run_id: int) -> TrainingRun:
        """Returns the training run with this id. Raises NotFound."""
        return self._context.stores.runs.get(run_id)

    def runs(self, limit: int, before: int | None = None) -> list[TrainingRun]:
        """See core.Operator."""
        return self._context.stores.runs.latest(limit, before)

    def end_run(self, run_id: int) -> TrainingRun:
        """See core.Operator. Sets the row's state; the process that owns the run then stops its child (`follow`)."""
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
        # Remove the folder that its child may have left.
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
        """See core.Operator. Memory for practice is reserved at start-up if practice is on then. If it is turned on
        later, practice uses free memory."""
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
        """Returns all adapters, newest first."""
        return self._context.stores.adapters.all()

    def activate(self, adapter_id: int) -> AdapterRef | None:
        """Serves this adapter and ends its watch. BARE_DRAFT serves no adapter and returns None.

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
                raise Conflict(f"adapter {adapter_id} was trained and evaluated with another target")
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
        """Deletes the files of an adapter that is not serving. Raises NotFound, Conflict."""
        adapters = self._context.stores.adapters
        with self._lock:
            ref = adapters.get(adapter_id)
            if ref.state in {AdapterState.ACTIVE, AdapterState.CANDIDATE}:
                raise Conflict(f"adapter {adapter_id} is {ref.state}: its files are in use")
            if ref.state.may_serve:
                try:
                    ref = adapters.remove(adapter_id)
                except IllegalMove as error:
                    raise Conflict(str(error)) from error
            elif not ref.folder.is_dir():
                raise Conflict(f"adapter {adapter_id} is {ref.state}: its files are already deleted")
            with suppress(FileNotFoundError):
                remove_folder(ref.folder)
            return ref

    def rollback(self, expected: int | None = None) -> AdapterRef | None:
        """Rolls back the active adapter. Returns the one that serves afterwards, None for the base draft.

        expected: the id that must be active. Raises Conflict when another adapter or the base draft is serving.
        """
        with self._lock:
            ref = self._context.active_ref()
            serving = BARE_DRAFT if ref is None else ref.id
            if expected is not None and expected != serving:
                raise Conflict(f"adapter {serving} is serving, not {expected}: nothing was rolled back")
            if ref is None:
                raise Conflict("the base draft is serving: there is nothing to roll back")
            self._context.stores.adapters.roll_back(ref.id, ref.parent, policy.ROLLED_BACK)
            self._context.events.rolled_back()
            return self._context.switching.serve_active()

    def erase(self, selection: Selection, *, retire_adapters: bool = False) -> Erased:
        """See core.Operator. Every store outside the database forgets the texts first, in all processes, so that none
        can be written again; then the rows are deleted. If it raises, call it again: it completes what is left."""
        with self._lock:
            if self._stopped:
                raise Conflict("shutting down")
            active = self._context.active_adapter()
            erased = self._eraser.erase(selection, retire_adapters=retire_adapters)
            if self._context.active_adapter() != active:
                # A run on top of the revoked adapter could only be rejected.
                if (job := self._jobs.end()) is not None:
                    job.abandon("the adapter it was trained on was revoked")
                self._serve_active()
            # Remove the folder of a run that was ended.
            self._clean()
            return erased
