"""One training run, from its claimed row to its verdict: what the child says becomes rows, and the gate has the last
word."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import replace

from service.core import (
    AdapterRef,
    AdapterRefused,
    ParentChanged,
    Progress,
    RunState,
    TrainingRun,
    Trigger,
    Unavailable,
    Verdict,
)
from service.lifecycle import policy
from service.lifecycle.children import Candidate, Cases, Child, Crashed, Done, GaveUp, Message, Pause, Scores, Texts
from service.lifecycle.parts import Parts
from service.store.run_texts import Role

log = logging.getLogger(__name__)

RESERVOIR = 256
"""Generations held per domain for replay."""
BUSY = "serving is busy"
CANDIDATE = "candidate"


def claim(parts: Parts, trigger: Trigger, key: str | None, *, here: bool = True) -> TrainingRun | None:
    """Open a run on top of what serves; None when one is under way or there is nothing to train on. here: False leaves it to
    the process that leads."""
    training = parts.rules.training
    return parts.runs.claim(
        trigger=trigger,
        who=parts.who,
        parent=parts.serving(),
        limit=training.max_generations,
        owner=parts.members.token if here else None,
        idempotency_key=key,
        config=training.model_dump(),
    )


def begin(parts: Parts, run: TrainingRun) -> TrainingJob | None:
    """Start the child of a claimed run; None when it could not be started (the run is CRASHED then)."""
    parent = parts.folder(run.parent)
    # The row first: only one process can move it, so only one child is ever started for it.
    moved = parts.runs.move(run.id, run.fencing, RunState.TRAINING)
    try:
        child = parts.launch(kind="train", run=run.id, fencing=run.fencing, parent=parent, parent_id=run.parent)
    except OSError as error:
        parts.crash(moved, f"the child could not be started: {error}")
        return None
    parts.events.training(moved)
    return TrainingJob(parts, moved, child)


class TrainingJob:
    """A child that trains."""

    def __init__(self, parts: Parts, run: TrainingRun, child: Child) -> None:
        self._parts = parts
        self._run = run
        self._child = child
        self._candidate: AdapterRef | None = None
        self._scores: Scores | None = None
        self._paused: str | None = None
        self._cases_added = False
        self._texts_given_back = False
        self._named = False
        """All that it learns from is in run_texts."""

    @property
    def child(self) -> Child:
        """The child process."""
        return self._child

    def pause(self, busy: bool, strain: str | None) -> None:
        """Pause for `strain`, unless an operator asked for the run, and record the reason whenever it changes."""
        # Whoever asks for a run wants it now, on battery or not.
        strained = strain if self._run.trigger is not Trigger.MANUAL else None
        reason = strained or (BUSY if busy else None)
        self._child.pause(Pause.STRAIN, strained is not None, self._parts.now())
        run, runs = self._run, self._parts.runs
        if reason != self._paused and not self._child.ended:
            self._parts.events.training(runs.pause(run.id, run.fencing, reason))
            self._paused = reason

    def heed(self, message: Message) -> None:
        """Record progress, candidate or scores; when the child is done the gate decides; a failure ends the run."""
        run, runs = self._run, self._parts.runs
        if self._texts_given_back:
            return  # what it sent before it was stopped
        match message:
            case Cases(found):
                runs.add_cases(run.id, run.fencing, found)
                self._cases_added = True
            case Progress():
                runs.progress(run.id, run.fencing, replace(message, paused=self._paused))
                self._parts.events.training(runs.get(run.id))
            case Texts() if reason := self._too_poor():
                self._give_back(reason)
            case Texts(window, replay):
                runs.learns(run.id, run.fencing, Role.WINDOW, window)
                runs.learns(run.id, run.fencing, Role.REPLAY, replay)
                self._named = True
            case Candidate():
                self._register(message)
            case Scores():
                self._scores = message
            case Done():
                self._decide()
            case GaveUp(reason):
                self._fail(reason)
            case Crashed(reason):
                self._parts.crash(runs.get(run.id), reason)

    def may_hold(self, runs: Collection[int], *, held_out: bool) -> bool:
        """Whether the child may have read one of some texts. runs: those that learn from one. held_out: one of them is only
        measured on."""
        return not self._named or self._run.id in runs or (held_out and self._candidate is not None)

    def abandon(self, reason: str) -> None:
        """The run becomes CRASHED, and its texts are as if it had never had them."""
        self._parts.crash(self._parts.runs.get(self._run.id), reason, give_back=True)

    def _register(self, made: Candidate) -> None:
        run, parts = self._run, self._parts
        if self._candidate is None:
            self._candidate = parts.adapters.add(
                run_id=run.id,
                fencing=run.fencing,
                folder=made.folder,
                sha256=made.sha256,
                rank=made.rank,
                scale=made.scale,
                keys=made.keys,
                draft=parts.who.draft,
                parent=run.parent,
            )
        parts.events.training(parts.runs.move(run.id, run.fencing, RunState.SCORING))

    def _decide(self) -> None:
        run, parts = self._parts.runs.get(self._run.id), self._parts
        if run.state.over:
            return
        candidate, scores = self._candidate, self._scores
        if candidate is None or scores is None:
            parts.crash(run, "the child ended without a candidate and its scores")
            return
        try:
            verdict = self._judge(scores)
        except ValueError as error:
            self._fail(f"the scores cannot be judged: {error}")
            return
        if not verdict.promoted:
            self._reject(candidate, verdict)
            return
        if run.state is RunState.SCORING:
            parts.events.training(parts.runs.move(run.id, run.fencing, RunState.STAGING))
        begun = time.perf_counter()
        try:
            staged = parts.switching.stage(candidate)
        except AdapterRefused as error:
            self._reject(candidate, replace(verdict, promoted=False, reason=f"better, but will not load: {error}"))
            return
        except (Unavailable, TimeoutError) as error:
            # Not the candidate's fault: what it was trained on may be trained on again.
            parts.crash(parts.runs.get(run.id), f"the engine could not look at the candidate: {error}", give_back=True)
            return
        self._remember()
        try:
            promoted = parts.runs.promote(run.id, run.fencing, candidate.id, verdict)
        except ParentChanged as error:
            verdict = replace(verdict, promoted=False, reason=str(error))
            parts.ended(parts.runs.reject(run.id, run.fencing, candidate.id, verdict))
            return
        parts.ended(promoted)
        parts.events.promoted()
        log.info("adapter %d is promoted: %s", candidate.id, verdict.reason)
        try:
            parts.switching.switch(staged, candidate, begun)
        except (Unavailable, TimeoutError) as error:
            # The row is the truth; the next tick makes the engine follow it.
            log.warning("the engine does not serve adapter %d yet: %s", candidate.id, error)

    def _judge(self, scores: Scores) -> Verdict:
        """Raises ValueError when the scores are not what they should be."""
        parent, rules = self._run.parent, self._parts.rules.gate
        try:
            candidate, compared = scores.by_adapter[CANDIDATE], scores.by_adapter[str(parent)]
            golden = (scores.golden[CANDIDATE], scores.golden[str(parent)]) if scores.golden else ((), ())
        except KeyError as error:
            raise ValueError(f"none of {error}") from error
        step = scores.step(CANDIDATE, relative_to=str(parent))
        kinds = self._parts.measured_costs()
        # A server that drafts fewer tokens at most measures fewer lengths.
        longest = max((len(score.calls) for score in candidate), default=0)
        kinds = {name: costs for name, costs in kinds.items() if len(costs.seconds) == longest} or kinds
        verdicts = [
            self._parts.judge(
                candidate,
                compared,
                rules,
                golden=golden,
                seconds=costs.scaled(step) if costs is not None else None,
                active_seconds=costs.seconds if costs is not None else None,
                seed=self._run.id,
            )
            for costs in kinds.values() or [None]
        ]
        # A draft serves everywhere: where it is least good decides.
        verdict = min(verdicts, key=lambda one: (one.promoted, one.gain))
        if kinds:
            verdict = replace(verdict, measured_on=tuple(sorted(kinds)))
        if self._parts.serving() != parent:
            reason = f"adapter {parent}, which it was compared with, no longer serves"
            verdict = replace(verdict, promoted=False, reason=reason)
        return verdict

    def _reject(self, candidate: AdapterRef, verdict: Verdict) -> None:
        self._remember()
        self._parts.ended(self._parts.runs.reject(self._run.id, self._run.fencing, candidate.id, verdict))
        log.info("run %d lost: %s", self._run.id, verdict.reason)

    def _fail(self, reason: str) -> None:
        if not self._parts.runs.get(self._run.id).state.over:
            run = self._parts.runs.move(self._run.id, self._run.fencing, RunState.FAILED, error=reason)
            self._parts.ended(run)
        self._parts.discard(reason)
        log.warning("run %d failed: %s", self._run.id, reason)

    def _too_poor(self) -> str | None:
        """What the run lacks now that the cases of its undrafted texts are known; None: nothing, or it had no such texts."""
        if not self._cases_added:
            return None
        rules, found = self._parts.rules.training, self._parts.generations.counts_of(self._run.id)
        return policy.lacking(found, self._run.trigger, min_cases=rules.min_cases, min_tokens=rules.min_tokens)

    def _give_back(self, missing: str) -> None:
        reason = f"its undrafted texts had fewer cases than expected: {missing}"
        if not self._parts.runs.get(self._run.id).state.over:
            moved = self._parts.runs.move(
                self._run.id, self._run.fencing, RunState.FAILED, error=reason, give_back=True
            )
            self._parts.ended(moved)
        self._texts_given_back = True
        self._child.stop()
        log.info("run %d gives its texts back: %s", self._run.id, reason)

    def _remember(self) -> None:
        """What this run learnt from is old from now on: the next runs replay some of it."""
        self._parts.replay.remember(self._run.id, RESERVOIR, seed=0)
