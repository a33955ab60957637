"""When a training run starts by itself. Pure functions of values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from service.core import TrainingRun, Trigger, Verdict
from service.store.generations import UntrainedCounts

DRIFT_SHARE = 0.25
"""After drift this share of the usual cases and tokens is enough: what is new has to be learnt soon, but not from nothing."""
MAX_DOUBLINGS = 5
ROLLED_BACK = Verdict(False, "an operator rolled it back", 0, 0, 0.0, 0.0, 0.0)
"""The watch's verdict on an adapter that an operator rolled back: lost, though nothing was compared."""


class Chore(StrEnum):
    """SUPPLY: no run yet; first the cases of generations on which no draft was tried are worked out."""

    SUPPLY = "supply"


@dataclass(frozen=True, slots=True)
class Backoff:
    """No run by itself for `seconds` after `since`, when the newest of `rollbacks` adapters in a row was taken back."""

    since: datetime
    seconds: float
    rollbacks: int


def backoff(watches: Sequence[tuple[datetime, Verdict]], seconds: float) -> Backoff | None:
    """After adapters were taken back: `seconds`, doubled with each one more in a row, at most MAX_DOUBLINGS times. None when
    the last one stayed. watches: verdicts of the watch, newest first; of those that compared nothing only rollbacks count."""
    spoken = [(at, verdict.promoted) for at, verdict in watches if verdict.prompts or not verdict.promoted]
    rollbacks = next((i for i, (_, stayed) in enumerate(spoken) if stayed), len(spoken))
    if not rollbacks:
        return None
    return Backoff(spoken[0][0], seconds * 2.0 ** min(rollbacks - 1, MAX_DOUBLINGS), rollbacks)


def decide(
    counts: UntrainedCounts,
    last_run: TrainingRun | None,
    now: datetime,
    *,
    min_cases: int,
    min_tokens: int,
    cooldown_seconds: float,
    unseen: int = 0,
    enabled: bool = True,
    watching: bool = False,
    drifted: bool = False,
    waiting: Backoff | None = None,
    strain: str | None = None,
) -> Trigger | Chore | str:
    """A trigger when a run should start now, a chore that may lead to one, else the reason why not.

    counts: untied, untrained failure cases and the output tokens of the generations that hold them. unseen: output tokens of
    generations on which no draft was tried; when they alone are as many as a run needs, it is they that lack cases.
    last_run: the newest run, over or not. watching: the active adapter is still being compared on live traffic; a run on top
    of it would be measured against a parent that may be about to go. drifted: the serving draft keeps less than it used to.
    strain: what the machine cannot spare.

    A run that lost at the gate marked its cases trained, so the same thresholds already demand that many new ones; after
    drift it takes fewer.
    """
    if not enabled:
        return "training is switched off"
    if last_run is not None and not last_run.state.over:
        return f"run {last_run.id} is under way"
    if watching:
        return "the active adapter is still being watched"
    if last_run is not None and last_run.finished_at is not None:
        left = _left(now, last_run.finished_at, cooldown_seconds)
        if left > 0:
            return f"cooling down for another {left:.0f} s"
    if waiting is not None and (left := _left(now, waiting.since, waiting.seconds)) > 0:
        return f"another {left:.0f} s after {waiting.rollbacks} adapters in a row were taken back"
    if strain is not None:
        return strain
    if counts.cases >= min_cases and counts.tokens >= min_tokens:
        return Trigger.CASES
    if drifted:
        min_cases, min_tokens = math.ceil(min_cases * DRIFT_SHARE), math.ceil(min_tokens * DRIFT_SHARE)
    if counts.cases < min_cases:
        lacking = f"{counts.cases} of {min_cases} failure cases"
    elif counts.tokens < min_tokens:
        lacking = f"{counts.tokens} of {min_tokens} tokens"
    else:
        return Trigger.DRIFT
    return Chore.SUPPLY if unseen >= min_tokens else lacking


def _left(now: datetime, since: datetime, seconds: float) -> float:
    """Seconds still to wait. A beginning in the future means that the clock was set back: no reason to wait for it."""
    elapsed = (now - since).total_seconds()
    return seconds - elapsed if 0 <= elapsed < seconds else 0.0
