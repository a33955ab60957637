"""Off-policy scores from the log, against brute force and against the engine."""

import math
import random
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core import AnswerGrammar, Generation, Round, Sampling, Source
from service.learning.examples import unpack
from service.learning.scoring.acceptance import acceptance, overlap
from service.learning.scoring.expected import calls_by_length, expected_accepted, expected_calls, expected_positions
from service.learning.scoring.score import predictable_rounds
from service.learning.teacher_forcing import positions_at_once
from tests.support.logged_texts import VOCABULARY, generation, random_texts, served, with_targets
from tests.support.oracle import noisy_copy, tiny_llama
from tests.support.typed import as_int

GREEDY = Sampling(max_tokens=24)
SEEDED = Sampling(temperature=0.9, seed=1, max_tokens=24)
UNSEEDED = Sampling(temperature=1.0, max_tokens=24)
FILTERS = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 12},
    {"temperature": 0.9, "min_p": 0.05, "top_p": 0.95},
]


def enumerated(rates: list[float] | np.ndarray, k: int, start: int = 0) -> float:
    """Expected calls by enumerating all outcomes."""
    rates = np.atleast_2d(rates)
    depth, count = rates.shape
    if start >= count:
        return 0.0
    total, reached = 1.0, 1.0
    for accepted in range(k + 1):
        at = start + accepted
        if accepted == k or at >= count:
            total += reached * enumerated(rates, k, at + 1)
            break
        rate = rates[min(accepted, depth - 1), at]
        total += reached * (1 - rate) * enumerated(rates, k, at + 1)
        reached *= rate
    return total


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1), max_size=9), st.integers(0, 6))
def test_calls_equal_the_enumeration_of_all_outcomes(rates: list[float], k: int) -> None:
    assert expected_calls(rates, k) == pytest.approx(enumerated(rates, k), rel=1e-9)


def test_rounds_expect_what_is_accepted_from_their_starts() -> None:
    by_depth = np.array([[0.5, 1.0, 0.5, 1.0, 0.0], [1.0, 0.5, 1.0, 0.25, 1.0]])
    rounds = [Round(7, 0, 2, 1, 2), Round(7, 2, 0, 0, 1), Round(7, 3, 4, 0, 1)]
    assert expected_accepted(by_depth, rounds[:1]) == 0.5 + 0.5 * 0.5
    assert expected_accepted(by_depth, rounds[1:2]) == 0.0
    # No further than the text goes.
    assert expected_accepted(by_depth, rounds[2:]) == 1.0 + 1.0
    assert expected_accepted(by_depth[0], rounds) == 0.5 + 0.5 + 1.0


def test_rounds_are_predictable_where_the_text_settles_them() -> None:
    rounds = (Round(7, 0, 2, 1, 2), Round(7, 2, 0, 0, 1), Round(7, 3, 4, 4, 5, Source.LOOKUP), Round(7, 8, 1, 0, 1))
    text = replace(generation((1, 2), range(9), sampling=SEEDED), rounds=rounds)
    assert predictable_rounds(text, 7) == [rounds[0], rounds[3]]
    assert predictable_rounds(text, 0) == []
    assert predictable_rounds(replace(text, rounds=(replace(rounds[0], adapter=6), *rounds[1:])), 7) == []
    assert predictable_rounds(replace(text, prompt=replace(text.prompt, sampling=UNSEEDED)), 7) == []
    assert predictable_rounds(replace(text, grammar=AnswerGrammar("start: /a+/")), 7) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1), max_size=9), st.integers(0, 6))
def test_calls_of_all_lengths_are_those_of_each(rates: list[float], k: int) -> None:
    assert calls_by_length(rates, k) == pytest.approx([enumerated(rates, j) for j in range(1, k + 1)], rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(*[st.floats(0, 1)] * 3), min_size=1, max_size=8), st.integers(1, 5))
def test_calls_equal_the_enumeration_with_rates_by_depth(positions: list[tuple[float, ...]], k: int) -> None:
    for depth in (1, 2, 3):
        rates = np.array(positions).T[:depth]
        expected = [enumerated(rates, j) for j in range(1, k + 1)]
        assert calls_by_length(rates, k) == pytest.approx(expected, rel=1e-9)
        _, accepted = expected_positions(rates, k)
        assert expected[-1] - 1 - 1e-9 <= len(positions) - accepted.sum() <= expected[-1] + 1e-9


@pytest.mark.parametrize("k", [1, 3, 8])
def test_calls_are_those_of_a_simulation(k: int) -> None:
    rng = np.random.default_rng(k)
    rates = rng.uniform(size=60)
    runs = []
    for _ in range(4000):
        at = calls = 0
        while at < len(rates):
            accepted = 0
            while accepted < k and at + accepted < len(rates) and rng.random() < rates[at + accepted]:
                accepted += 1
            at += accepted + 1
            calls += 1
        runs.append(calls)
    error = np.std(runs) / math.sqrt(len(runs))
    assert abs(np.mean(runs) - expected_calls(rates, k)) < 4.5 * error


def test_calls_in_cases_one_can_count() -> None:
    assert expected_calls([], 4) == 0
    assert expected_calls([0.3], 4) == 1
    for count in range(1, 20):
        for k in range(6):
            assert expected_calls([1.0] * count, k) == math.ceil(count / (k + 1))
            assert expected_calls([0.0] * count, k) == count
        assert expected_calls([0.5] * count, 0) == count
    # Half the time the second token is accepted too; then the third needs one more call or none.
    assert expected_calls([0.5, 0.5], 1) == pytest.approx(1.5)
    assert expected_calls([0.5, 0.25, 0.5], 1) == pytest.approx(1 + 0.5 * 1 + 0.5 * (1 + 0.75))


@pytest.mark.parametrize("k", [1, 4])
def test_greedy_and_seeded_scores_equal_decoding(k: int) -> None:
    target = tiny_llama(1)
    draft = noisy_copy(target, 2, 0.35)
    samplings = [replace(GREEDY, max_tokens=1 + i) for i in range(0, 40, 5)]
    samplings += [Sampling(**settings, seed=i, max_tokens=24) for i in range(3) for settings in FILTERS]  # pyright: ignore[reportArgumentType]
    logged = served(target, draft, samplings, k=k)
    found = acceptance(draft, logged, vocabulary=VOCABULARY)
    for g, result in zip(logged, found, strict=True):
        assert set(result.rates.flat) <= {0.0, 1.0}
        assert expected_calls(result.rates, k) == len(g.rounds)
    accepted = np.concatenate([result.rates[0] for result in found])
    assert 0.1 < accepted.mean() < 0.95


@pytest.mark.parametrize("texts", [80, pytest.param(160, marks=pytest.mark.nightly)])
def test_unseeded_scores_equal_decoding_on_average(texts: int) -> None:
    target = tiny_llama(1)
    draft = noisy_copy(target, 2, 0.35)
    samplings = [Sampling(**FILTERS[i % 4], max_tokens=20) for i in range(texts)]  # pyright: ignore[reportArgumentType]
    logged = served(target, draft, samplings, k=3)
    found = acceptance(draft, logged, vocabulary=VOCABULARY)
    expected = np.array([expected_calls(result.rates, 3) for result in found])
    actual = np.array([len(g.rounds) for g in logged])
    error = (actual - expected).std() / math.sqrt(len(logged))
    assert abs((actual - expected).mean()) < 4.5 * error
    # A score that ignored the adapter could not tell these two apart.
    wrong = np.array([expected_calls(r.rates, 3) for r in acceptance(tiny_llama(8), logged, vocabulary=VOCABULARY)])
    assert abs((actual - wrong).mean()) > 10 * error


def naive(model: object, g: Generation) -> np.ndarray:
    tokens = mx.array([[*g.prompt.tokens, *g.output]])
    logits = np.array(model(tokens))[0].astype(np.float64)  # pyright: ignore[reportCallIssue]
    return logits[len(g.prompt.tokens) - 1 : -1]


def test_agreement_counts_the_draft_s_argmax() -> None:
    model = tiny_llama(2)
    texts = random_texts(12, seed=4)
    texts = [replace(g, output=tuple(naive(model, g).argmax(-1)[:3].tolist()) + g.output[3:]) for g in texts]
    found = acceptance(model, texts, vocabulary=VOCABULARY)
    for g, result in zip(texts, found, strict=True):
        expected = naive(model, g).argmax(-1) == np.array(g.output)
        assert result.agreed == expected.sum()
        assert np.array_equal(result.rates, [expected])


def test_scores_do_not_depend_on_the_company() -> None:
    target = tiny_llama(1)
    draft = noisy_copy(target, 2, 0.35)
    samplings = [random.Random(i).choice([GREEDY, SEEDED, UNSEEDED]) for i in range(12)]
    logged = served(target, draft, samplings, k=3)
    together = acceptance(draft, logged, vocabulary=VOCABULARY)
    for g, result in zip(logged, together, strict=True):
        (alone,) = acceptance(draft, [g], vocabulary=VOCABULARY)
        assert np.allclose(alone.rates, result.rates, atol=1e-4)
        assert alone.agreed == result.agreed


def test_many_texts_and_long_ones_are_walked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(2)
    texts = random_texts(20, seed=4)
    whole = acceptance(model, texts, vocabulary=VOCABULARY)
    monkeypatch.setattr("service.models.padding.TOKENS", 100)
    monkeypatch.setattr("service.learning.teacher_forcing.POSITIONS", 7)
    calls: list[None] = []
    pieces = acceptance(model, texts, vocabulary=VOCABULARY, between=lambda: calls.append(None))
    assert len(calls) > 5
    for one, other in zip(whole, pieces, strict=True):
        assert np.array_equal(one.rates, other.rates)


def test_fewer_logits_exist_at_once_where_memory_is_short() -> None:
    found = [positions_at_once(150_000, int(gib * 2**30)) for gib in (64, 2, 1, 0.1, 0)]
    assert found == [256, 128, 64, 16, 16]
    assert positions_at_once(VOCABULARY, 2**24) == 256


def test_a_draft_that_is_not_finite_is_never_accepted() -> None:
    draft = tiny_llama(2)
    draft.model.norm.weight = mx.full(draft.model.norm.weight.shape, float("nan"))
    samplings = [GREEDY, SEEDED, UNSEEDED]
    logged = served(tiny_llama(1), tiny_llama(3), samplings, k=2)
    for result in acceptance(draft, logged, vocabulary=VOCABULARY):
        assert not result.rates.any()
        assert result.agreed == 0


def test_nothing_is_drafted_after_a_single_prompt_token() -> None:
    model = tiny_llama(2)
    first = as_int(mx.argmax(model(mx.array([[5]]))[0, -1]))
    (result,) = acceptance(model, [generation([5], [first, 3])], vocabulary=VOCABULARY)
    assert result.agreed >= 1
    assert result.rates[0, 0] == 0.0


@pytest.mark.parametrize("vocabulary", [30, VOCABULARY])
def test_overlap_is_the_shared_mass(vocabulary: int) -> None:
    target = tiny_llama(1, vocabulary=vocabulary)
    draft = noisy_copy(target, 2, 0.5)
    texts = with_targets(target, random_texts(8, seed=1, vocabulary=vocabulary), vocabulary)
    for g, found in zip(texts, overlap(draft, texts, vocabulary=vocabulary), strict=True):
        p, q = (np.exp(naive(m, g)) for m in (target, draft))
        p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
        exact = np.minimum(p, q).sum(-1)
        assert g.targets is not None
        ids = unpack(g.targets)[0]
        top = np.minimum(np.take_along_axis(p, ids, -1), np.take_along_axis(q, ids, -1)).sum(-1)
        assert (found >= exact - 2e-3).all()
        assert (found <= top + (1 - np.take_along_axis(p, ids, -1).sum(-1)) + 2e-3).all()
        if vocabulary <= 32:
            assert np.allclose(found, exact, atol=2e-3)
    with pytest.raises(ValueError, match="targets"):
        overlap(draft, random_texts(1, seed=1), vocabulary=VOCABULARY)
