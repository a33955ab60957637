"""The watch after a promotion: the adapter is compared with its parent and the bare draft on the traffic that follows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from datetime import timedelta

from service.core import BARE_DRAFT, AdapterRef, AdapterState, IllegalMove, RoundCosts, Verdict
from service.lifecycle.child import Child
from service.lifecycle.context import LifecycleContext
from service.lifecycle.interim_check import FEWEST, CheckResult, check_schedule, interim_check
from service.lifecycle.jobs import Demand
from service.lifecycle.loans import NEEDED, Borrower
from service.lifecycle.machine import Strain
from service.lifecycle.messages import Scores
from service.lifecycle.scoring_job import ScoringJob
from service.store.log.sampler import sample
from service.store.registry.adapters import EvaluationKind

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Comparisons of one adapter that may fail before it is left alone."""
MEMORY_SECONDS = 15.0
"""How long a comparison waits before it asks for memory again."""
PATIENCE = 4
"""Generations for each text that a check wants, after which any but the last check is made with fewer: what is very bad shows
in a few."""
READ_FOR_EACH = 10
"""Generations that are read for each that a watch wants; after so many, or as many as the log may hold, it ends with what there
is."""
LONGEST = timedelta(days=7)
"""After so long, or as long as the log holds a text, it ends with what there is."""
BLOCKS = timedelta(days=1)
"""Runs wait for a watch that has decided nothing for so long at most, or until it has compared BLOCKING of its answers."""
BLOCKING = 0.25
PAUSED_SECONDS = 600.0
"""A check pauses for requests for so long in all. Under a load that never ends a bad adapter would otherwise serve for ever."""


class Watch:
    """Which adapter is still to be compared, and its comparison. Checks that decided nothing are evaluations of kind INTERIM;
    the watch is over when one of kind WATCH is recorded: by a check that decided, by an operator who chose the adapter or
    rolled it back, or because comparing failed too often.

    on_scores: called with the scores of every check that left the adapter in place, and the newest generation (seq) when the
    check was started.
    """

    def __init__(self, context: LifecycleContext, on_scores: Callable[[AdapterRef, Scores, int], None]) -> None:
        self._context = context
        self.on_scores = on_scores
        self._failures: dict[int, int] = {}
        self._least: dict[tuple[int, int], int] = {}
        """How many answers since the promotion the next check of an adapter wants, where they were read in vain."""
        self._memory_at = -math.inf
        """When to ask for memory again, where serving could not spare what a comparison takes."""
        self._over: int | None = None
        """The adapter whose watch was found over last; none begins anew."""

    def pending(self) -> AdapterRef | None:
        """The active adapter, when it was promoted by a gate and its watch is not over."""
        adapters = self._context.stores.adapters
        ref = self._context.active_ref()
        if ref is None or ref.id == self._over:
            return None
        if adapters.evaluations(ref.id, EvaluationKind.WATCH):
            self._over = ref.id
            return None
        return ref if adapters.evaluations(ref.id, EvaluationKind.GATE) else None

    def blocks_runs(self) -> bool:
        """Whether a training run should wait for the watch: it is undecided, and neither a day nor a quarter of its answers
        have passed. A run on top of an undecided adapter is safe: its gate compares it with the base draft as well."""
        ref = self.pending()
        if ref is None:
            return False
        checks = self._context.stores.adapters.evaluations(ref.id, EvaluationKind.INTERIM)
        compared = max((verdict.prompts for _, verdict in checks), default=0)
        enough = BLOCKING * self._context.rules.gate.watch_generations
        return compared < enough and not self._older_than(ref, BLOCKS)

    def start(self) -> WatchJob | None:
        """Start the next comparison once enough has been generated since the promotion."""
        ref = self.pending()
        if ref is None or self._context.timer() < self._memory_at:
            return None
        adapters, due = self._context.stores.adapters, check_schedule(self._context.rules.gate.watch_generations)
        promoted = adapters.serves_since(self._context.who.target, self._context.who.draft)
        done = len(adapters.evaluations(ref.id, EvaluationKind.INTERIM))
        wanted = due[min(done, len(due) - 1)]
        logged, who = self._context.stores.generations, self._context.who
        most = min(READ_FOR_EACH * due[-1], self._context.rules.max_generations)
        least, overdue = min(self._least.get((ref.id, done), wanted), most), self._overdue(ref)
        if not done and self._older_than(ref, BLOCKS):
            least = min(least, FEWEST)
        if not overdue and len(logged.names_after(who, promoted, least)) < least:
            return None
        texts = logged.texts_after(who, promoted, most)
        # As at the gate: a health check every few seconds is one text, not evidence.
        fresh = [one.id for one in sample(texts, due[-1], seed=ref.id)]
        # Traffic that repeats itself may never bring enough; runs wait for the watch, so it must end.
        last = overdue or len(fresh) >= due[-1] or len(texts) >= most
        if last and not fresh:
            self.end(ref, "stays: there were no answers to compare it on")
            return None
        # What there is when runs stop waiting for the watch, if it has not been looked at yet.
        stale = not done and len(fresh) >= FEWEST and self._older_than(ref, BLOCKS)
        early = done < len(due) - 1 and (stale or len(texts) >= PATIENCE * wanted)
        if len(fresh) < wanted and not early and not last:
            # One text adds one at most: not before there are so many is it worth to read them all again.
            enough = min(len(texts) + wanted - len(fresh), most)
            self._least = {(ref.id, done): min(enough, PATIENCE * wanted) if done < len(due) - 1 else enough}
            return None
        if not self._context.loans.borrow(Borrower.COMPARISON):
            self.wait_for_memory()
            return None
        try:
            child = self._context.launch(
                kind="score",
                adapters={
                    str(adapter): self._context.adapter_folder(adapter) for adapter in (ref.id, ref.parent, BARE_DRAFT)
                },
                generations=fresh,
                seconds=self._context.scoring_seconds(ref),
            )
        except OSError as error:
            self.failed(ref, f"the child could not be started: {error}")
            return None
        log.info("adapter %d is compared on %d answers since its promotion", ref.id, len(fresh))
        return WatchJob(self._context, self, ref, child, done=done, last=last, read_to=logged.end())

    def _overdue(self, ref: AdapterRef) -> bool:
        """Whether its watch has lasted so long that no more is to be waited for."""
        days = self._context.rules.max_days
        return self._older_than(ref, LONGEST if days is None else min(LONGEST, timedelta(days=days)))

    def _older_than(self, ref: AdapterRef, age: timedelta) -> bool:
        """Whether it was promoted longer ago than that."""
        promoted_at = max(at for at, _ in self._context.stores.adapters.evaluations(ref.id, EvaluationKind.GATE))
        return self._context.database_now() - promoted_at > age

    def wait_for_memory(self) -> None:
        """Requests need the memory that a comparison takes."""
        self._memory_at = self._context.timer() + MEMORY_SECONDS

    def failed(self, ref: AdapterRef, reason: str) -> None:
        """No comparison this time."""
        self._failures[ref.id] = self._failures.get(ref.id, 0) + 1
        log.warning("adapter %d could not be compared with what served before: %s", ref.id, reason)
        if self._failures[ref.id] >= ATTEMPTS:
            self.end(ref, f"stays: it could not be compared ({reason})")

    def end(self, ref: AdapterRef, reason: str) -> None:
        """End the watch without a comparison. Idempotent."""
        if not self._context.stores.adapters.evaluations(ref.id, EvaluationKind.WATCH):
            self._context.stores.adapters.record_evaluation(
                ref.id, EvaluationKind.WATCH, Verdict(True, reason, 0, 0, 0.0, 0.0, 0.0)
            )


class WatchJob(ScoringJob):
    """A child that scores the watched adapter, its parent and the bare draft. done: checks before this one. last: there will be
    no other check. read_to: the newest generation (seq) when it was started."""

    def __init__(
        self,
        context: LifecycleContext,
        watch: Watch,
        ref: AdapterRef,
        child: Child,
        *,
        done: int,
        last: bool,
        read_to: int,
    ) -> None:
        super().__init__(context, child)
        self._watch = watch
        self._ref = ref
        self._done = done
        self._last = last
        self._read_to = read_to
        self._paused_seconds = 0.0
        self._polled_at = context.timer()

    def yields(self, demand: Demand) -> bool:
        """While requests wait, as training does, until it has paused for PAUSED_SECONDS in all."""
        return demand.waiting and self._paused_seconds < PAUSED_SECONDS

    def pause(self, demand: Demand, strain: Strain | None) -> None:
        """Count how long it has been paused. It does not pause for `strain`: a comparison is short, and what serves may be
        bad."""
        now = self._context.timer()
        if self.yields(demand):
            self._paused_seconds += now - self._polled_at
        self._polled_at = now

    def give_back_memory(self) -> None:
        """See Job. It is no failure: a later tick compares again."""
        self._child.stop()
        self._child.inbox.clear()
        self._watch.wait_for_memory()
        self.abandon(NEEDED)

    def abandon(self, reason: str) -> None:
        """Log the reason; the watch stays pending and a later tick compares again."""
        log.info("comparing adapter %d ended: %s", self._ref.id, reason)

    def _fail(self, reason: str) -> None:
        self._watch.failed(self._ref, reason)

    def _use(self, scores: Scores) -> None:
        ref, adapters = self._ref, self._context.stores.adapters
        if adapters.evaluations(ref.id, EvaluationKind.WATCH):
            return  # an operator chose it meanwhile
        costs = self._context.own_costs(scores.lengths(str(ref.id)))
        try:
            result = self._check(scores, costs)
        except ValueError as error:
            self._watch.failed(ref, f"its scores cannot be judged: {error}")
            return
        if result.roll_back_to is not None and adapters.get(ref.id).state is AdapterState.ACTIVE:
            try:
                adapters.roll_back(ref.id, result.roll_back_to, result.verdict, checks=self._done)
            except IllegalMove as error:
                log.warning("adapter %d is not rolled back: %s", ref.id, error)
                return
            self._context.events.rolled_back()
        else:
            kind = EvaluationKind.WATCH if result.over else EvaluationKind.INTERIM
            if not adapters.record_evaluation(ref.id, kind, result.verdict, checks=self._done):
                log.warning("adapter %d has been checked by another process meanwhile", ref.id)
                return
        log.info("adapter %d %s", ref.id, result.verdict.reason)
        if result.roll_back_to is None:
            self._watch.on_scores(ref, scores, self._read_to)
        if result.short:
            log.warning("adapter %d: the engine accepts less of its drafts than its scores say", ref.id)

    def _check(self, scores: Scores, costs: RoundCosts | None) -> CheckResult:
        """Raises ValueError when the scores are not what they should be."""
        ref, rules = self._ref, self._context.rules.gate
        opponents = (ref.parent, BARE_DRAFT)
        steps = {other: scores.step(str(other), relative_to=str(ref.id)) for other in opponents}
        return interim_check(
            scores.by_adapter.get(str(ref.id), ()),
            {other: scores.by_adapter.get(str(other), ()) for other in opponents},
            # What engines measure is what rounds cost with the adapter that serves.
            seconds=costs.seconds if costs is not None else None,
            others_seconds={other: costs.scaled(step) for other, step in steps.items()} if costs is not None else None,
            parent=ref.parent,
            last=self._last,
            resamples=rules.bootstrap,
            seed=ref.id,
        )
