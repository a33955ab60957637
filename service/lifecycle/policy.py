"""When a training run starts by itself. A pure function of values."""

from __future__ import annotations

from datetime import datetime

from service.core import TrainingRun, Trigger
from service.store.generations import UntrainedCounts


def decide(
    counts: UntrainedCounts,
    last_run: TrainingRun | None,
    now: datetime,
    *,
    min_cases: int,
    min_tokens: int,
    cooldown_seconds: float,
    enabled: bool = True,
    watching: bool = False,
) -> Trigger | str:
    """A trigger when a run should start now, else the reason why not.

    counts: untied, untrained failure cases and the output tokens of the generations that hold them. last_run: the
    newest run, over or not. watching: the active adapter has not yet been compared with its parent on live traffic; a
    run on top of it would be measured against a parent that may be about to go.

    A run that lost at the gate marked its cases trained, so the same thresholds already demand that many new ones.
    """
    if not enabled:
        return "training is switched off"
    if last_run is not None and not last_run.state.over:
        return f"run {last_run.id} is under way"
    if watching:
        return "the active adapter is still being watched"
    if last_run is not None and last_run.finished_at is not None:
        # A finish in the future means that the clock was set back: no reason to wait for it.
        elapsed = (now - last_run.finished_at).total_seconds()
        if 0 <= elapsed < cooldown_seconds:
            return f"cooling down for another {cooldown_seconds - elapsed:.0f} s"
    if counts.cases < min_cases:
        return f"{counts.cases} of {min_cases} failure cases"
    if counts.tokens < min_tokens:
        return f"{counts.tokens} of {min_tokens} tokens"
    return Trigger.CASES
