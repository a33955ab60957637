"""One training run, from its claimed row to its verdict: the child's messages become rows, then the gate decides."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import replace

from service.core import (
    BARE_DRAFT,
    AdapterRef,
    AdapterRefused,
    ParentChanged,
    Progress,
    RoundCosts,
    RunState,
    TrainingRun,
    Trigger,
    Unavailable,
    Verdict,
)
from service.lifecycle import policy
from service.lifecycle.child import Child, Pause
from service.lifecycle.context import LifecycleContext
from service.lifecycle.gate import Scored
from service.lifecycle.jobs import Demand
from service.lifecycle.messages import Candidate, Cases, Crashed, Done, Failed, Message, Scores, Texts
from service.store.log.run_texts import Role
from service.store.registry.practice import MINUTES

log = logging.getLogger(__name__)

RESERVOIR = 256
"""Generations that the replay buffer holds per domain."""
BUSY = "serving is busy"
ASKED = "requests are answered"
CANDIDATE = "candidate"
SEEDS = 1000
"""Logged texts that the practice of one run begins like."""
ASKED_FOR = "asked_for"
"""In a practice run's configuration, with its settings and MINUTES: whether an operator asked for it."""
GIVE_UP_SECONDS = 600.0
"""A practice run that was paused for so long gives the memory back; what was written stays on disk."""
ENDED = "ended by an operator"
TURNED_OFF = "practice was turned off"


def claim(context: LifecycleContext, trigger: Trigger, key: str | None, *, here: bool = True) -> TrainingRun | None:
    """Open a run on top of what serves; None when one is under way or there is nothing to train on. here: False leaves it to
    the process that leads."""
    training = context.rules.training
    return context.stores.runs.claim(
        trigger=trigger,
        who=context.who,
        parent=context.active_adapter(),
        limit=training.max_generations,
        owner=context.members.token if here else None,
        idempotency_key=key,
        config=training.model_dump(),
    )


def claim_practice(
    context: LifecycleContext, minutes: float, key: str | None, *, asked: bool, here: bool = True
) -> TrainingRun | None:
    """Open a practice run on top of what serves, for so many minutes; None when a run is under way or nothing was logged that
    it could begin like. asked: by an operator. here: as in `claim`."""
    seeds = context.stores.training_texts.seeds(context.who, SEEDS)
    return context.stores.runs.claim(
        trigger=Trigger.PRACTICE,
        who=context.who,
        parent=context.active_adapter(),
        limit=SEEDS,
        owner=context.members.token if here else None,
        idempotency_key=key,
        config={**context.rules.training.model_dump(), MINUTES: minutes, ASKED_FOR: asked},
        seeds=seeds,
    )


def start(context: LifecycleContext, run: TrainingRun) -> RunJob | None:
    """Start the child of a claimed run; None when it could not be started (the run is CRASHED then)."""
    parent = context.adapter_folder(run.parent)
    more: dict[str, object] = {}
    _, config = context.stores.runs.recipe(run.id)
    if run.trigger is Trigger.PRACTICE:
        more["practice"] = {"folder": str(context.rules.practice), "minutes": config[MINUTES]}
    # The row first: only one process can move it, so only one child is ever started for it.
    moved = context.stores.runs.move(run.id, run.fencing, RunState.TRAINING)
    try:
        child = context.launch(
            kind="train", run=run.id, fencing=run.fencing, parent=parent, parent_id=run.parent, **more
        )
    except OSError as error:
        context.crash(moved, f"the child could not be started: {error}")
        return None
    context.events.training(moved)
    return RunJob(
        context,
        moved,
        child,
        asked=run.trigger is Trigger.MANUAL or bool(config.get(ASKED_FOR)),
        minutes=config.get(MINUTES, 0.0),
    )


class RunJob:
    """A child that trains. asked: an operator asked for the run. minutes: of practice."""

    def __init__(
        self, context: LifecycleContext, run: TrainingRun, child: Child, *, asked: bool, minutes: float = 0.0
    ) -> None:
        self._context = context
        self._run = run
        self._child = child
        self._asked = asked
        self._minutes = minutes
        self._candidate: AdapterRef | None = None
        self._scores: Scores | None = None
        self._paused: str | None = None
        self._cases_added = False
        self._dropped = False
        """It was stopped here: what it sent before does not count any more."""
        self._paused_seconds = 0.0
        """How long it was paused, less the time for which it has worked since; never below 0."""
        self._counted_at = context.timer()
        self._texts_recorded = False
        """Whether all that it learns from is in run_texts."""

    @property
    def child(self) -> Child:
        """The child process."""
        return self._child

    @property
    def limit_seconds(self) -> float:
        """`training.timeout_seconds`; practice has its minutes besides, after which it still scores."""
        return self._context.rules.training.timeout_seconds + 60 * self._minutes

    def yields(self, demand: Demand) -> bool:
        """Training has time while requests wait, and practice while any is answered."""
        return demand.asked if self._practises else demand.waiting

    def pause(self, demand: Demand, strain: str | None) -> None:
        """Pause for `strain`, unless an operator asked for the run, and record the reason whenever it changes. A practice run
        that has been paused for too long is given up: it has the target in memory, and other runs wait for its end."""
        # Whoever asks for a run wants it now, on battery or not.
        strained = None if self._asked else strain
        busy = self.yields(demand)
        self._count_pauses()
        reason = strained or ((ASKED if self._practises else BUSY) if busy else None)
        self._child.pause(Pause.STRAIN, strained is not None)
        run, runs = self._run, self._context.stores.runs
        if self._child.ended:
            return
        if reason != self._paused:
            self._context.events.training(runs.pause(run.id, run.fencing, reason))
            self._paused = reason
        if reason is not None and self._practises and self._paused_seconds > GIVE_UP_SECONDS:
            self._dropped = True
            self._child.stop()
            self._context.crash(
                runs.get(run.id), f"given up after {GIVE_UP_SECONDS / 60:.0f} minutes of pauses: {reason}"
            )

    def _count_pauses(self) -> None:
        now = self._context.timer()
        elapsed, self._counted_at = now - self._counted_at, now
        self._paused_seconds = max(self._paused_seconds + (-elapsed if self._paused is None else elapsed), 0.0)

    @property
    def _practises(self) -> bool:
        return self._run.trigger is Trigger.PRACTICE

    def handle(self, message: Message) -> None:
        """Record progress, candidate or scores; when the child is done the gate decides; a failure ends the run."""
        run, runs = self._run, self._context.stores.runs
        if self._dropped:
            return  # sent before it was stopped
        match message:
            case Cases(found):
                runs.add_cases(run.id, run.fencing, found)
                self._cases_added = True
            case Progress():
                runs.progress(run.id, run.fencing, replace(message, paused=self._paused))
                self._context.events.training(runs.get(run.id))
            case Texts() if reason := self._too_poor():
                self._give_back(reason)
            case Texts(window, replay):
                runs.record_texts(run.id, run.fencing, Role.WINDOW, window)
                runs.record_texts(run.id, run.fencing, Role.REPLAY, replay)
                self._texts_recorded = True
            case Candidate():
                self._register(message)
            case Scores():
                self._scores = message
            case Done():
                self._decide()
            case Failed(reason):
                self._fail(reason)
            case Crashed(reason) if self._practises:
                # It claimed no text that another run could have. What crashes always counts as refused, and so is not
                # tried for ever.
                self._fail(reason)
            case Crashed(reason):
                self._context.crash(runs.get(run.id), reason)

    def may_hold(self, runs: Collection[int], *, held_out: bool) -> bool:
        """Whether the child may have read one of some texts. runs: those that learn from one. held_out: one of them is only
        measured on."""
        return not self._texts_recorded or self._run.id in runs or (held_out and self._candidate is not None)

    def abandon(self, reason: str) -> None:
        """The run becomes CRASHED, and its texts are as if it had never had them."""
        self._context.crash(self._context.stores.runs.get(self._run.id), reason, give_back=True)

    @property
    def run_over(self) -> bool:
        """Whether its run is over by the rows."""
        return self._context.stores.runs.get(self._run.id).state.over

    def _register(self, made: Candidate) -> None:
        run, context = self._run, self._context
        if self._candidate is None:
            self._candidate = context.stores.adapters.add(
                run_id=run.id,
                fencing=run.fencing,
                folder=made.folder,
                sha256=made.sha256,
                rank=made.rank,
                scale=made.scale,
                keys=made.keys,
                draft=context.who.draft,
                parent=run.parent,
            )
        context.events.training(context.stores.runs.move(run.id, run.fencing, RunState.SCORING))

    def _decide(self) -> None:
        run, context = self._context.stores.runs.get(self._run.id), self._context
        if run.state.over:
            return
        candidate, scores = self._candidate, self._scores
        if candidate is None or scores is None:
            context.crash(run, "the child ended without a candidate and its scores")
            return
        try:
            verdict = self._judge(scores)
        except ValueError as error:
            self._fail(f"the scores cannot be judged: {error}")
            return
        if verdict.promoted:
            self._promote(candidate, verdict)
        else:
            self._reject(candidate, verdict)

    def _promote(self, candidate: AdapterRef, verdict: Verdict) -> None:
        run, context = self._context.stores.runs.get(self._run.id), self._context
        if run.state is RunState.SCORING:
            context.events.training(context.stores.runs.move(run.id, run.fencing, RunState.STAGING))
        started = time.perf_counter()
        try:
            staged = context.switching.stage(candidate)
        except AdapterRefused as error:
            self._reject(candidate, replace(verdict, promoted=False, reason=f"better, but will not load: {error}"))
            return
        except (Unavailable, TimeoutError) as error:
            # Not the candidate's fault: what it was trained on may be trained on again.
            reason = f"the engine could not load the candidate: {error}"
            context.crash(context.stores.runs.get(run.id), reason, give_back=True)
            return
        self._offer_replay()
        try:
            promoted = context.stores.runs.promote(run.id, run.fencing, candidate.id, verdict)
        except ParentChanged as error:
            self._record_rejection(candidate, replace(verdict, promoted=False, reason=str(error)))
            return
        context.report_end(promoted)
        context.events.promoted()
        log.info("adapter %d is promoted: %s", candidate.id, verdict.reason)
        try:
            context.switching.switch(staged, candidate, started)
        except (Unavailable, TimeoutError) as error:
            # The row is the truth; the next tick makes the engine follow it.
            log.warning("the engine does not serve adapter %d yet: %s", candidate.id, error)

    def _judge(self, scores: Scores) -> Verdict:
        """Raises ValueError when the scores are not what they should be."""
        parent, context = self._run.parent, self._context
        history = context.stores.adapters.gates(context.who.target, context.who.draft)
        kinds = context.measured_costs(scores.lengths(CANDIDATE))

        def scored(name: str, costs: RoundCosts | None) -> Scored:
            step = scores.step(name, relative_to=str(parent))
            seconds = costs.scaled(step) if costs is not None else None
            try:
                return Scored(scores.by_adapter[name], scores.golden[name] if scores.golden else (), seconds)
            except KeyError as error:
                raise ValueError(f"none of {error}") from error

        verdicts = [
            context.judge(
                scored(CANDIDATE, costs),
                scored(str(parent), costs),
                context.rules.gate,
                base=None if parent == BARE_DRAFT else scored(str(BARE_DRAFT), costs),
                history=history,
                seed=self._run.id,
            )
            for costs in kinds.values() or [None]
        ]
        # A draft serves everywhere: where it is least good decides.
        verdict = min(verdicts, key=lambda one: (one.promoted, one.gain))
        if kinds:
            verdict = replace(verdict, measured_on=tuple(sorted(kinds)))
        if self._context.active_adapter() != parent:
            reason = f"adapter {parent}, which it was compared with, no longer serves"
            verdict = replace(verdict, promoted=False, reason=reason)
        return verdict

    def _reject(self, candidate: AdapterRef, verdict: Verdict) -> None:
        self._offer_replay()
        self._record_rejection(candidate, verdict)

    def _record_rejection(self, candidate: AdapterRef, verdict: Verdict) -> None:
        run, context = self._run, self._context
        context.report_end(context.stores.runs.reject(run.id, run.fencing, candidate.id, verdict))
        log.info("run %d is rejected: %s", run.id, verdict.reason)

    def _fail(self, reason: str) -> None:
        if not self._context.stores.runs.get(self._run.id).state.over:
            run = self._context.stores.runs.move(self._run.id, self._run.fencing, RunState.FAILED, error=reason)
            self._context.report_end(run)
        self._context.discard_candidates(reason)
        log.warning("run %d failed: %s", self._run.id, reason)

    def _too_poor(self) -> str | None:
        """What the run lacks now that the cases of its undrafted texts are known; None: nothing, or it had no such texts."""
        if not self._cases_added:
            return None
        rules, found = self._context.rules.training, self._context.stores.training_texts.counts_of(self._run.id)
        return policy.lacking(found, self._run.trigger, min_cases=rules.min_cases, min_tokens=rules.min_tokens)

    def _give_back(self, missing: str) -> None:
        reason = f"its undrafted texts had fewer cases than expected: {missing}"
        if not self._context.stores.runs.get(self._run.id).state.over:
            moved = self._context.stores.runs.move(
                self._run.id, self._run.fencing, RunState.FAILED, error=reason, give_back=True
            )
            self._context.report_end(moved)
        self._dropped = True
        self._child.stop()
        log.info("run %d gives its texts back: %s", self._run.id, reason)

    def _offer_replay(self) -> None:
        """Offer what this run learnt from to the replay buffer: the next runs replay some of it."""
        self._context.stores.replay.offer_run(self._run.id, RESERVOIR, seed=0)
