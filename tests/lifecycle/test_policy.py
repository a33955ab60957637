from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from service.core import Progress, RunState, TrainingRun, Trigger
from service.lifecycle.policy import decide
from service.store.generations import UntrainedCounts

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ENOUGH = UntrainedCounts(cases=100, tokens=1000, generations=20)


def run(state: RunState, seconds_ago: float | None) -> TrainingRun:
    finished = None if seconds_ago is None else NOW - timedelta(seconds=seconds_ago)
    return TrainingRun(7, state, Trigger.CASES, 1, 0, 10, 5, Progress(), None, None, None, NOW, finished)


@pytest.mark.parametrize(
    ("counts", "last", "changes", "starts"),
    [
        (ENOUGH, None, {}, True),
        (replace(ENOUGH, cases=101, tokens=1001), None, {}, True),
        (replace(ENOUGH, cases=99), None, {}, False),
        (replace(ENOUGH, tokens=999), None, {}, False),
        (UntrainedCounts(0, 0, 0), None, {}, False),
        (ENOUGH, None, {"enabled": False}, False),
        (ENOUGH, None, {"watching": True}, False),
        (ENOUGH, run(RunState.CLAIMED, None), {}, False),
        (ENOUGH, run(RunState.TRAINING, None), {}, False),
        (ENOUGH, run(RunState.SCORING, None), {}, False),
        (ENOUGH, run(RunState.STAGING, None), {}, False),
        (ENOUGH, run(RunState.PROMOTED, 60), {}, True),
        (ENOUGH, run(RunState.PROMOTED, 59), {}, False),
        (ENOUGH, run(RunState.REJECTED, 59), {}, False),
        (ENOUGH, run(RunState.FAILED, 59), {}, False),
        (ENOUGH, run(RunState.CRASHED, 59), {}, False),
        (ENOUGH, run(RunState.CRASHED, 61), {}, True),
        (ENOUGH, run(RunState.CRASHED, 0), {"cooldown_seconds": 0.0}, True),
        # The clock was set back by an hour: nothing waits an hour for that.
        (ENOUGH, run(RunState.PROMOTED, -3600), {}, True),
    ],
)
def test_starts_only_when_everything_is_ready(
    counts: UntrainedCounts, last: TrainingRun | None, changes: dict[str, object], starts: bool
) -> None:
    settings: dict[str, object] = {"min_cases": 100, "min_tokens": 1000, "cooldown_seconds": 60.0, **changes}
    decision = decide(counts, last, NOW, **settings)  # pyright: ignore[reportArgumentType]
    assert isinstance(decision, Trigger) is starts
    assert decision is Trigger.CASES or decision, "a refusal says why"


def test_the_reason_names_what_is_missing() -> None:
    few = decide(replace(ENOUGH, cases=12), None, NOW, min_cases=100, min_tokens=1000, cooldown_seconds=60.0)
    hot = decide(ENOUGH, run(RunState.FAILED, 20), NOW, min_cases=100, min_tokens=1000, cooldown_seconds=60.0)
    assert "12 of 100" in few
    assert "40 s" in hot
