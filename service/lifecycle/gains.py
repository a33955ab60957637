"""Measures the gain of the serving adapter: while the server is idle, it and the base draft are scored on the answers
given since its promotion. Scores of the watch, which have the same form, are used as well."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta

from service.core import BARE_DRAFT, AdapterRef, GainsState, MeasuredGain, RoundCosts, RunState, Score
from service.lifecycle.child import Child
from service.lifecycle.comparison import MIN_CONVERSATIONS, Comparison, realised
from service.lifecycle.context import LifecycleContext
from service.lifecycle.jobs import Demand
from service.lifecycle.loans import NEEDED, Borrower
from service.lifecycle.machine import Strain
from service.lifecycle.messages import Message, Scores
from service.lifecycle.policy import IDLE_SECONDS
from service.lifecycle.scoring_job import ScoringJob
from service.store.log.sampler import Text, sample

log = logging.getLogger(__name__)

MIN_ANSWERS = 20
"""Distinct answers needed for a measurement, and new answers needed for the next one."""
ANSWERS = 200
"""Maximum number of distinct answers scored."""
READ_FOR_EACH = 5
"""Generations read per wanted answer: equal ones are scored once."""
AGAIN = timedelta(days=1)
"""Minimum time between two measurements."""
LOOK_SECONDS = 60.0
"""Interval between checks whether a measurement is due."""


def measure(
    adapter: Sequence[Score],
    base: Sequence[Score],
    costs: RoundCosts | None,
    *,
    base_step: float = 1.0,
    resamples: int,
    seed: int,
    read_to: int = 0,
) -> MeasuredGain | None:
    """The gain of an adapter over the base draft, from the scores of both on the same answers.

    costs: of rounds with the adapter. base_step: cost of a step of the base draft relative to one with the adapter.
    read_to: see MeasuredGain. None with too few conversations for an interval. Raises ValueError when the scores cover
    different texts.
    """
    by_call = Comparison(adapter, base)
    if by_call.conversations < MIN_CONVERSATIONS or by_call.empty:
        return None
    tokens, gain = by_call.tokens, by_call.gain(resamples, seed)
    drafted = realised(adapter, resamples, seed)
    speed_before = speed_after = speed_gain = None
    if costs is not None:
        base_seconds = costs.scaled(base_step)
        speed_before, speed_after = _tokens_per_second(base, base_seconds), _tokens_per_second(adapter, costs.seconds)
        speed_gain = Comparison(adapter, base, costs.seconds, base_seconds).gain(resamples, seed).interval
    return MeasuredGain(
        answers=by_call.generations,
        tokens=tokens,
        before=tokens / sum(score.calls[-1] for score in base),
        after=tokens / sum(score.calls[-1] for score in adapter),
        gain=gain.gain,
        low90=gain.low,
        high90=gain.high,
        speed_before=speed_before,
        speed_after=speed_after,
        speed_gain=speed_gain,
        realised=None if drafted is None else drafted.tokens_per_call,
        predicted=None if drafted is None else drafted.predicted,
        overstated=drafted is not None and drafted.short,
        read_to=read_to,
    )


def _tokens_per_second(scores: Sequence[Score], seconds: Sequence[float]) -> float:
    """Speed at the draft length that is best for these answers. seconds: cost of a round that drafts 1, 2, ... tokens."""
    taken = [sum(score.calls[i] for score in scores) * cost for i, cost in enumerate(seconds)]
    return sum(score.tokens for score in scores) / min(taken)


class GainMeter:
    """Decides when the active adapter is measured and records the result.

    idle_seconds: seconds since this server last handled a request. strain: why the machine cannot spare what scoring
    takes. watching: whether the adapter's watch is still running.
    """

    def __init__(
        self,
        context: LifecycleContext,
        *,
        idle_seconds: Callable[[], float],
        strain: Callable[[], Strain | None],
        watching: Callable[[], bool],
    ) -> None:
        self._context = context
        self._idle_seconds = idle_seconds
        self._strain = strain
        self._watching = watching
        self._looked_at: float | None = None

    def start(self) -> GainJob | None:
        """Starts a measurement that is due: no request for a minute, the watch is over, there are enough answers since
        the promotion, and the last measurement is a day old."""
        now = self._context.timer()
        if self._idle_seconds() < IDLE_SECONDS or (
            self._looked_at is not None and now - self._looked_at < LOOK_SECONDS
        ):
            return None
        self._looked_at = now
        ref = self._context.active_ref()
        if ref is None or self._watching() or not self._due(ref) or self._strain() is not None:
            return None
        texts = self._answers(READ_FOR_EACH * ANSWERS)
        fresh = sample(texts, ANSWERS, seed=ref.id)
        if len(fresh) < MIN_ANSWERS or len({one.conversation for one in fresh}) < MIN_CONVERSATIONS:
            return None
        if not self._context.loans.borrow(Borrower.COMPARISON):
            return None
        try:
            child = self._context.launch(
                kind="score",
                adapters={str(one): self._context.adapter_folder(one) for one in (ref.id, BARE_DRAFT)},
                generations=[one.id for one in fresh],
                seconds=self._context.scoring_seconds(ref),
            )
        except OSError as error:
            log.warning("the gain of adapter %d cannot be measured: %s", ref.id, error)
            return None
        return GainJob(self, self._context, ref, child, read_to=self._context.stores.generations.end())

    def record(self, ref: AdapterRef, scores: Scores, read_to: int) -> None:
        """Records the gain given by scores of an adapter and of the base draft. Scores that cannot be compared are
        logged and dropped."""
        own, base = str(ref.id), str(BARE_DRAFT)
        try:
            gain = measure(
                scores.by_adapter.get(own, ()),
                scores.by_adapter.get(base, ()),
                self._context.own_costs(scores.lengths(own)),
                base_step=scores.step(base, relative_to=own),
                resamples=self._context.rules.gate.bootstrap,
                seed=ref.id,
                read_to=read_to,
            )
        except ValueError as error:
            log.warning("the gain of adapter %d cannot be measured: %s", ref.id, error)
            return
        if gain is not None:
            self._context.stores.gains.record(ref.id, gain)
            log.info("adapter %d: %s", ref.id, gain.summary)

    def announce(self) -> None:
        """Reports the newest measurement of the serving adapter to the metrics."""
        ref = self._context.active_ref()
        newest = None if ref is None else self._context.stores.gains.newest(ref.id)
        self._context.events.gain(None if newest is None else newest[1])

    def state(self) -> GainsState:
        """See core.Operator."""
        ref = self._context.active_ref()
        if ref is None:
            return GainsState(BARE_DRAFT, None, None, self._why_bare())
        if (newest := self._context.stores.gains.newest(ref.id)) is not None:
            return GainsState(ref.id, newest[1], newest[0], None)
        answers = len(self._answers(MIN_ANSWERS))
        if self._watching() or answers < MIN_ANSWERS:
            reason = f"adapter {ref.id} was promoted {answers} answers ago and has not been compared yet"
        else:
            reason = f"adapter {ref.id} will be measured after a minute without requests"
        return GainsState(ref.id, None, None, reason)

    def _due(self, ref: AdapterRef) -> bool:
        newest = self._context.stores.gains.newest(ref.id)
        if newest is None:
            return True
        at, gain = newest
        if self._context.database_now() - at < AGAIN:
            return False
        logged, who = self._context.stores.generations, self._context.who
        return len(logged.names_after(who, gain.read_to, MIN_ANSWERS)) >= MIN_ANSWERS

    def _answers(self, limit: int) -> list[Text]:
        """The newest answers of this pair since the serving adapter was activated."""
        stores, who = self._context.stores, self._context.who
        return stores.generations.texts_after(who, stores.adapters.serves_since(who.target, who.draft), limit)

    def _why_bare(self) -> str:
        """Why the base draft serves."""
        context = self._context
        if not context.who.draft:
            return "this server runs without a draft model"
        judged = next((run for run in context.stores.runs.newest(context.who, 20) if run.state.judged), None)
        if judged is None or judged.verdict is None:
            return "no training run has been judged yet"
        if judged.state is RunState.REJECTED:
            return f"the base draft serves: run {judged.id} was rejected ({judged.verdict.reason})"
        return f"the base draft serves: adapter {judged.adapter} was rolled back or switched off"


class GainJob(ScoringJob):
    """A child that scores the active adapter and the base draft. It ends as soon as a request arrives or the machine is
    short of something; another one is started later."""

    def __init__(
        self, meter: GainMeter, context: LifecycleContext, ref: AdapterRef, child: Child, *, read_to: int
    ) -> None:
        super().__init__(context, child)
        self._meter = meter
        self._ref = ref
        self._read_to = read_to
        self._dropped = False

    def yields(self, demand: Demand) -> bool:
        """Any request comes first."""
        return demand.waiting or demand.asked

    def pause(self, demand: Demand, strain: Strain | None) -> None:
        """Ends the child when a request arrives, or for `strain`."""
        if (strain is not None or self.yields(demand)) and not self._child.ended:
            self._stop()

    def _stop(self) -> None:
        self._dropped = True
        self._child.stop()

    def give_back_memory(self) -> None:
        """See Job. The measurement is repeated later."""
        self._stop()
        self.abandon(NEEDED)

    def handle(self, message: Message) -> None:
        """As in other scoring jobs, but messages of a stopped child are ignored."""
        if not self._dropped:
            super().handle(message)

    def _use(self, scores: Scores) -> None:
        self._meter.record(self._ref, scores, self._read_to)

    def _fail(self, reason: str) -> None:
        log.warning("the gain of adapter %d could not be measured: %s", self._ref.id, reason)

    def abandon(self, reason: str) -> None:
        """Logs the reason; the measurement is repeated later."""
        log.info("the gain measurement of adapter %d was stopped: %s", self._ref.id, reason)
