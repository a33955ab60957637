"""The watch after a promotion: compares the adapter with its parent and the base draft on live traffic."""

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
"""Failed comparisons of one adapter after which its watch ends."""
MEMORY_SECONDS = 15.0
"""Seconds before a comparison asks for memory again."""
PATIENCE = 4
"""After PATIENCE times the wanted number of generations, every check except the last runs on fewer distinct texts: a
very bad adapter shows in a few."""
READ_FOR_EACH = 10
"""Generations read per wanted text. After that many, or after as many as the log holds, the watch ends with the texts
it has."""
LONGEST = timedelta(days=7)
"""Maximum age of a watch (or the log's retention time, if shorter); it then ends with the texts it has."""
BLOCKS = timedelta(days=1)
"""Maximum time for which an undecided watch blocks training runs; they also start once BLOCKING of its answers are compared."""
BLOCKING = 0.25
PAUSED_SECONDS = 600.0
"""Total time for which one check pauses for requests. Without a limit, a bad adapter would serve forever under constant
load."""


class Watch:
    """Tracks which adapter still has to be compared, and its comparison.

    Undecided checks are stored as evaluations of kind INTERIM. The watch is over when one of kind WATCH is recorded: by
    a check that decided, by an operator who activated or rolled back the adapter, or after too many failed comparisons.

    on_scores: called with the scores of every check that left the adapter in place, and the newest generation (seq) at
    the check's start.
    """

    def __init__(self, context: LifecycleContext, on_scores: Callable[[AdapterRef, Scores, int], None]) -> None:
        self._context = context
        self.on_scores = on_scores
        self._failures: dict[int, int] = {}
        self._least: dict[tuple[int, int], int] = {}
        """Answers since the promotion that the next check of an adapter needs, after a read that found too few distinct
        ones."""
        self._memory_at = -math.inf
        """When to ask for memory again after serving could not spare it."""
        self._over: int | None = None
        """The adapter whose watch was last found to be over; a finished watch never restarts."""

    def pending(self) -> AdapterRef | None:
        """The active adapter, if a gate promoted it and its watch is not over."""
        adapters = self._context.stores.adapters
        ref = self._context.active_ref()
        if ref is None or ref.id == self._over:
            return None
        if adapters.evaluations(ref.id, EvaluationKind.WATCH):
            self._over = ref.id
            return None
        return ref if adapters.evaluations(ref.id, EvaluationKind.GATE) else None

    def blocks_runs(self) -> bool:
        """Whether training runs should wait for the watch: it is undecided, less than a day old, and has compared less
        than a quarter of its answers. A run on top of an undecided adapter is safe, because its gate also compares with
        the base draft."""
        ref = self.pending()
        if ref is None:
            return False
        checks = self._context.stores.adapters.evaluations(ref.id, EvaluationKind.INTERIM)
        compared = max((verdict.prompts for _, verdict in checks), default=0)
        enough = BLOCKING * self._context.rules.gate.watch_generations
        return compared < enough and not self._older_than(ref, BLOCKS)

    def start(self) -> WatchJob | None:
        """Starts the next comparison once there are enough generations since the promotion."""
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
        # As at the gate: a health check repeated every few seconds is one text, not evidence.
        fresh = [one.id for one in sample(texts, due[-1], seed=ref.id)]
        # Repetitive traffic may never provide enough texts; runs wait for the watch, so it must end.
        last = overdue or len(fresh) >= due[-1] or len(texts) >= most
        if last and not fresh:
            self.end(ref, "stays: no answers to compare on")
            return None
        # Runs are about to stop waiting for a watch without a check: check what there is.
        stale = not done and len(fresh) >= FEWEST and self._older_than(ref, BLOCKS)
        early = done < len(due) - 1 and (stale or len(texts) >= PATIENCE * wanted)
        if len(fresh) < wanted and not early and not last:
            # Each new generation adds at most one text: reading all again is not worthwhile before that many have arrived.
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
        log.info("comparing adapter %d on %d answers since its promotion", ref.id, len(fresh))
        return WatchJob(self._context, self, ref, child, done=done, last=last, read_to=logged.end())

    def _overdue(self, ref: AdapterRef) -> bool:
        """Whether the watch has reached its maximum age."""
        days = self._context.rules.max_days
        return self._older_than(ref, LONGEST if days is None else min(LONGEST, timedelta(days=days)))

    def _older_than(self, ref: AdapterRef, age: timedelta) -> bool:
        """Whether the adapter was promoted more than `age` ago."""
        promoted_at = max(at for at, _ in self._context.stores.adapters.evaluations(ref.id, EvaluationKind.GATE))
        return self._context.database_now() - promoted_at > age

    def wait_for_memory(self) -> None:
        """Postpones the comparison because requests need its memory."""
        self._memory_at = self._context.timer() + MEMORY_SECONDS

    def failed(self, ref: AdapterRef, reason: str) -> None:
        """Counts a failed comparison; ends the watch after ATTEMPTS."""
        self._failures[ref.id] = self._failures.get(ref.id, 0) + 1
        log.warning("adapter %d could not be compared with its predecessors: %s", ref.id, reason)
        if self._failures[ref.id] >= ATTEMPTS:
            self.end(ref, f"stays: it could not be compared ({reason})")

    def end(self, ref: AdapterRef, reason: str) -> None:
        """Ends the watch without a comparison. Idempotent."""
        if not self._context.stores.adapters.evaluations(ref.id, EvaluationKind.WATCH):
            self._context.stores.adapters.record_evaluation(
                ref.id, EvaluationKind.WATCH, Verdict(True, reason, 0, 0, 0.0, 0.0, 0.0)
            )


class WatchJob(ScoringJob):
    """A child that scores the watched adapter, its parent and the base draft. done: number of earlier checks. last: no
    check follows. read_to: newest generation (seq) at the start."""

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
        """Pauses while requests wait, like training, but for at most PAUSED_SECONDS in total."""
        return demand.waiting and self._paused_seconds < PAUSED_SECONDS

    def pause(self, demand: Demand, strain: Strain | None) -> None:
        """Adds up paused time. A comparison does not pause for `strain`: it is short, and the serving adapter may be bad."""
        now = self._context.timer()
        if self.yields(demand):
            self._paused_seconds += now - self._polled_at
        self._polled_at = now

    def give_back_memory(self) -> None:
        """See Job. This is not a failure: a later tick compares again."""
        self._child.stop()
        self._child.inbox.clear()
        self._watch.wait_for_memory()
        self.abandon(NEEDED)

    def abandon(self, reason: str) -> None:
        """Logs the reason. The watch stays pending, and a later tick compares again."""
        log.info("the comparison of adapter %d was stopped: %s", self._ref.id, reason)

    def _fail(self, reason: str) -> None:
        self._watch.failed(self._ref, reason)

    def _use(self, scores: Scores) -> None:
        ref, adapters = self._ref, self._context.stores.adapters
        if adapters.evaluations(ref.id, EvaluationKind.WATCH):
            return  # an operator activated it in the meantime
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
                log.warning("another process has already checked adapter %d", ref.id)
                return
        log.info("adapter %d %s", ref.id, result.verdict.reason)
        if result.roll_back_to is None:
            self._watch.on_scores(ref, scores, self._read_to)
        if result.short:
            log.warning("adapter %d: the engine accepts fewer draft tokens than the scores predict", ref.id)

    def _check(self, scores: Scores, costs: RoundCosts | None) -> CheckResult:
        """Raises ValueError for invalid scores."""
        ref, rules = self._ref, self._context.rules.gate
        opponents = (ref.parent, BARE_DRAFT)
        steps = {other: scores.step(str(other), relative_to=str(ref.id)) for other in opponents}
        return interim_check(
            scores.by_adapter.get(str(ref.id), ()),
            {other: scores.by_adapter.get(str(other), ()) for other in opponents},
            # Engines measure round costs with the serving adapter.
            seconds=costs.seconds if costs is not None else None,
            others_seconds={other: costs.scaled(step) for other, step in steps.items()} if costs is not None else None,
            parent=ref.parent,
            last=self._last,
            resamples=rules.bootstrap,
            seed=ref.id,
        )
