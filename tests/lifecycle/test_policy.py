from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from service.core import Progress, RunState, TrainingRun, Trigger, Verdict
from service.lifecycle import policy
from service.lifecycle.policy import MAX_DOUBLINGS, Backoff, backoff
from service.store.log.training_texts import UntrainedCounts

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ENOUGH = UntrainedCounts(cases=100, tokens=1000, generations=20)
QUARTER = UntrainedCounts(cases=25, tokens=250, generations=5)


def decide(
    counts: UntrainedCounts,
    last_run: TrainingRun | None,
    now: datetime,
    *,
    min_cases: int,
    min_tokens: int,
    **hindrances: Any,
) -> Trigger | str:
    """What the supervisor does with both."""
    hindered = policy.hindrance([last_run] if last_run else [], now, **hindrances)
    return policy.decide(counts, hindered, min_cases=min_cases, min_tokens=min_tokens)


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
        # The clock was set back by an hour, which must not delay a run by an hour.
        (ENOUGH, run(RunState.PROMOTED, -3600), {}, True),
    ],
)
def test_a_run_starts_only_when_all_conditions_hold(
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


def ago(seconds: float, *, hold: float, rollbacks: int = 1) -> Backoff:
    return Backoff(NOW - timedelta(seconds=seconds), hold, rollbacks)


@pytest.mark.parametrize(
    ("counts", "last", "changes", "expected"),
    [
        (QUARTER, None, {}, None),
        # A rejected run used up its cases; only new data starts the next.
        (QUARTER, run(RunState.REJECTED, 61), {}, None),
        (ENOUGH, run(RunState.REJECTED, 61), {}, Trigger.CASES),
        (ENOUGH, None, {"waiting": ago(99, hold=100)}, None),
        (ENOUGH, None, {"waiting": ago(101, hold=100)}, Trigger.CASES),
        (ENOUGH, None, {"waiting": ago(-10, hold=100)}, Trigger.CASES),
        (ENOUGH, None, {"strain": "on battery"}, None),
    ],
)
def test_a_run_waits_for_new_data_after_rollbacks_and_under_strain(
    counts: UntrainedCounts, last: TrainingRun | None, changes: dict[str, object], expected: Trigger | None
) -> None:
    settings: dict[str, object] = {"min_cases": 100, "min_tokens": 1000, "cooldown_seconds": 60.0, **changes}
    decision = decide(counts, last, NOW, **settings)  # pyright: ignore[reportArgumentType]
    assert decision is expected if expected else not isinstance(decision, Trigger) and decision


NOTHING = UntrainedCounts(0, 0, 0)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        # Where no rate of cases is known it takes tokens alone.
        (replace(NOTHING, undrafted=1000), Trigger.CASES),
        (replace(NOTHING, undrafted=999), None),
        (replace(QUARTER, undrafted=750), Trigger.CASES),
        (replace(QUARTER, undrafted=749), None),
        # Otherwise as many cases as are usual.
        (replace(QUARTER, undrafted=750, rate=0.1), Trigger.CASES),
        (replace(QUARTER, undrafted=750, rate=0.0999), None),
        (replace(QUARTER, undrafted=9999, rate=0.0), None),
    ],
)
def test_undrafted_texts_count_with_their_expected_cases(counts: UntrainedCounts, expected: Trigger | None) -> None:
    decision = decide(counts, None, NOW, min_cases=100, min_tokens=1000, cooldown_seconds=60.0)
    assert decision is expected if expected else not isinstance(decision, Trigger) and decision


def test_the_reason_names_the_missing_condition() -> None:
    settings = {"min_cases": 100, "min_tokens": 1000, "cooldown_seconds": 60.0}
    taken = decide(ENOUGH, None, NOW, waiting=ago(40, hold=100, rollbacks=3), **settings)  # pyright: ignore
    assert "60 s" in taken and "3 adapters" in taken
    assert decide(ENOUGH, None, NOW, strain="on battery", **settings) == "on battery"  # pyright: ignore


def watches(pattern: str) -> list[tuple[datetime, Verdict]]:
    """Newest first: B rolled back, s stayed, - nothing was compared."""
    return [
        (NOW - timedelta(hours=i), Verdict(kind != "B", kind, 0 if kind == "-" else 50, 500, 0.0, 0.0, 0.0))
        for i, kind in enumerate(pattern)
    ]


@pytest.mark.parametrize(
    ("pattern", "hours", "rollbacks"),
    [
        ("", None, 0),
        ("s", None, 0),
        ("-", None, 0),
        ("sBBB", None, 0),
        ("B", 1, 1),
        ("Bs", 1, 1),
        ("BB", 2, 2),
        ("BBsB", 2, 2),
        ("B-B-s", 2, 2),
        ("BBBB", 8, 4),
        ("B" * 16, 2**MAX_DOUBLINGS, 16),
    ],
)
def test_every_rollback_in_a_row_doubles_the_wait(pattern: str, hours: int | None, rollbacks: int) -> None:
    found = backoff(watches(pattern), 3600.0)
    assert found == (None if hours is None else Backoff(NOW, 3600.0 * hours, rollbacks))


def test_the_backoff_starts_at_the_newest_rollback() -> None:
    found = backoff(watches("-B"), 60.0)
    assert found is not None and found.since == NOW - timedelta(hours=1)
    assert backoff(watches("B"), 0.0) == Backoff(NOW, 0.0, 1)
