from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from service.core import Progress, RunState, TrainingRun, Trigger, Verdict
from service.lifecycle import policy
from service.lifecycle.policy import MAX_DOUBLINGS, Backoff, backoff, lacking
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
    drifted: bool = False,
    **hindrances: Any,
) -> Trigger | str:
    """What the supervisor does with both."""
    hindered = policy.hindrance([last_run] if last_run else [], now, **hindrances)
    return policy.decide(counts, hindered, min_cases=min_cases, min_tokens=min_tokens, drifted=drifted)


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
        (QUARTER, None, {"drifted": True}, Trigger.DRIFT),
        (replace(QUARTER, cases=24), None, {"drifted": True}, None),
        (replace(QUARTER, tokens=249), None, {"drifted": True}, None),
        (ENOUGH, None, {"drifted": True}, Trigger.CASES),
        (replace(ENOUGH, tokens=999), None, {"drifted": True}, Trigger.DRIFT),
        # A rejected run used up its cases; only new data or drift start the next.
        (UntrainedCounts(0, 0, 0), run(RunState.REJECTED, 61), {"drifted": True}, None),
        (QUARTER, run(RunState.REJECTED, 61), {}, None),
        (QUARTER, run(RunState.REJECTED, 61), {"drifted": True}, Trigger.DRIFT),
        (ENOUGH, run(RunState.REJECTED, 61), {}, Trigger.CASES),
        # Drift waits for the cooldown too.
        (QUARTER, run(RunState.REJECTED, 59), {"drifted": True}, None),
        (QUARTER, None, {"drifted": True, "watching": True}, None),
        (QUARTER, None, {"drifted": True, "enabled": False}, None),
        (QUARTER, run(RunState.TRAINING, None), {"drifted": True}, None),
        (ENOUGH, None, {"waiting": ago(99, hold=100)}, None),
        (ENOUGH, None, {"waiting": ago(99, hold=100), "drifted": True}, None),
        (ENOUGH, None, {"waiting": ago(101, hold=100)}, Trigger.CASES),
        (ENOUGH, None, {"waiting": ago(-10, hold=100)}, Trigger.CASES),
        (ENOUGH, None, {"strain": "on battery"}, None),
    ],
)
def test_drift_needs_less_and_waits_as_long(
    counts: UntrainedCounts, last: TrainingRun | None, changes: dict[str, object], expected: Trigger | None
) -> None:
    settings: dict[str, object] = {"min_cases": 100, "min_tokens": 1000, "cooldown_seconds": 60.0, **changes}
    decision = decide(counts, last, NOW, **settings)  # pyright: ignore[reportArgumentType]
    assert decision is expected if expected else not isinstance(decision, Trigger) and decision


NOTHING = UntrainedCounts(0, 0, 0)


@pytest.mark.parametrize(
    ("counts", "drifted", "expected"),
    [
        # Where no rate of cases is known it takes tokens alone.
        (replace(NOTHING, undrafted=1000), False, Trigger.CASES),
        (replace(NOTHING, undrafted=999), False, None),
        (replace(QUARTER, undrafted=750), False, Trigger.CASES),
        (replace(QUARTER, undrafted=749), False, None),
        # Otherwise as many cases as are usual.
        (replace(QUARTER, undrafted=750, rate=0.1), False, Trigger.CASES),
        (replace(QUARTER, undrafted=750, rate=0.0999), False, None),
        (replace(QUARTER, undrafted=9999, rate=0.0), False, None),
        (replace(NOTHING, undrafted=250, rate=0.1), True, Trigger.DRIFT),
        (replace(NOTHING, undrafted=250, rate=0.0999), True, None),
        (replace(NOTHING, undrafted=249, rate=1.0), True, None),
        (replace(NOTHING, undrafted=1000, rate=1.0), True, Trigger.CASES),
    ],
)
def test_undrafted_texts_count_with_their_expected_cases(
    counts: UntrainedCounts, drifted: bool, expected: Trigger | None
) -> None:
    decision = decide(counts, None, NOW, min_cases=100, min_tokens=1000, cooldown_seconds=60.0, drifted=drifted)
    assert decision is expected if expected else not isinstance(decision, Trigger) and decision


@pytest.mark.parametrize(
    ("counts", "trigger", "missing"),
    [
        (ENOUGH, Trigger.CASES, None),
        (replace(ENOUGH, cases=99), Trigger.CASES, "99 of 100 failure cases"),
        (replace(ENOUGH, tokens=999), Trigger.CASES, "999 of 1000 tokens"),
        (QUARTER, Trigger.DRIFT, None),
        (replace(QUARTER, cases=24), Trigger.DRIFT, "24 of 25 failure cases"),
        (UntrainedCounts(1, 5, 1), Trigger.MANUAL, None),
        (NOTHING, Trigger.MANUAL, "0 of 1 failure cases"),
    ],
)
def test_what_a_run_lacks(counts: UntrainedCounts, trigger: Trigger, missing: str | None) -> None:
    assert lacking(counts, trigger, min_cases=100, min_tokens=1000) == missing


def test_the_reason_names_the_missing_condition() -> None:
    settings = {"min_cases": 100, "min_tokens": 1000, "cooldown_seconds": 60.0}
    taken = decide(ENOUGH, None, NOW, waiting=ago(40, hold=100, rollbacks=3), **settings)  # pyright: ignore
    assert "60 s" in taken and "3 adapters" in taken
    assert decide(ENOUGH, None, NOW, strain="on battery", **settings) == "on battery"  # pyright: ignore
    assert "20 of 25" in decide(replace(QUARTER, cases=20), None, NOW, drifted=True, **settings)  # pyright: ignore


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
