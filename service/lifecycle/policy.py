"""When a training run starts by itself. Pure functions of values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import NormalDist

from service.core import RunState, TrainingRun, Trigger, Verdict
from service.lifecycle.comparison import MIN_CONVERSATIONS
from service.lifecycle.online_testing import next_level
from service.settings import GateSettings
from service.store.log.held_out import HeldOut
from service.store.log.training_texts import UntrainedCounts
from service.store.registry.practice import Practised
from service.store.registry.run_history import RunTimes

MAX_DOUBLINGS = 5
"""Of the time to wait after failures, or rollbacks, in a row."""
SMALLER_AFTER = frozenset({RunState.OUT_OF_MEMORY, RunState.TIMED_OUT})
"""Endings after which the next run is smaller."""
IDLE_SECONDS = 60.0
"""Practice starts when nothing was asked for so long."""
POWER = 0.8
"""Probability with which a gate should promote the smallest gain that `gate.min_prompts` texts prove at the first level."""
UNKNOWN_RUN_SECONDS = 600.0
"""How long a run is assumed to take before any has come to a verdict."""
USUAL_GAIN = 0.02
"""What a run is assumed to gain, counted as one verdict beside the last RECENT ones: refusals lower the expectation, and it
never becomes zero."""
RECENT = 8
SLOWDOWN = 0.25
"""Share of its speed that a server loses while a run takes its turns. Measured on a GPU: 0.19, at `gpu_share` = 0.65."""
DAY_SECONDS = 86400.0
SHORTEST_VIEW = 3600.0
"""A server that has run for less than this counts as having been idle before."""
RUN_MINUTES, LEAST_MINUTES = 15.0, 2.0
"""Of one practice run that starts by itself."""
REFUSED, NEW_AFTER_REFUSED = 2, 100
"""After so many practice runs in a row that were refused, none starts by itself until so many generations are new."""
ROLLED_BACK = Verdict(False, "an operator rolled it back", 0, 0, 0.0, 0.0, 0.0)
"""The watch's verdict on an adapter that an operator rolled back: lost, though nothing was compared."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """No run by itself for `seconds` after `since`, when the newest of `rollbacks` adapters in a row was rolled back."""

    since: datetime
    seconds: float
    rollbacks: int


def backoff(watches: Sequence[tuple[datetime, Verdict]], seconds: float) -> Backoff | None:
    """After adapters were rolled back: `seconds`, doubled with each one more in a row, at most MAX_DOUBLINGS times. None when
    the last one stayed. watches: verdicts of the watch, newest first; of those that compared nothing only rollbacks count."""
    decided = [(at, verdict.promoted) for at, verdict in watches if verdict.prompts or not verdict.promoted]
    rollbacks = next((i for i, (_, stayed) in enumerate(decided) if stayed), len(decided))
    if not rollbacks:
        return None
    return Backoff(decided[0][0], seconds * 2.0 ** min(rollbacks - 1, MAX_DOUBLINGS), rollbacks)


def run_size(past: Sequence[tuple[RunState, int]], largest: int) -> int:
    """How many texts the next run may have: half of what a run had that was too large, and twice as many after each verdict, up
    to `largest`. past: how earlier runs ended and how many texts each had, oldest first."""
    size = largest
    for state, texts in past:
        if state in SMALLER_AFTER:
            size = max(min(size, texts) // 2, 1)
        elif state.judged:
            size = min(2 * size, largest)
    return size


def failures(runs: Sequence[TrainingRun]) -> int:
    """How many of the newest runs in a row failed by themselves: none of them came to a verdict. What was ended from outside
    says nothing. runs: newest first; the first may be under way."""
    over = [run.state for run in runs if run.state.over and run.state is not RunState.ENDED]
    return next((i for i, state in enumerate(over) if state.judged), len(over))


def refusals(runs: Sequence[TrainingRun]) -> int:
    """How many of the newest runs on logged texts were refused by the gate since the last promotion. runs: newest first."""
    judged = [run.state for run in runs if run.state.judged and run.trigger is not Trigger.PRACTICE]
    return next((i for i, state in enumerate(judged) if state is RunState.PROMOTED), len(judged))


def levels(gates: Sequence[Verdict]) -> tuple[float, float]:
    """The level at which the next candidate is tested, and the level of the one after it if that is promoted. gates: as in
    gate.judge."""
    tested = [one.promoted for one in gates if one.p_value is not None]
    return next_level(tested), next_level([*tested, True])


def prompts_needed(rules: GateSettings, level: float) -> int:
    """Held-out prompts with which a gate at `level` proves the same gain, with the same POWER, as `min_prompts` do at the first
    level; no more than a gate draws."""

    def quantiles(at: float) -> float:
        return NormalDist().inv_cdf(1.0 - at) + NormalDist().inv_cdf(POWER)

    share = max(quantiles(level) / quantiles(next_level([])), 1.0) ** 2
    return max(min(math.ceil(rules.min_prompts * share - 1e-9), rules.max_prompts), rules.min_prompts)


def unjudgeable(held_out: HeldOut, rules: GateSettings, level: float) -> str | None:
    """What a gate at `level` lacks of held-out texts; None: nothing. A run before that would be refused whatever it learns."""
    needed = prompts_needed(rules, level)
    for count, wanted, what in (
        (held_out.prompts, needed, "held-out prompts"),
        (held_out.tokens, rules.min_tokens, "held-out tokens"),
        (held_out.conversations, MIN_CONVERSATIONS, "held-out conversations"),
    ):
        if count < wanted:
            return f"too little to judge a run on: {count} of {wanted} {what}"
    return None


def expected_gain(gates: Sequence[Verdict]) -> float:
    """Relative gain in speed that the next run is expected to bring: the mean over the last RECENT verdicts, of which a refused
    one brings nothing, and one assumed verdict of USUAL_GAIN. gates: as in gate.judge."""
    recent = [one for one in gates if one.p_value is not None][-RECENT:]
    return (USUAL_GAIN + sum(one.gain for one in recent if one.promoted)) / (1 + len(recent))


def wrong_moment(
    idle_seconds: float, busy_share: float, times: RunTimes, gates: Sequence[Verdict], *, wanted: float
) -> str | None:
    """Why a run should not start at this moment; None: it may.

    While nobody has asked for `wanted` seconds a run costs no request anything. Otherwise it starts where the gain that is
    expected of it is worth more serving time within a day than it slows down. busy_share: of the last day, the share in which
    requests were answered.
    """
    if idle_seconds >= wanted:
        return None
    gain, cost = expected_gain(gates) * busy_share * DAY_SECONDS, SLOWDOWN * _run_seconds(times)
    if gain >= cost:
        return None
    return (
        f"requests are answered: a run would cost {cost / 60:.1f} minutes of serving and is expected to bring "
        f"{gain / 60:.1f} within a day; it waits for {wanted:g} s without requests"
    )


def used_up(times: RunTimes, per_day: float) -> str | None:
    """Why no run fits into what is left of `per_day` minutes in 24 hours; None: one does. A run that takes longer than a whole
    day allows may start when nothing of it is used."""
    used, run = times.seconds / 60, _run_seconds(times) / 60
    if used + run <= per_day or (per_day > 0 and not used):
        return None
    return f"trained for {used:.0f} of {per_day:g} minutes in the last 24 hours; a run takes about {run:.0f}"


def _run_seconds(times: RunTimes) -> float:
    return UNKNOWN_RUN_SECONDS if times.typical is None else times.typical


@dataclass(slots=True)
class BusyTime:
    """How much of the last day requests were answered in. Older time is forgotten gradually."""

    busy: float = 0.0
    observed: float = 0.0

    def add(self, seconds: float, *, busy: bool) -> None:
        """Count `seconds` more."""
        kept = math.exp(-seconds / DAY_SECONDS) if self.observed >= DAY_SECONDS else 1.0
        self.busy = self.busy * kept + (seconds if busy else 0.0)
        self.observed = min(self.observed + seconds, DAY_SECONDS)

    @property
    def share(self) -> float:
        """Of the last day, or of what was observed of it, but of an hour at least."""
        return min(self.busy / max(self.observed, SHORTEST_VIEW), 1.0)


def hindrance(
    runs: Sequence[TrainingRun],
    now: datetime,
    *,
    cooldown_seconds: float,
    enabled: bool = True,
    watching: bool = False,
    waiting: Backoff | None = None,
    strain: str | None = None,
) -> str | None:
    """Why no run of any kind should start by itself now, whatever there is to learn; None: nothing is against it.

    runs: the newest ones, over or not, newest first. After each run there is a cooldown, doubled with each run that was refused
    since the last promotion and with each further failure in a row, at most MAX_DOUBLINGS times. watching: the active adapter
    is still being compared on live traffic; a run on top of it would be measured against a parent that may be about to go.
    strain: what the machine cannot spare.
    """
    last_run = runs[0] if runs else None
    if not enabled:
        return "training is switched off"
    if last_run is not None and not last_run.state.over:
        return f"run {last_run.id} is under way"
    if watching:
        return "the active adapter is still being watched"
    if last_run is not None and last_run.finished_at is not None:
        failed, refused = failures(runs), refusals(runs)
        wait = cooldown_seconds * 2.0 ** min(max(failed - 1, 0) + refused, MAX_DOUBLINGS)
        left = _left(now, last_run.finished_at, wait)
        if left > 0 and failed > 1:
            return f"another {left:.0f} s after {failed} runs in a row that came to no verdict"
        if left > 0 and refused:
            return f"another {left:.0f} s: {refused} runs were refused since the last promotion"
        if left > 0:
            return f"cooling down for another {left:.0f} s"
    if waiting is not None and (left := _left(now, waiting.since, waiting.seconds)) > 0:
        return f"another {left:.0f} s after {waiting.rollbacks} adapters in a row were rolled back"
    return strain


def decide(
    counts: UntrainedCounts,
    hindered: str | None,
    *,
    min_cases: int,
    min_tokens: int,
) -> Trigger | str:
    """A trigger when a run on logged texts should start now, else the reason why not.

    counts: what a run could learn from; undrafted texts count with the cases that are expected of them. hindered: see
    `hindrance`.

    A run that was rejected has had its texts, so the same thresholds demand that many new ones.
    """
    if hindered is not None:
        return hindered
    if counts.expected_cases < min_cases:
        return f"{counts.expected_cases:.0f} of {min_cases} failure cases"
    if counts.expected_tokens < min_tokens:
        return f"{counts.expected_tokens} of {min_tokens} tokens"
    return Trigger.CASES


def practice_minutes(done: Practised, *, per_day: float, idle_seconds: float, user: str | None) -> float | str:
    """How many minutes a practice run may take now, else the reason why none should start by itself.

    done: what practice of this pair did before. per_day: minutes of it in 24 hours. idle_seconds: for how long nothing was
    asked. user: that somebody uses the machine, None where nobody is known to.
    """
    if idle_seconds < IDLE_SECONDS:
        return "requests are answered"
    if user is not None:
        return user
    if done.refused >= REFUSED and done.new < NEW_AFTER_REFUSED:
        return f"{done.refused} practice runs in a row were refused: {done.new} of {NEW_AFTER_REFUSED} new generations"
    left = per_day - done.seconds / 60
    if left < LEAST_MINUTES:
        return f"practice took {done.seconds / 60:.0f} of {per_day:g} minutes in the last 24 hours"
    return min(left, RUN_MINUTES)


def _left(now: datetime, since: datetime, seconds: float) -> float:
    """Seconds still to wait. A beginning in the future means that the clock was set back: no reason to wait for it."""
    elapsed = (now - since).total_seconds()
    return seconds - elapsed if 0 <= elapsed < seconds else 0.0
