"""Acceptance by position and predicted speed, against brute force and against the engine."""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.llama import Model

from service.core import Generation, Sampling
from service.engine.costs import Costs
from service.learning.scoring.acceptance import Acceptance, acceptance
from service.learning.scoring.expected import expected_calls, expected_positions, forecast
from tests.support.logged_texts import VOCABULARY, served
from tests.support.oracle import noisy_copy, tiny_llama

SETTINGS = {
    "greedy": [Sampling(max_tokens=24)] * 60,
    "seeded": [Sampling(temperature=0.9, seed=i, top_p=0.9, max_tokens=24) for i in range(60)],
}
ROWS = pytest.mark.parametrize("rows", [24, pytest.param(60, marks=pytest.mark.nightly)])
UNSEEDED = {
    "plain": {"temperature": 1.0},
    "top-p": {"temperature": 0.8, "top_p": 0.8},
    "top-k and min-p": {"temperature": 1.1, "top_k": 12, "min_p": 0.03},
}


def enumerated(rates: list[float], k: int, start: int = 0, reach: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Expected verifications and acceptances by position, by enumerating all outcomes."""
    tested, accepted = np.zeros(k), np.zeros(k)
    if start >= len(rates):
        return tested, accepted
    for i in range(k + 1):
        at = start + i
        if i == k or at >= len(rates):
            more = enumerated(rates, k, at + 1, reach)
            return tested + more[0], accepted + more[1]
        tested[i] += reach
        more = enumerated(rates, k, at + 1, reach * (1 - rates[at]))
        tested, accepted = tested + more[0], accepted + more[1]
        reach *= rates[at]
        accepted[i] += reach
    raise AssertionError


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(0, 1), max_size=8), st.integers(1, 5))
def test_positions_equal_the_enumeration_of_all_outcomes(rates: list[float], k: int) -> None:
    for got, wanted in zip(expected_positions(rates, k), enumerated(rates, k), strict=True):
        assert got == pytest.approx(wanted, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(0, 6))
def test_every_token_is_a_calls_own_or_an_accepted_one(rates: list[float], k: int) -> None:
    """The last call emits no token of its own if the text ends with an accepted one."""
    _, accepted = expected_positions(rates, k)
    calls = expected_calls(rates, k)
    assert calls - 1 - 1e-9 <= len(rates) - accepted.sum() <= calls + 1e-9


def by_position(real: list[Generation], k: int) -> tuple[np.ndarray, np.ndarray]:
    tested, accepted = np.zeros(k), np.zeros(k)
    for g in real:
        for r in g.rounds:
            for i in range(min(r.accepted + 1, r.drafted, len(g.output) - r.start)):
                tested[i] += 1
                accepted[i] += i < r.accepted
    return tested, accepted


@pytest.fixture(scope="module")
def models() -> tuple[Model, Model, Model]:
    """The target, the draft of the log, and the draft whose acceptance is estimated."""
    target = tiny_llama(1)
    return target, noisy_copy(target, 2, 0.35), noisy_copy(target, 9, 0.2)


@pytest.fixture(scope="module")
def logs(models: tuple[Model, Model, Model]) -> Callable[[str, int], list[Generation]]:
    """logs(kind, rows) -> the logged generations, decoded once."""
    return cache(lambda kind, rows: served(models[0], models[1], SETTINGS[kind][:rows], k=3))


@ROWS
@pytest.mark.parametrize(
    ("kind", "k"),
    [
        ("greedy", 2),
        ("seeded", 4),
        pytest.param("greedy", 4, marks=pytest.mark.nightly),
        pytest.param("seeded", 2, marks=pytest.mark.nightly),
    ],
)
def test_greedy_and_seeded_positions_are_predicted_exactly(
    models: tuple[Model, Model, Model], logs: Callable[[str, int], list[Generation]], kind: str, k: int, rows: int
) -> None:
    target, _, other = models
    real = served(target, other, SETTINGS[kind][:rows], k=k)
    found = forecast(acceptance(other, logs(kind, rows), vocabulary=VOCABULARY), k)
    tested, accepted = by_position(real, k)
    # A near-tie may be decided differently. The last of four positions is verified less than twice per row.
    assert found.rates == pytest.approx(tuple(accepted / tested), abs=0.6 / rows)
    assert found.tokens_per_call == pytest.approx(
        sum(len(g.output) for g in real) / sum(len(g.rounds) for g in real), rel=0.3 / rows
    )


@pytest.mark.parametrize(
    ("kind", "texts"), [("top-p", 80), *(pytest.param(kind, 150, marks=pytest.mark.nightly) for kind in UNSEEDED)]
)
def test_unseeded_positions_are_predicted_on_average(models: tuple[Model, Model, Model], kind: str, texts: int) -> None:
    k, (target, logger, other) = 3, models
    samplings = [Sampling(**UNSEEDED[kind], max_tokens=24)] * texts  # pyright: ignore[reportArgumentType]
    logged = served(target, logger, samplings, k=2, seed=1)
    found = forecast(acceptance(other, logged, vocabulary=VOCABULARY), k)
    tested, accepted = by_position(served(target, other, samplings, k=k, seed=2), k)
    # The rates of the logged draft itself would fail.
    wrong = forecast(acceptance(logger, logged, vocabulary=VOCABULARY), k).rates[0]
    assert abs(wrong - accepted[0] / tested[0]) > 4 * math.sqrt(2 * wrong * (1 - wrong) / tested[0])
    for predicted, n, share in zip(found.rates, tested, accepted / tested, strict=True):
        # Both the log and the decoding are samples.
        assert abs(predicted - share) < 4 * math.sqrt(2 * share * (1 - share) / n)
        assert 0.2 < share < 0.98


def test_speed_is_tokens_over_seconds() -> None:
    found = [Acceptance(np.array([1.0, 0.0, 0.5, 1.0]), 2), Acceptance(np.array([0.3]), 0)]
    costs = Costs({(1, 1): 1.0, (1, 3): 1.5, (4, 1): 2.0, (4, 3): 3.0}, {1: 0.1, 4: 0.2}, {1: 0.0}, 0.0, 0.0)
    calls = sum(expected_calls(one.rates, 2) for one in found)
    one = forecast(found, 2, costs)
    assert one.tokens_per_second == pytest.approx(5 / calls / (1.5 + 2 * 0.1))
    assert forecast(found, 2, costs, rows=4).tokens_per_second == pytest.approx(4 * 5 / calls / (3.0 + 2 * 0.2))
    plain = forecast(found, 0, costs)
    assert (plain.tokens_per_call, plain.rates, plain.tokens_per_second) == (1.0, (), 1.0)
    assert forecast(found, 2).tokens_per_second is None
