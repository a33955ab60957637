"""One training run, from its claimed row to its verdict: the child's messages become rows, then the gate decides."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

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
from service.lifecycle.machine import Strain
from service.lifecycle.messages import Candidate, Done, Failed, Message, Scores, Texts
from service.store.log.run_texts import Role
from service.store.registry.practice import MINUTES
from service.store.registry.runs import OWN_TEXTS

log = logging.getLogger(__name__)

RESERVOIR = 256
"""Generations per domain in the replay buffer."""
BUSY = "serving is busy"
ASKED = "requests are being answered"
CANDIDATE = "candidate"
SEEDS = 1000
"""Number of logged prompts that seed one practice run."""
ASKED_FOR = "asked_for"
"""Key in a practice run's configuration, next to its settings and MINUTES: whether an operator requested it."""
MAX_GENERATIONS, WINDOW = "max_generations", "window"
"""Keys in a run's configuration: the maximum number of texts, and the value in the settings."""
MAX_PAUSE_SECONDS, MAX_PRACTICE_PAUSE_SECONDS = 1800.0, 600.0
"""A run ends when its paused time exceeds the time it has worked since by this much. A paused child keeps its memory,
and other runs wait for it. What practice has written stays on disk."""
MEMORY_NEEDED = "requests needed the memory of this run: the run was ended to free it"
MEMORY_GIVEN_BACK = "memory is short: the run was ended to free its memory"
ENDED = "ended by an operator"
TURNED_OFF = "practice was turned off"


def claim(context: LifecycleContext, trigger: Trigger, key: str | None, *, here: bool = True) -> TrainingRun | None:
    """Opens a run on top of the serving adapter, with the size that earlier runs suggest. None when a run is in
    progress or there is nothing to train on. here: False leaves the run to the process that leads."""
    training = context.rules.training
    size = policy.run_size(context.stores.runs.sizes(context.who), max(training.max_generations, training.window))
    bounded = {name: min(size, getattr(training, name)) for name in (MAX_GENERATIONS, WINDOW)}
    return context.stores.runs.claim(
        trigger=trigger,
        who=context.who,
        parent=context.active_adapter(),
        limit=bounded[MAX_GENERATIONS],
        owner=context.members.token if here else None,
        idempotency_key=key,
        config=training.model_dump() | bounded,
    )


def claim_practice(
    context: LifecycleContext, minutes: float, key: str | None, *, asked: bool, here: bool = True
) -> TrainingRun | None:
    """Opens a practice run of `minutes` on top of the serving adapter. None when a run is in progress or no logged
    prompt can seed it.

    asked: an operator requested it. here: as in `claim`.
    """
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
    """Starts the child of a claimed run. None when it could not be started; the run is then FAILED."""
    parent = context.adapter_folder(run.parent)
    _, config = context.stores.runs.recipe(run.id)
    more: dict[str, object] = {name: config[name] for name in (WINDOW, OWN_TEXTS) if name in config}
    more["memory"] = context.loans.lent
    if run.trigger is Trigger.PRACTICE:
        more["practice"] = {"folder": str(context.rules.practice), "minutes": config[MINUTES]}
    # The row first: only one process can move it, so only one child is started for it.
    moved = context.stores.runs.move(run.id, run.fencing, RunState.TRAINING)
    try:
        child = context.launch(
            kind="train", run=run.id, fencing=run.fencing, parent=parent, parent_id=run.parent, **more
        )
    except OSError as error:
        context.end_run(run.id, RunState.FAILED, f"the child could not be started: {error}")
        return None
    context.events.training(moved)
    return RunJob(context, moved, child, config)


class RunJob:
    """A child that trains. config: the configuration the run was claimed with."""

    def __init__(self, context: LifecycleContext, run: TrainingRun, child: Child, config: Mapping[str, Any]) -> None:
        self._context = context
        self._run = run
        self._child = child
        self._config = config
        self._asked = run.trigger is Trigger.MANUAL or bool(config.get(ASKED_FOR))
        self._candidate: AdapterRef | None = None
        self._scores: Scores | None = None
        self._paused: str | None = None
        self._dropped = False
        """It was stopped by this process: its earlier messages no longer count."""
        self._paused_seconds = 0.0
        """Paused time minus the time worked since; never below 0."""
        self._counted_at = context.timer()
        self._texts_recorded = False
        """Whether run_texts lists every text that the run learns from."""

    @property
    def child(self) -> Child:
        """The child process."""
        return self._child

    @property
    def limit_seconds(self) -> float:
        """`training.timeout_seconds`, plus the run's minutes for practice, which scores after writing."""
        return self._context.rules.training.timeout_seconds + 60 * self._config.get(MINUTES, 0.0)

    def yields(self, demand: Demand) -> bool:
        """Training pauses while requests are waiting, practice while any request is being answered."""
        return demand.asked if self._practises else demand.waiting

    def pause(self, demand: Demand, strain: Strain | None) -> None:
        """Pauses for serving and for `strain`, and records every change of the reason. The run ends when memory is
        short or after too long a pause. A run that an operator requested ignores `strain`."""
        # An operator's run starts immediately, on battery or not.
        strained = None if self._asked else strain
        busy = self.yields(demand)
        self._count_pauses()
        reason = strained or ((ASKED if self._practises else BUSY) if busy else None)
        self._child.pause(Pause.STRAIN, strained is not None)
        run, runs = self._run, self._context.stores.runs
        if self._child.ended:
            return
        if strained is Strain.MEMORY:
            self._stop(RunState.OUT_OF_MEMORY, MEMORY_GIVEN_BACK)
            return
        if reason != self._paused:
            self._context.events.training(runs.pause(run.id, run.fencing, reason))
            self._paused = reason
        limit = MAX_PRACTICE_PAUSE_SECONDS if self._practises else MAX_PAUSE_SECONDS
        if reason is not None and self._paused_seconds > limit:
            self._stop(RunState.ENDED, f"paused for {limit / 60:.0f} minutes longer than it worked: {reason}")

    def give_back_memory(self) -> None:
        """See Job. The run ends as too large: the next one is smaller, and its texts count as untrained."""
        self._child.fail(RunState.OUT_OF_MEMORY, MEMORY_NEEDED)

    def _count_pauses(self) -> None:
        now = self._context.timer()
        elapsed, self._counted_at = now - self._counted_at, now
        self._paused_seconds = max(self._paused_seconds + (-elapsed if self._paused is None else elapsed), 0.0)

    @property
    def _practises(self) -> bool:
        return self._run.trigger is Trigger.PRACTICE

    def handle(self, message: Message) -> None:
        """Records progress, candidate or scores. The gate decides when the child is done; a failure ends the run."""
        run, runs = self._run, self._context.stores.runs
        if self._dropped:
            return  # sent before it was stopped
        match message:
            case Progress():
                runs.progress(run.id, run.fencing, replace(message, paused=self._paused))
                self._context.events.training(runs.get(run.id))
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
            case Failed(reason, state):
                self._context.end_run(run.id, state, reason)

    def may_hold(self, runs: Collection[int], *, held_out: bool) -> bool:
        """Whether the child may have read one of the texts. runs: those that learn from one. held_out: one of the texts
        is held out."""
        return not self._texts_recorded or self._run.id in runs or (held_out and self._candidate is not None)

    def abandon(self, reason: str) -> None:
        """Sets the run to ENDED."""
        self._context.end_run(self._run.id, RunState.ENDED, reason)

    @property
    def run_over(self) -> bool:
        """Whether the row says that the run is over."""
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
            context.end_run(run.id, RunState.FAILED, "the child ended without sending a candidate and its scores")
            return
        try:
            verdict = self._judge(scores)
        except ValueError as error:
            context.end_run(run.id, RunState.FAILED, f"the scores cannot be judged: {error}")
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
            self._reject(candidate, replace(verdict, promoted=False, reason=f"better, but cannot be loaded: {error}"))
            return
        except (Unavailable, TimeoutError) as error:
            context.end_run(run.id, RunState.FAILED, f"the engine could not load the candidate: {error}")
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
            # The row is the source of truth; the next tick makes the engine follow it.
            log.warning("the engine cannot serve adapter %d yet: %s", candidate.id, error)

    def _judge(self, scores: Scores) -> Verdict:
        """Raises ValueError for invalid scores."""
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
        # An adapter serves on every kind of machine: the one with the smallest gain decides.
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

    def _stop(self, state: RunState, reason: str) -> None:
        """Ends the run and its child, whatever it has sent."""
        # The row first: if it cannot be written, the next tick tries again.
        self._context.end_run(self._run.id, state, reason)
        self._dropped = True
        self._child.stop()

    def _offer_replay(self) -> None:
        """Offers the texts of this run to the replay buffer, from which later runs sample."""
        self._context.stores.replay.offer_run(self._run.id, RESERVOIR, seed=0)
