"""Rules for when a training run starts automatically. Pure functions of values."""

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
"""How often the waiting time after consecutive failures or rollbacks is doubled."""
SMALLER_AFTER = frozenset({RunState.OUT_OF_MEMORY, RunState.TIMED_OUT})
"""Run states after which the next run is smaller."""
IDLE_SECONDS = 60.0
"""Practice starts after this many seconds without requests."""
POWER = 0.8
"""Probability with which a gate should promote the smallest gain that `gate.min_prompts` prompts prove at the first level."""
UNKNOWN_RUN_SECONDS = 600.0
"""Assumed duration of a run until one has been judged."""
USUAL_GAIN = 0.02
"""Assumed gain of a run. It counts as one verdict in addition to the last RECENT ones, so that refusals lower the
expected gain but never make it zero."""
RECENT = 8
SLOWDOWN = 0.25
"""Fraction of its speed that a server loses while a run executes. Measured on a GPU: 0.19 at `gpu_share` = 0.65."""
DAY_SECONDS = 86400.0
SHORTEST_VIEW = 3600.0
"""Minimum observation time. A server that has run for less counts as idle before its start."""
RUN_MINUTES, LEAST_MINUTES = 15.0, 2.0
"""Default and minimum length of a practice run that starts automatically."""
REFUSED, NEW_AFTER_REFUSED = 2, 100
"""After REFUSED consecutive practice runs were refused, none starts automatically until there are NEW_AFTER_REFUSED new
generations."""
ROLLED_BACK = Verdict(False, "an operator rolled it back", 0, 0, 0.0, 0.0, 0.0)
"""The watch's verdict on an adapter that an operator rolled back: lost, although nothing was compared."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """No automatic run for `seconds` after `since`, when the newest of `rollbacks` consecutive adapters was rolled back."""

    since: datetime
    seconds: float
    rollbacks: int


def backoff(watches: Sequence[tuple[datetime, Verdict]], seconds: float) -> Backoff | None:
    """Waiting time after rollbacks: `seconds`, doubled for each further consecutive rollback, at most MAX_DOUBLINGS
    times. None when the last adapter stayed.

    watches: the watch's verdicts, newest first. Of verdicts that compared nothing, only rollbacks count.
    """
    decided = [(at, verdict.promoted) for at, verdict in watches if verdict.prompts or not verdict.promoted]
    rollbacks = next((i for i, (_, stayed) in enumerate(decided) if stayed), len(decided))
    if not rollbacks:
        return None
    return Backoff(decided[0][0], seconds * 2.0 ** min(rollbacks - 1, MAX_DOUBLINGS), rollbacks)


def run_size(past: Sequence[tuple[RunState, int]], largest: int) -> int:
    """Number of texts the next run may use: half of what a run had when it was too large, doubled after each verdict,
    up to `largest`.

    past: final state and number of texts of earlier runs, oldest first.
    """
    size = largest
    for state, texts in past:
        if state in SMALLER_AFTER:
            size = max(min(size, texts) // 2, 1)
        elif state.judged:
            size = min(2 * size, largest)
    return size


def failures(runs: Sequence[TrainingRun]) -> int:
    """Number of the newest consecutive runs that failed without a verdict. Runs ended from outside are ignored.

    runs: newest first; the first may still be running.
    """
    over = [run.state for run in runs if run.state.over and run.state is not RunState.ENDED]
    return next((i for i, state in enumerate(over) if state.judged), len(over))


def refusals(runs: Sequence[TrainingRun]) -> int:
    """Number of runs on logged texts that the gate refused since the last promotion. runs: newest first."""
    judged = [run.state for run in runs if run.state.judged and run.trigger is not Trigger.PRACTICE]
    return next((i for i, state in enumerate(judged) if state is RunState.PROMOTED), len(judged))


def levels(gates: Sequence[Verdict]) -> tuple[float, float]:
    """Significance level for the next candidate, and for the one after it if the next is promoted. gates: as in gate.judge."""
    tested = [one.promoted for one in gates if one.p_value is not None]
    return next_level(tested), next_level([*tested, True])


def prompts_needed(rules: GateSettings, level: float) -> int:
    """Held-out prompts a gate at `level` needs to prove the gain that `min_prompts` prove at the first level, with the
    same POWER; at most the number that a gate samples."""

    def quantiles(at: float) -> float:
        return NormalDist().inv_cdf(1.0 - at) + NormalDist().inv_cdf(POWER)

    share = max(quantiles(level) / quantiles(next_level([])), 1.0) ** 2
    return max(min(math.ceil(rules.min_prompts * share - 1e-9), rules.max_prompts), rules.min_prompts)


def unjudgeable(held_out: HeldOut, rules: GateSettings, level: float) -> str | None:
    """What a gate at `level` lacks in held-out texts, or None. Until then a run would be refused whatever it learns."""
    needed = prompts_needed(rules, level)
    for count, wanted, what in (
        (held_out.prompts, needed, "held-out prompts"),
        (held_out.tokens, rules.min_tokens, "held-out tokens"),
        (held_out.conversations, MIN_CONVERSATIONS, "held-out conversations"),
    ):
        if count < wanted:
            return f"not enough held-out text to judge a run: {count} of {wanted} {what}"
    return None


def expected_gain(gates: Sequence[Verdict]) -> float:
    """Expected relative gain in speed of the next run: the mean of the last RECENT verdicts (refused ones count as 0)
    and one assumed verdict of USUAL_GAIN. gates: as in gate.judge."""
    recent = [one for one in gates if one.p_value is not None][-RECENT:]
    return (USUAL_GAIN + sum(one.gain for one in recent if one.promoted)) / (1 + len(recent))


def wrong_moment(
    idle_seconds: float, busy_share: float, times: RunTimes, gates: Sequence[Verdict], *, wanted: float
) -> str | None:
    """Why a run should not start at this moment, or None.

    After `wanted` seconds without requests a run slows down no request. Otherwise a run starts only if its expected
    gain saves more serving time within a day than the run costs.

    busy_share: the fraction of the last day during which requests were being answered.
    """
    if idle_seconds >= wanted:
        return None
    gain, cost = expected_gain(gates) * busy_share * DAY_SECONDS, SLOWDOWN * _run_seconds(times)
    if gain >= cost:
        return None
    return (
        f"requests are being answered: a run would cost {cost / 60:.1f} minutes of serving and is expected to save "
        f"{gain / 60:.1f} within a day; it waits for {wanted:g} s without requests"
    )


def used_up(times: RunTimes, per_day: float) -> str | None:
    """Why no run fits into the remainder of `per_day` minutes in 24 hours, or None. A run that takes longer than a
    day's budget may start when none of the budget is used."""
    used, run = times.seconds / 60, _run_seconds(times) / 60
    if used + run <= per_day or (per_day > 0 and not used):
        return None
    return f"trained for {used:.0f} of {per_day:g} minutes in the last 24 hours; a run takes about {run:.0f}"


def _run_seconds(times: RunTimes) -> float:
    return UNKNOWN_RUN_SECONDS if times.typical is None else times.typical


@dataclass(slots=True)
class BusyTime:
    """Fraction of the last day during which requests were answered. Older time is forgotten gradually."""

    busy: float = 0.0
    observed: float = 0.0

    def add(self, seconds: float, *, busy: bool) -> None:
        """Adds `seconds` of observation."""
        kept = math.exp(-seconds / DAY_SECONDS) if self.observed >= DAY_SECONDS else 1.0
        self.busy = self.busy * kept + (seconds if busy else 0.0)
        self.observed = min(self.observed + seconds, DAY_SECONDS)

    @property
    def share(self) -> float:
        """Busy fraction of the last day, or of the time observed so far, but of at least an hour."""
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
    """Why no run should start automatically now, whatever there is to learn; None when nothing prevents it.

    runs: the newest ones, finished or not, newest first. Each run is followed by a cooldown, doubled for each run
    refused since the last promotion and for each further consecutive failure, at most MAX_DOUBLINGS times. watching:
    the active adapter is still being compared on live traffic; a run on top of it would be measured against a parent
    that may be rolled back. strain: what the machine is short of.
    """
    last_run = runs[0] if runs else None
    if not enabled:
        return "training is switched off"
    if last_run is not None and not last_run.state.over:
        return f"run {last_run.id} is in progress"
    if watching:
        return "the active adapter is still being watched"
    if last_run is not None and last_run.finished_at is not None:
        failed, refused = failures(runs), refusals(runs)
        wait = cooldown_seconds * 2.0 ** min(max(failed - 1, 0) + refused, MAX_DOUBLINGS)
        left = _left(now, last_run.finished_at, wait)
        if left > 0 and failed > 1:
            return f"another {left:.0f} s after {failed} consecutive runs without a verdict"
        if left > 0 and refused:
            return f"another {left:.0f} s: {refused} runs were refused since the last promotion"
        if left > 0:
            return f"cooling down for another {left:.0f} s"
    if waiting is not None and (left := _left(now, waiting.since, waiting.seconds)) > 0:
        return f"another {left:.0f} s after {waiting.rollbacks} consecutive adapters were rolled back"
    return strain


def decide(
    counts: UntrainedCounts,
    hindered: str | None,
    *,
    min_cases: int,
    min_tokens: int,
) -> Trigger | str:
    """A trigger when a run on logged texts should start now, otherwise the reason why not.

    counts: what a run could learn from; undrafted texts count with their expected number of failure cases. hindered:
    see `hindrance`.

    The texts of a rejected run count as trained, so the next run needs the same number of new texts.
    """
    if hindered is not None:
        return hindered
    if counts.expected_cases < min_cases:
        return f"{counts.expected_cases:.0f} of {min_cases} failure cases"
    if counts.expected_tokens < min_tokens:
        return f"{counts.expected_tokens} of {min_tokens} tokens"
    return Trigger.CASES


def practice_minutes(done: Practised, *, per_day: float, idle_seconds: float, user: str | None) -> float | str:
    """Minutes that a practice run may take now, or the reason why none should start automatically.

    done: earlier practice of this pair. per_day: minutes of practice allowed in 24 hours. idle_seconds: seconds since
    the last request. user: a message when a person is using the machine, else None.
    """
    if idle_seconds < IDLE_SECONDS:
        return "requests are being answered"
    if user is not None:
        return user
    if done.refused >= REFUSED and done.new < NEW_AFTER_REFUSED:
        return (
            f"{done.refused} consecutive practice runs were refused: {done.new} of {NEW_AFTER_REFUSED} new generations"
        )
    left = per_day - done.seconds / 60
    if left < LEAST_MINUTES:
        return f"practiced for {done.seconds / 60:.0f} of {per_day:g} minutes in the last 24 hours"
    return min(left, RUN_MINUTES)


def _left(now: datetime, since: datetime, seconds: float) -> float:
    """Seconds still to wait. A start in the future means that the clock was set back, and there is no reason to wait."""
    elapsed = (now - since).total_seconds()
    return seconds - elapsed if 0 <= elapsed < seconds else 0.0
