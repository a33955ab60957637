"""Interim checks of the watch: their decisions, and that repeated checks keep the error rate."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from service.core import BARE_DRAFT, Score
from service.lifecycle.interim_check import ALPHA, CheckResult, check_schedule, interim_check
from tests.support.simulated_scores import LEVEL, by_length, pair, scores

PARENT = 4


@pytest.mark.parametrize(
    ("generations", "expected"),
    [
        (200, (12, 25, 50, 100, 200)),
        (80, (10, 20, 40, 80)),
        (60, (15, 30, 60)),
        (16, (8, 16)),
        (12, (12,)),
        (6, (6,)),
        (1, (1,)),
    ],
)
def test_each_interim_check_has_twice_as_many_answers_as_the_one_before(
    generations: int, expected: tuple[int, ...]
) -> None:
    assert check_schedule(generations) == expected


def check_at(
    serving: Sequence[Score],
    others: Mapping[int, Sequence[Score]],
    *,
    costs: Sequence[float] | None = None,
    last: bool = False,
    resamples: int = 400,
) -> CheckResult:
    return interim_check(serving, others, seconds=costs, parent=PARENT, last=last, resamples=resamples, seed=1)


HALF, LESS, SAME, MORE = (scores([calls] * 20) for calls in (20, 36, 40, 44))


@pytest.mark.parametrize(
    ("parent", "bare", "last", "over", "back_to", "message"),
    [
        (SAME, SAME, False, False, None, "undecided"),
        (SAME, SAME, True, True, None, "stays"),
        (MORE, MORE, False, True, None, "proven better than adapter 4"),
        (MORE, SAME, False, False, None, "undecided"),
        (LESS, MORE, False, True, PARENT, "worse than adapter 4"),
        (LESS, SAME, True, True, PARENT, "worse than adapter 4"),
        (MORE, LESS, False, True, BARE_DRAFT, "worse than the base draft"),
        # Worse than both: back to the better one, or to the parent if they are equal.
        (LESS, HALF, False, True, BARE_DRAFT, "worse than the base draft"),
        (HALF, LESS, False, True, PARENT, "worse than adapter 4"),
        (LESS, LESS, False, True, PARENT, "worse than adapter 4"),
    ],
)
def test_decisions_of_an_interim_check(
    parent: list[Score], bare: list[Score], last: bool, over: bool, back_to: int | None, message: str
) -> None:
    found = check_at(SAME, {PARENT: parent, BARE_DRAFT: bare}, last=last)
    assert (found.over, found.roll_back_to, found.verdict.promoted) == (over, back_to, back_to is None)
    assert message in found.verdict.reason
    assert found.verdict.prompts == 20
    if back_to is not None:
        assert found.verdict.high90 < 0


def test_the_bare_draft_may_be_the_parent() -> None:
    found = interim_check(SAME, {BARE_DRAFT: LESS}, parent=BARE_DRAFT, last=False, resamples=400, seed=1)
    assert found.roll_back_to == BARE_DRAFT
    assert not interim_check(
        SAME, {BARE_DRAFT: MORE}, parent=BARE_DRAFT, last=False, resamples=400, seed=1
    ).roll_back_to


@pytest.mark.parametrize("last", [False, True])
def test_too_few_generations_decide_nothing(last: bool) -> None:
    few = check_at(scores([80] * 4), {PARENT: scores([40] * 4), BARE_DRAFT: scores([40] * 4)}, last=last)
    assert few.verdict.promoted and few.over is last and few.roll_back_to is None
    assert check_at([], {PARENT: [], BARE_DRAFT: []}).verdict.promoted
    assert check_at(scores([80] * 8), {PARENT: scores([40] * 8), BARE_DRAFT: scores([40] * 8)}).roll_back_to == PARENT


@pytest.mark.parametrize(
    ("costs", "over", "back_to", "message"),
    [
        (None, True, PARENT, "worse than adapter 4: -16.7% tokens/s at K = 3,"),
        ((1.0, 1.0, 1.0), True, PARENT, "worse than adapter 4: -16.7% tokens/s at K = 3,"),
        ((1.0, 1.1, 1.2), True, PARENT, "worse than adapter 4: -4.0% tokens/s at K = 1 against K = 3,"),
        ((1.0, 1.5, 2.5), True, None, "proven better than adapter 4: +10.0% tokens/s at K = 1,"),
    ],
)
def test_costs_decide_which_draft_lengths_are_compared(
    costs: Sequence[float] | None, over: bool, back_to: int | None, message: str
) -> None:
    serving = by_length([(50, 49, 48)] * 20)
    parent, bare = by_length([(55, 48, 40)] * 20), by_length([(60, 60, 60)] * 20)
    found = check_at(serving, {PARENT: parent, BARE_DRAFT: bare}, costs=costs)
    assert (found.over, found.roll_back_to) == (over, back_to)
    assert message in found.verdict.reason


def with_rounds(serving: Sequence[Score], accepted: Sequence[int], predicted: float) -> list[Score]:
    """With ten logged rounds of each text. predicted: draft tokens that are accepted in them by the scores."""
    return [
        replace(score, rounds=10, accepted=count, predicted=predicted)
        for score, count in zip(serving, accepted, strict=True)
    ]


@pytest.mark.parametrize(
    ("accepted", "short", "message"),
    [
        ([20] * 20, False, "; realised acceptance length 3.00, predicted 3.00"),
        ([19] * 20, False, "; realised acceptance length 2.90, predicted 3.00"),
        # 7 % less on average, but not surely 5.
        ([10, 26] * 10, False, "; realised acceptance length 2.80, predicted 3.00"),
        ([17, 19] * 10, True, "; realised acceptance length 2.80, predicted 3.00"),
        ([40] * 20, False, "; realised acceptance length 5.00, predicted 3.00"),
    ],
)
def test_scores_that_the_engine_surely_falls_short_of_prove_nothing(
    accepted: list[int], short: bool, message: str
) -> None:
    serving = with_rounds(SAME, accepted, 20.0)
    better = check_at(serving, {PARENT: MORE, BARE_DRAFT: MORE})
    assert (better.short, better.over, better.roll_back_to) == (short, not short, None)
    assert better.verdict.reason.startswith("undecided" if short else "stays: proven")
    assert better.verdict.reason.endswith(message)
    # What is worse by its scores goes all the same.
    worse = check_at(serving, {PARENT: LESS, BARE_DRAFT: LESS})
    assert (worse.short, worse.roll_back_to) == (short, PARENT)
    assert worse.verdict.reason.endswith(message)


def test_rounds_of_few_conversations_prove_nothing() -> None:
    serving = [*with_rounds(SAME[:4], [0] * 4, 20.0), *SAME[4:]]
    found = check_at(serving, {PARENT: SAME, BARE_DRAFT: SAME})
    assert not found.short and "realised" not in found.verdict.reason


def test_scores_without_draft_lengths_decide_nothing() -> None:
    none = by_length([()] * 20)
    assert check_at(none, {PARENT: none, BARE_DRAFT: none}).roll_back_to is None


def test_scores_of_other_texts_are_an_error() -> None:
    with pytest.raises(ValueError, match="different generations"):
        check_at(SAME, {PARENT: SAME, BARE_DRAFT: SAME[1:]})
    with pytest.raises(ValueError, match="different tokens"):
        check_at(SAME, {PARENT: [*SAME[1:], replace(SAME[0], tokens=1)], BARE_DRAFT: SAME})


def run_watch(
    rng: np.random.Generator, better: float, differ: float, costs: Sequence[float] | None = None
) -> tuple[CheckResult, int]:
    """The whole watch of one adapter against a parent and a bare draft of equal acceptance."""
    serving, parent = pair(rng, 200, better=better, differ=differ)
    # The bare draft's calls vary around the parent's from text to text.
    noise = rng.normal(1.0, 0.06, 200)
    bare = [
        replace(score, calls=tuple(calls * float(n) for calls in score.calls))
        for score, n in zip(parent, noise, strict=True)
    ]
    due = check_schedule(200)
    for number, count in enumerate(due, start=1):
        others = {PARENT: parent[:count], BARE_DRAFT: bare[:count]}
        found = check_at(serving[:count], others, costs=costs, last=number == len(due), resamples=600)
        if found.over:
            return found, count
    raise AssertionError("the last check must decide")


@pytest.mark.parametrize(
    ("costs", "trials"),
    [
        pytest.param(None, 120, id="calls", marks=pytest.mark.nightly),
        pytest.param(LEVEL, 120, id="costs", marks=pytest.mark.nightly),
        pytest.param(LEVEL, 40, id="fewer"),
    ],
)
def test_repeated_interim_checks_rarely_roll_back_an_equal_adapter(costs: Sequence[float] | None, trials: int) -> None:
    """Of 600 such watches 24 ended with a rollback by calls."""
    rng = np.random.default_rng(21)
    back = sum(
        run_watch(rng, 0.0, differ, costs)[0].roll_back_to is not None
        for differ in (0.03, 0.12)
        for _ in range(trials // 2)
    )
    # Six checks of plain 90 % intervals would roll back 20 % of them.
    assert back <= stats.binom.ppf(0.99, trials, ALPHA)


@pytest.mark.parametrize(("worse", "within"), [(-0.2, 12), (-0.06, 50), (-0.03, 50), (-0.015, 200)])
@pytest.mark.promise(10)
def test_a_worse_adapter_is_rolled_back_and_costs_at_most_2_percent_of_200_generations(
    worse: float, within: int
) -> None:
    """-0.2 of acceptance costs 19 % of the tokens per call, -0.06 costs 8 %, -0.03 costs 4 %, -0.015 costs 2 %."""
    rng = np.random.default_rng(22)
    found = [run_watch(rng, worse, 0.08) for _ in range(40)]
    assert sum(one.roll_back_to is not None and count <= within for one, count in found) >= 38
    # While it served, it lost what it was found to be worse by.
    lost = [-one.verdict.gain * count / 200 for one, count in found]
    assert np.mean(lost) <= 0.02 and max(lost) <= 0.03


def test_the_watch_of_a_better_adapter_ends_early() -> None:
    rng = np.random.default_rng(23)
    found = [run_watch(rng, 0.04, 0.12) for _ in range(40)]
    assert all(one.roll_back_to is None for one, _ in found)
    assert np.mean([count for _, count in found]) < 100
