"""The tie rule at single positions: which differences are ties, and which are not."""

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from service.core import Prompt, Sampling
from service.engine.sampling import SamplingBatch, gumbel, transform
from service.evaluation.ties import Text, TieReport, measure_ties, needed_rounding
from tests.support.engine_text import generate
from tests.support.oracle import filtered_logprobs, tiny_llama

GREEDY = Sampling()


def scores(logits: np.ndarray, sampling: Sampling, noise: np.ndarray) -> np.ndarray:
    """Scores with mlx-lm's own filters."""
    return np.array(filtered_logprobs(mx.array(logits[None].astype(np.float32)), sampling))[0] + noise


def test_a_greedy_gap_is_the_gap_of_the_logits() -> None:
    logits = np.array([1.0, 3.0, 2.75, -np.inf])
    assert needed_rounding(logits, 1, GREEDY) == 0.0
    assert needed_rounding(logits, 2, GREEDY) == pytest.approx(0.25, rel=1e-3)
    assert needed_rounding(logits, 3, GREEDY) == float("inf")


def test_a_seeded_gap_counts_the_noise_and_the_temperature() -> None:
    sampling, noise = Sampling(temperature=0.5, seed=1), np.array([0.0, 0.0, 1.0])
    # Scores 2, 6, 5: the second would have to fall behind by 1, which is 0.5 in logits.
    assert needed_rounding(np.array([1.0, 3.0, 2.0]), 1, sampling, noise) == 0.0
    assert needed_rounding(np.array([1.0, 3.0, 2.0]), 2, sampling, noise) == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("filters", "logits", "edge"),
    [
        ({"top_k": 2}, [3.0, 2.0, 1.9, -9.0], 0.1),
        ({"min_p": float(np.exp(-1.05))}, [3.0, 2.0, 1.9, -9.0], 0.05),
        # Masses 0.6, 0.3, 0.1: the third comes in where the first two fall below 0.89.
        ({"top_p": 0.89}, [float(np.log(p)) for p in (0.6, 0.3, 0.1)], float(np.log(9) - np.log(0.89 / 0.11))),
    ],
    ids=["top_k", "min_p", "top_p"],
)
def test_a_filtered_gap_is_that_to_the_edge_of_the_set(
    filters: dict[str, Any], logits: list[float], edge: float
) -> None:
    """The token just outside the filter would win by its noise; the oracle's own choice is far behind."""
    sampling = Sampling(temperature=1.0, seed=1, **filters)
    noise = np.zeros(len(logits))
    noise[2] = 20.0
    found = needed_rounding(np.array(logits), 2, sampling, noise)
    assert found == pytest.approx(edge, rel=0.02)
    # Conversely, the best token may drop out of the set, and the next best be chosen.
    wider: dict[str, Any] = {"top_k": 3} if "top_k" in filters else {"min_p": 1e-9}
    inside = Sampling(temperature=1.0, seed=1, **wider)
    assert needed_rounding(np.array(logits), 2, inside, noise) == 0.0
    assert needed_rounding(np.array(logits), 0, inside, noise) > 1.0


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 7, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("draws", [15, pytest.param(60, marks=pytest.mark.nightly)])
def test_the_oracles_choice_needs_no_change_of_logits_and_others_do(draws: int) -> None:
    random_ = np.random.default_rng(0)
    for i in range(draws):
        logits = random_.normal(size=40) * 3
        noise = random_.gumbel(size=40)
        filters = FILTERS[i % 5]
        sampling = Sampling(temperature=0.8, seed=1, **filters)
        by_score = np.argsort(-scores(logits, sampling, noise))
        assert needed_rounding(logits, int(by_score[0]), sampling, noise) == 0.0
        others = [needed_rounding(logits, int(token), sampling, noise) for token in by_score[1:]]
        assert min(others) > 0.0
        # Logits changed by that amount make another token the choice.
        token = int(by_score[1 + int(np.argmin(others))])
        moved = logits.copy()
        moved[token] += 1.01 * min(others)
        if not filters:
            assert int(np.argmax(scores(moved, sampling, noise))) == token


def test_the_scores_are_those_of_mlx_lm_s_filters() -> None:
    logits = mx.random.normal((6, 50), key=mx.random.key(0)) * 3
    noise = gumbel([(1, i) for i in range(6)], 50)
    sampling = Sampling(temperature=0.7, top_p=0.9, min_p=0.01, top_k=20, seed=1)
    ours = transform(logits[None], SamplingBatch.of([sampling], 50))[0] + noise
    assert mx.array_equal(
        mx.argmax(ours, axis=-1), mx.argmax(filtered_logprobs(logits, sampling) + noise, axis=-1)
    ).item()


def test_exact_text_has_no_ties_and_a_wrong_token_is_a_difference() -> None:
    target = tiny_llama(0)
    rng = random.Random(0)
    asked = [Prompt(tuple(rng.randrange(4, 97) for _ in range(9)), Sampling(max_tokens=20)) for _ in range(3)]
    texts = generate(target, tiny_llama(1), asked, vocabulary=97, k=3, rows=2)
    report = measure_ties(target, texts, k=3)
    assert report.positions == 60
    assert (report.ties, report.differences) == (0, 0)
    assert report.lossless()
    wrong = [(token + 1) % 97 if i == 7 else token for i, token in enumerate(texts[0].output)]
    report = measure_ties(target, [Text(texts[0].prompt, wrong, GREEDY), *texts[1:]], k=3)
    assert report.differences >= 1
    assert not report.lossless()


def test_more_ties_than_the_target_s_own_are_no_rounding() -> None:
    assert TieReport(1000, 40, 30, 0, 0.1, 0.05).lossless()
    assert not TieReport(1000, 90, 30, 0, 0.1, 0.05).lossless()
    assert not TieReport(1000, 3, 30, 1, 0.1, 4.0).lossless()
    assert TieReport(100, 2, 0, 0, 0.1, 0.05).lossless(), "a hundred tokens say nothing about rates"
    assert not TieReport(1000, 14, 0, 0, 0.1, 0.05).lossless()


def test_without_a_seed_there_is_no_oracle() -> None:
    with pytest.raises(ValueError, match="without a seed"):
        measure_ties(tiny_llama(0), [Text((5,), [6], Sampling(temperature=1.0))], k=3)
