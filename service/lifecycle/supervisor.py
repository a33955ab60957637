"""The loop's conscience: one idempotent tick that reaps, gates, promotes, watches, rolls back, starts and cleans up.

The truth is in rows. What is kept in memory (the child, a count of failed watches) may vanish at any moment: the next start
finds every run and adapter in a legal state and goes on from there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from service.core import (
    BARE_DRAFT,
    AdapterRef,
    AdapterRefused,
    AdapterState,
    BadRequest,
    Conflict,
    IllegalMove,
    Launcher,
    Progress,
    Provenance,
    RunState,
    TrainingRun,
    Trigger,
    Unavailable,
    Verdict,
)
from service.lifecycle import gate, policy
from service.lifecycle.children import Candidate, Child, Crashed, Done, GaveUp, Message, Scores
from service.lifecycle.switching import Events, Switching
from service.settings import GateSettings, TrainingSettings
from service.store.adapters import Adapters
from service.store.files import sweep
from service.store.generations import Generations
from service.store.replay import Replay
from service.store.runs import Runs

log = logging.getLogger(__name__)

RESERVOIR = 256
"""Generations held per domain for replay."""
WATCH_ATTEMPTS = 3
PURGE_EVERY = 40
"""Ticks between two looks at how much is stored."""


@dataclass(frozen=True, slots=True)
class Rules:
    """max_generations: what the log may hold. adapters: root of the adapter folders. spec: the part of a child's job that is
    the same for every job (learning.spec)."""

    training: TrainingSettings
    gate: GateSettings
    max_generations: int
    adapters: Path
    spec: Mapping[str, object]


@dataclass(slots=True)
class Job:
    """A child at work. run: what it trains, None when it compares. adapter: the candidate's or the watched adapter's row.
    offered: generation ids by domain, for the reservoir."""

    child: Child
    run: TrainingRun | None
    adapter: AdapterRef | None
    offered: dict[str, list[str]]


class Supervisor:
    """core.Operator, and the tick. `who` is what serves now; busy: whether serving needs the machine for itself."""

    def __init__(
        self,
        *,
        runs: Runs,
        adapters: Adapters,
        generations: Generations,
        replay: Replay,
        switching: Switching,
        launcher: Launcher,
        events: Events,
        rules: Rules,
        who: Provenance,
        busy: Callable[[], bool] = lambda: False,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._runs = runs
        self._adapters = adapters
        self._generations = generations
        self._replay = replay
        self._switching = switching
        self._launcher = launcher
        self._events = events
        self._rules = rules
        self._who = who
        self._busy = busy
        self._now = now
        self._lock = threading.RLock()
        self._job: Job | None = None
        self._watch_failures = 0
        self._ticks = 0
        self._stopped = False

    # -------------------------------------------------------------------------------------------------- start and stop

    def start(self) -> None:
        """Put right what an earlier process left, and serve what the rows say."""
        with self._lock:
            if (run := self._runs.current()) is not None:
                self._crashed(run, "the server ended while it ran")
            self._sweep()
            if self._who.draft:
                self._switching.serve_active()

    def stop(self) -> None:
        """End a child under way; its run becomes CRASHED and its cases are free again."""
        with self._lock:
            self._stopped = True
            if self._job is not None:
                self._job.child.stop()
                if self._job.run is not None:
                    self._crashed(self._runs.get(self._job.run.id), "the server was stopped")
                self._job = None

    def tick(self) -> None:
        """One look at everything; safe to call at any time, from any thread, any number of times."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._stopped:
                return
            self._reap()
            if self._job is None and self._who.draft:
                self._watch()
            if self._job is None and self._who.draft:
                self._start_if_due()
            self._ticks += 1
            if self._ticks % PURGE_EVERY == 1:
                self._generations.purge(self._rules.max_generations)
        finally:
            self._lock.release()

    # ------------------------------------------------------------------------------------------------- the child's words

    def _reap(self) -> None:
        job = self._job
        if job is None:
            return
        job.child.listen(self._now(), self._rules.training.timeout_seconds)
        job.child.pause(self._busy())
        while job.child.inbox:
            if job.run is not None:
                self._heed_training(job, job.run, job.child.inbox[0])
            else:
                self._heed_watch(job, job.child.inbox[0])
            # Taken off only now: had the database been away, the next tick would try again.
            job.child.inbox.popleft()
        if job.child.over:
            self._job = None

    def _heed_training(self, job: Job, run: TrainingRun, message: Message) -> None:
        match message:
            case Progress():
                self._runs.progress(run.id, run.fencing, message)
                self._events.training(self._runs.get(run.id))
            case Candidate():
                if job.adapter is None:
                    job.adapter = self._adapters.add(
                        run_id=run.id,
                        fencing=run.fencing,
                        folder=message.folder,
                        sha256=message.sha256,
                        rank=message.rank,
                        scale=message.scale,
                        keys=message.keys,
                        draft=self._who.draft,
                        parent=run.parent,
                    )
                self._runs.move(run.id, run.fencing, RunState.SCORING)
            case Scores():
                job.child.scores = message
            case Done():
                self._decide(job, run)
            case GaveUp(reason):
                self._ended(self._runs.move(run.id, run.fencing, RunState.FAILED, error=reason))
                self._discard(run.id, reason)
            case Crashed(reason):
                self._crashed(self._runs.get(run.id), reason)

    def _decide(self, job: Job, run: TrainingRun) -> None:
        if job.adapter is None or job.child.scores is None:
            self._crashed(self._runs.get(run.id), "the child ended without a candidate and its scores")
            return
        scores, rules = job.child.scores.by_adapter, self._rules.gate
        verdict = gate.judge(
            scores["candidate"],
            scores[str(run.parent)],
            min_prompts=rules.min_prompts,
            min_tokens=rules.min_tokens,
            domain_tolerance=rules.domain_tolerance,
            resamples=rules.bootstrap,
            seed=run.id,
        )
        if self._runs.get(run.id).state is RunState.SCORING:
            if not verdict.promoted:
                self._reject(job, run, verdict)
                return
            self._runs.move(run.id, run.fencing, RunState.STAGING)
        begun = time.perf_counter()
        try:
            staged = self._switching.stage(job.adapter)
        except (AdapterRefused, Unavailable, TimeoutError) as error:
            reason = f"passed the gate, but will not load: {error}"
            self._reject(job, run, Verdict(False, reason, verdict.prompts, verdict.tokens, *_figures(verdict)))
            return
        self._remember(job)
        self._ended(self._runs.promote(run.id, run.fencing, job.adapter.id, verdict))
        self._events.promoted()
        self._switching.switch(staged, job.adapter, begun)
        log.info("adapter %d serves: %s", job.adapter.id, verdict.reason)

    def _reject(self, job: Job, run: TrainingRun, verdict: Verdict) -> None:
        self._remember(job)
        self._ended(self._runs.reject(run.id, run.fencing, job.adapter.id if job.adapter else None, verdict))
        log.info("run %d lost: %s", run.id, verdict.reason)

    def _remember(self, job: Job) -> None:
        for domain, ids in job.offered.items():
            self._replay.offer(domain, ids, RESERVOIR, seed=0)
        job.offered = {}

    def _crashed(self, run: TrainingRun, reason: str) -> None:
        if not run.state.over:
            self._ended(self._runs.move(run.id, run.fencing, RunState.CRASHED, error=reason))
        self._discard(run.id, reason)

    def _discard(self, run_id: int, reason: str) -> None:
        """A candidate whose run came to nothing."""
        for ref in self._adapters.all():
            if ref.run == run_id and ref.state is AdapterState.CANDIDATE:
                self._adapters.broken(ref.id, reason)

    def _ended(self, run: TrainingRun) -> None:
        self._events.training(run)
        self._events.training_ended(run.state)

    # ---------------------------------------------------------------------------------------------------------- watching

    def _watch(self) -> None:
        """Compare a promoted adapter with its parent once enough new traffic has come."""
        ref = self._unwatched()
        if ref is None:
            return
        promoted = self._adapters.evaluations(ref.id, "gate")[-1][0]
        wanted = self._rules.gate.watch_generations
        fresh = self._generations.after(self._who, promoted, wanted)
        if len(fresh) < wanted:
            return
        parent = None if ref.parent == BARE_DRAFT else str(self._adapters.get(ref.parent).folder)
        spec = {
            **self._rules.spec,
            "kind": "score",
            "adapters": {str(ref.id): str(ref.folder), str(ref.parent): parent},
            "generations": [generation.id for generation in fresh],
        }
        self._job = Job(Child(self._launcher.launch(spec), self._now(), ref.id), None, ref, {})

    def _unwatched(self) -> AdapterRef | None:
        ref = self._adapters.active(self._who.draft)
        if ref is None or not self._adapters.evaluations(ref.id, "gate") or self._adapters.evaluations(ref.id, "watch"):
            return None
        return ref

    def _heed_watch(self, job: Job, message: Message) -> None:
        ref = job.adapter
        assert ref is not None
        match message:
            case Scores():
                job.child.scores = message
            case Done() if job.child.scores is not None:
                scores = job.child.scores.by_adapter
                verdict = gate.watch(
                    scores[str(ref.id)], scores[str(ref.parent)], resamples=self._rules.gate.bootstrap, seed=ref.id
                )
                self._end_watch(ref, verdict)
            case Done() | GaveUp() | Crashed():
                self._watch_failures += 1
                log.warning("watching adapter %d failed: %s", ref.id, message)
                if self._watch_failures >= WATCH_ATTEMPTS:
                    self._end_watch(ref, Verdict(True, "stays: it could not be compared", 0, 0, 0.0, 0.0, 0.0))
            case _:
                log.warning("unexpected message while watching: %s", message)

    def _end_watch(self, ref: AdapterRef, verdict: Verdict) -> None:
        self._watch_failures = 0
        self._adapters.record_evaluation(ref.id, "watch", verdict)
        log.info("adapter %d %s", ref.id, verdict.reason)
        if not verdict.promoted and self._adapters.get(ref.id).state is AdapterState.ACTIVE:
            self._roll_back(ref)

    def _roll_back(self, ref: AdapterRef) -> AdapterRef | None:
        self._adapters.roll_back(ref.id)
        self._events.rolled_back()
        return self._switching.serve_active()

    # ---------------------------------------------------------------------------------------------------- starting a run

    def _start_if_due(self) -> None:
        training = self._rules.training
        latest = self._runs.latest(1)
        decision = policy.decide(
            self._generations.counts(self._who),
            latest[0] if latest else None,
            self._now(),
            min_cases=training.min_cases,
            min_tokens=training.min_tokens,
            cooldown_seconds=training.cooldown_seconds,
            enabled=training.enabled,
            watching=self._unwatched() is not None,
        )
        if isinstance(decision, Trigger) and (run := self._claim(decision, None)) is not None:
            self._launch(run)

    def _claim(self, trigger: Trigger, key: str | None) -> TrainingRun | None:
        active = self._adapters.active(self._who.draft)
        return self._runs.claim(
            trigger=trigger,
            who=self._who,
            parent=active.id if active else BARE_DRAFT,
            limit=self._rules.training.max_generations,
            idempotency_key=key,
            config=self._rules.training.model_dump(),
        )

    def _launch(self, run: TrainingRun) -> None:
        offered: dict[str, list[str]] = {}
        for generation in self._generations.claimed(run.id):
            offered.setdefault(generation.prompt.domain or "untagged", []).append(generation.id)
        parent = None if run.parent == BARE_DRAFT else str(self._adapters.get(run.parent).folder)
        spec = {
            **self._rules.spec,
            "kind": "train",
            "run": run.id,
            "fencing": run.fencing,
            "parent": parent,
            "parent_id": run.parent,
        }
        try:
            handle = self._launcher.launch(spec)
        except OSError as error:
            self._crashed(run, f"the child could not be started: {error}")
            return
        self._job = Job(Child(handle, self._now()), run, None, offered)
        self._events.training(self._runs.move(run.id, run.fencing, RunState.TRAINING))

    def _sweep(self) -> None:
        gone = sweep(self._rules.adapters, [ref.folder for ref in self._adapters.all()])
        if gone:
            log.info("removed %d adapter folders that no row knows", len(gone))

    # --------------------------------------------------------------------------------------------------- operator's words

    def request_training(self, idempotency_key: str | None) -> TrainingRun:
        with self._lock:
            if idempotency_key is not None and (known := self._runs.by_key(idempotency_key)) is not None:
                return known
            if self._stopped or not self._who.draft:
                raise Conflict("this server runs without a draft model" if not self._who.draft else "shutting down")
            if self._job is not None or (self._runs.current()) is not None:
                raise Conflict("a training run or a comparison is under way")
            run = self._claim(Trigger.MANUAL, idempotency_key)
            if run is None:
                raise BadRequest("nothing has been recorded yet that a run could learn from")
            self._launch(run)
            return self._runs.get(run.id)

    def run(self, run_id: int) -> TrainingRun:
        return self._runs.get(run_id)

    def adapters(self) -> list[AdapterRef]:
        return self._adapters.all()

    def activate(self, adapter_id: int) -> AdapterRef | None:
        with self._lock:
            ref = None if adapter_id == BARE_DRAFT else self._adapters.get(adapter_id)
            if ref is not None and ref.state in {AdapterState.CANDIDATE, AdapterState.REJECTED, AdapterState.BROKEN}:
                raise Conflict(f"adapter {adapter_id} is {ref.state}")
            begun = time.perf_counter()
            staged = self._switching.stage(ref)
            try:
                ref = self._adapters.activate(adapter_id, self._who.draft)
            except IllegalMove as error:
                raise Conflict(str(error)) from error
            if ref is not None and not self._adapters.evaluations(ref.id, "watch"):
                told = Verdict(True, "stays: an operator chose it", 0, 0, 0.0, 0.0, 0.0)
                self._adapters.record_evaluation(ref.id, "watch", told)
            self._switching.switch(staged, ref, begun)
            return ref

    def rollback(self) -> AdapterRef | None:
        with self._lock:
            ref = self._adapters.active(self._who.draft)
            if ref is None:
                raise Conflict("the bare draft serves: there is nothing to roll back")
            return self._roll_back(ref)


def _figures(verdict: Verdict) -> tuple[float, float, float]:
    return verdict.gain, verdict.low90, verdict.high90
