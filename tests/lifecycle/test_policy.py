import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from service.core import Progress, RunState, TrainingRun, Trigger, Verdict
from service.lifecycle import policy
from service.lifecycle.policy import MAX_DOUBLINGS, Backoff, backoff
from service.settings import GateSettings
from service.store.log.held_out import HeldOut
from service.store.log.training_texts import UntrainedCounts
from service.store.registry.run_history import RunTimes

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
        (ENOUGH, run(RunState.REJECTED, 121), {}, Trigger.CASES),
        (ENOUGH, run(RunState.REJECTED, 119), {}, None),
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
    assert "60 s" in taken and "3 consecutive adapters" in taken
    assert decide(ENOUGH, None, NOW, strain="on battery", **settings) == "on battery"  # pyright: ignore


def runs(pattern: str, trigger: Trigger = Trigger.CASES) -> list[TrainingRun]:
    """Newest first, the newest just over: R refused, P promoted, F failed, E ended by an operator, . under way."""
    states = {
        "R": RunState.REJECTED,
        "P": RunState.PROMOTED,
        "F": RunState.FAILED,
        "E": RunState.ENDED,
        ".": RunState.TRAINING,
    }
    return [replace(run(states[kind], 0), trigger=trigger) for kind in pattern]


@pytest.mark.parametrize(
    ("pattern", "times"),
    [
        ("P", 1),
        ("R", 2),
        ("RR", 4),
        ("RRPRR", 4),
        ("F", 1),
        ("FF", 2),
        ("FR", 2),
        ("FFR", 4),
        ("RE", 2),
        ("ER", 2),
        ("R" * 5, 32),
        ("R" * 16, 32),
    ],
)
def test_every_refusal_in_a_row_doubles_the_cooldown_and_a_promotion_resets_it(pattern: str, times: int) -> None:
    def waits(seconds: float) -> bool:
        now = NOW + timedelta(seconds=seconds)
        return policy.hindrance(runs(pattern), now, cooldown_seconds=60.0) is not None

    assert waits(60.0 * times - 1) and not waits(60.0 * times)


def test_practice_that_was_refused_does_not_delay_runs_on_logged_texts() -> None:
    assert policy.refusals(runs("RRR", Trigger.PRACTICE)) == 0
    assert policy.refusals([*runs("R"), *runs("P", Trigger.PRACTICE), *runs("R")]) == 2


RULES = GateSettings()


def gates(pattern: str, gain: float = 0.03) -> list[Verdict]:
    """Verdicts of the gate, oldest first: P promoted, R refused, - not tested."""
    return [
        Verdict(kind == "P", kind, 50, 5000, gain, 0.0, 0.0, p_value=None if kind == "-" else 0.1, level=0.02)
        for kind in pattern
    ]


def test_a_gate_needs_more_held_out_texts_after_refusals() -> None:
    needed = [policy.prompts_needed(RULES, policy.levels(gates("R" * refused))[0]) for refused in (0, 5, 100)]
    assert needed == [30, 53, 88]
    assert policy.prompts_needed(GateSettings(max_prompts=40), 1e-9) == 40, "a gate draws no more"
    level, after = policy.levels(gates("R" * 100))
    assert policy.prompts_needed(RULES, after) < 60 and after > 100 * level
    assert policy.levels(gates("-" * 100)) == policy.levels([])


@pytest.mark.parametrize(
    ("held_out", "lacks"),
    [
        (HeldOut(30, 30, 2000), None),
        (HeldOut(29, 29, 2000), "29 of 30 held-out prompts"),
        (HeldOut(30, 30, 1999), "1999 of 2000 held-out tokens"),
        (HeldOut(30, 4, 2000), "4 of 5 held-out conversations"),
    ],
)
def test_what_a_gate_lacks_of_held_out_texts(held_out: HeldOut, lacks: str | None) -> None:
    found = policy.unjudgeable(held_out, RULES, policy.levels([])[0])
    assert found == (None if lacks is None else f"not enough held-out text to judge a run: {lacks}")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("", 0.02), ("P", 0.025), ("R", 0.01), ("R" * 8, 0.02 / 9), ("P" + "R" * 8, 0.02 / 9), ("R-P", 0.05 / 3)],
)
def test_the_expected_gain_is_that_of_the_last_verdicts(pattern: str, expected: float) -> None:
    assert policy.expected_gain(gates(pattern)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("idle", "share", "pattern", "starts"),
    [
        (60.0, 0.0, "R" * 8, True),
        (59.0, 0.0, "", False),
        # A run of ten minutes costs 2.5: 2 % of 0.09 of a day pay for it, 0.22 % of 0.7 do not, and of 0.9 do.
        (0.0, 0.08, "", False),
        (0.0, 0.09, "", True),
        (0.0, 0.7, "R" * 8, False),
        (0.0, 0.9, "R" * 8, True),
    ],
)
def test_a_run_starts_when_idle_or_when_it_pays_within_a_day(
    idle: float, share: float, pattern: str, starts: bool
) -> None:
    found = policy.wrong_moment(idle, share, RunTimes(0.0, 600.0), gates(pattern), wanted=60.0)
    assert (found is None) is starts
    if found is not None:
        assert "2.5 minutes" in found


@pytest.mark.parametrize(
    ("times", "per_day", "starts"),
    [
        (RunTimes(0.0, None), 120.0, True),
        (RunTimes(6540.0, 660.0), 120.0, True),
        (RunTimes(6541.0, 660.0), 120.0, False),
        # A run that is longer than a day allows takes place once a day.
        (RunTimes(0.0, 9000.0), 120.0, True),
        (RunTimes(1.0, 9000.0), 120.0, False),
        (RunTimes(0.0, None), 0.0, False),
    ],
)
def test_runs_take_so_many_minutes_a_day(times: RunTimes, per_day: float, starts: bool) -> None:
    assert (policy.used_up(times, per_day) is None) is starts


def test_the_busy_share_is_that_of_the_last_day() -> None:
    time = policy.BusyTime()
    time.add(600.0, busy=True)
    assert time.share == pytest.approx(1 / 6), "a server that has just started may be idle again soon"
    for _ in range(48):
        time.add(3600.0, busy=True)
    assert time.share == 1.0
    for _ in range(24):
        time.add(3600.0, busy=False)
    assert time.share == pytest.approx(math.exp(-1), rel=0.03)


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
