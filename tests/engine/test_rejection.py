"""Unseeded sampling has exactly the target's distribution."""

import math

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from scipy import stats

from service.core import Prompt, Sampling
from service.engine import accept
from service.engine.sampling import SamplingBatch, draw, transform
from tests.support.batches import decode
from tests.support.oracle import filtered_logprobs, tiny_llama

VOCABULARY = 10
DRAWS = 100_000
ROWS = 5_000


def draw_logits(seed: int) -> tuple[mx.array, mx.array]:
    """Logits (3, V) of a target and a (2, V) draft that differ clearly."""
    rng = np.random.default_rng(seed)
    p = rng.normal(0, 1.5, (3, VOCABULARY))
    return mx.array(p), mx.array(p[:2] + rng.normal(0, 1.0, (2, VOCABULARY)))


def one_round(sampling: Sampling, seed: int, usable: bool = True) -> np.ndarray:
    """First emitted token and, if the first proposal was accepted, the second: (DRAWS, 2), else -1."""
    p, q = draw_logits(seed)
    batch = SamplingBatch.of([sampling] * ROWS, VOCABULARY)
    logp = transform(mx.broadcast_to(p[None], (ROWS, 3, VOCABULARY)), batch)
    logq = transform(mx.broadcast_to(q[None], (ROWS, 2, VOCABULARY)), batch)
    key, out = mx.random.key(seed), []
    for _ in range(DRAWS // ROWS):
        key, a, b = mx.random.split(key, 3)
        drafted = draw(logq, batch, None, a).astype(mx.int32)
        fine = mx.full(drafted.shape, usable)
        accepted, following = accept.reject(logp, logq if usable else logq * float("nan"), drafted, fine, b)
        count, after, guess = (np.array(a).astype(np.int64) for a in (accepted, following, drafted))
        first = np.where(count > 0, guess[:, 0], after)
        second = np.where(count > 1, guess[:, 1], np.where(count == 1, after, -1))
        out.append(np.stack([first, second], axis=1))
    return np.concatenate(out)


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    assert counts[probabilities == 0].sum() == 0, "a token outside the filters was drawn"
    probabilities = probabilities.astype(np.float64)
    live = probabilities > 0
    if live.sum() == 1:
        return 1.0
    return float(stats.chisquare(counts[live], probabilities[live] / probabilities[live].sum() * counts.sum()).pvalue)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.promise(2)
def test_draws_follow_the_target(temperature: float, top_p: float, top_k: int) -> None:
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    seed = int(temperature * 10 + top_p * 100) + top_k
    drawn = one_round(sampling, seed)
    # Computed with mlx-lm's own filters, not with our transform.
    expected = np.array(mx.exp(filtered_logprobs(draw_logits(seed)[0], sampling)))
    for position in (0, 1):
        tokens = drawn[:, position]
        counts = np.bincount(tokens[tokens >= 0], minlength=VOCABULARY)
        assert counts.sum() > 5_000
        assert p_value(counts, expected[position]) > 1e-4


@pytest.mark.promise(2)
def test_the_statistic_notices_a_biased_rule() -> None:
    """The same χ² test rejects samples of the draft's distribution."""
    p, q = draw_logits(1)
    probabilities = np.array(mx.exp(filtered_logprobs(p, Sampling(temperature=1.0))))[0]
    biased = np.array(mx.random.categorical(q[0], shape=(DRAWS,), key=mx.random.key(0)))
    assert p_value(np.bincount(biased, minlength=VOCABULARY), probabilities) < 1e-4


def test_without_a_usable_draft_the_target_draws_alone() -> None:
    sampling = Sampling(temperature=1.0)
    drawn = one_round(sampling, 5, usable=False)
    expected = np.array(mx.exp(filtered_logprobs(draw_logits(5)[0], sampling)))[0]
    assert (drawn[:, 1] == -1).all()
    assert p_value(np.bincount(drawn[:, 0], minlength=VOCABULARY), expected) > 1e-4


@pytest.mark.promise(2)
def test_a_finite_q_at_an_unusable_position_biases_no_draw() -> None:
    """Where a row drafts fewer tokens than its batch, the positions behind its own have a q that is finite and not used."""
    p, q = np.full(4, 0.25), np.array([0.7, 0.1, 0.1, 0.1])
    logp = mx.broadcast_to(mx.log(mx.array(p))[None, None], (DRAWS, 3, 4))
    logq = mx.broadcast_to(mx.log(mx.array(q))[None, None], (DRAWS, 2, 4))
    drafted = mx.random.categorical(logq, key=mx.random.key(1)).astype(mx.int32)
    for usable in ([False, False], [True, False]):
        fine = mx.broadcast_to(mx.array(usable)[None], (DRAWS, 2))
        accepted, following = (np.array(each) for each in accept.reject(logp, logq, drafted, fine, mx.random.key(2)))
        assert accepted.max() == sum(usable), "nothing is accepted there"
        behind = following[accepted == sum(usable)]
        assert len(behind) > DRAWS / 2
        assert p_value(np.bincount(behind, minlength=4), p) > 1e-4


@pytest.mark.parametrize(("usable", "count"), [([1, 1, 1], 3), ([1, 0, 1], 1), ([0, 1, 1], 0), ([1, 1, 0], 2)])
def test_the_match_rule_accepts_nothing_that_was_not_proposed(usable: list[int], count: int) -> None:
    """A place that nothing was proposed for holds some token, which may be the target's own choice."""
    chosen = mx.array([[5, 6, 7, 8]])
    accepted, following = accept.match(chosen, chosen[:, :3], mx.array([usable]) > 0)
    assert (accepted.tolist(), following.tolist()) == ([count], [5 + count])


def test_a_rejection_that_leaves_no_residual_draws_from_the_target() -> None:
    """Rounding can put q above p at the proposed token while p is above q at no other; here it is exaggerated."""
    p = np.array([0.25, 0.25, 0.25, 0.25])
    logp = mx.broadcast_to(mx.log(mx.array(p))[None, None], (DRAWS, 2, 4))
    logq = mx.broadcast_to(mx.log(mx.array([0.5, 0.25, 0.25, 0.25]))[None, None], (DRAWS, 1, 4))
    drafted, fine = mx.zeros((DRAWS, 1), dtype=mx.int32), mx.ones((DRAWS, 1), dtype=mx.bool_)
    accepted, following = (np.array(each) for each in accept.reject(logp, logq, drafted, fine, mx.random.key(4)))
    rejected = following[accepted == 0]
    assert 0.45 * DRAWS < len(rejected) < 0.55 * DRAWS
    assert p_value(np.bincount(rejected, minlength=4), p) > 1e-4


def test_equal_distributions_accept_everything_and_leave_no_residual() -> None:
    logp = mx.log(mx.softmax(mx.random.normal((64, 4, VOCABULARY), key=mx.random.key(1)), axis=-1))
    drafted = mx.random.categorical(logp[:, :3], key=mx.random.key(2)).astype(mx.int32)
    accepted, following = accept.reject(logp, logp[:, :3], drafted, mx.ones((64, 3), dtype=mx.bool_), mx.random.key(3))
    assert (np.array(accepted) == 3).all()
    assert ((np.array(following) >= 0) & (np.array(following) < VOCABULARY)).all()


def test_acceptance_is_the_overlap() -> None:
    """E[first accepted] = Σ min(p, q) (Leviathan et al., theorem 3.5), within five standard errors."""
    p, q = draw_logits(9)
    batch = SamplingBatch.of([Sampling(temperature=1.0)] * DRAWS, VOCABULARY)
    logp = mx.broadcast_to(transform(p[None, :2], batch), (DRAWS, 2, VOCABULARY))
    logq = mx.broadcast_to(transform(q[None, :1], batch), (DRAWS, 1, VOCABULARY))
    drafted = draw(logq, batch, None, mx.random.key(1)).astype(mx.int32)
    accepted, _ = accept.reject(logp, logq, drafted, mx.ones((DRAWS, 1), dtype=mx.bool_), mx.random.key(2))
    overlap = float(np.minimum(np.array(mx.exp(logp))[0, 0], np.array(mx.exp(logq))[0, 0]).sum())
    error = math.sqrt(overlap * (1 - overlap) / DRAWS)
    assert abs(float(np.array(accepted).mean()) - overlap) < 5 * error


def test_stopping_at_low_confidence_keeps_the_distribution() -> None:
    """The second token is drafted only if the confidence in the first is high; the first is verified in any case."""
    p, q = draw_logits(3)
    batch = SamplingBatch.of([Sampling(temperature=1.0)] * DRAWS, VOCABULARY)
    logp = mx.broadcast_to(transform(p[None], batch), (DRAWS, 3, VOCABULARY))
    logq = mx.broadcast_to(transform(q[None], batch), (DRAWS, 2, VOCABULARY))
    drafted = draw(logq, batch, None, mx.random.key(1)).astype(mx.int32)
    sure = np.array(mx.take_along_axis(logq, drafted[..., None], axis=-1))[:, 0, 0]
    far = sure >= np.median(sure)
    first, second = np.empty(DRAWS, dtype=np.int64), np.full(DRAWS, -1)
    for k, rows in ((2, np.flatnonzero(far)), (1, np.flatnonzero(~far))):
        at = mx.array(rows)
        proposed = drafted[at, :k]
        fine = mx.ones(proposed.shape, dtype=mx.bool_)
        accepted, after = accept.reject(logp[at, : k + 1], logq[at, :k], proposed, fine, mx.random.key(k + 5))
        n, then, tokens = (np.array(a).astype(np.int64) for a in (accepted, after, proposed))
        first[rows] = np.where(n > 0, tokens[:, 0], then)
        second[rows] = np.where(n > 1, tokens[:, -1], np.where(n == 1, then, -1))
    probabilities = np.array(mx.exp(logp[0]))
    assert p_value(np.bincount(first, minlength=VOCABULARY), probabilities[0]) > 1e-4
    for part in (far, ~far):
        assert p_value(np.bincount(second[part & (second >= 0)], minlength=VOCABULARY), probabilities[1]) > 1e-4
    assert p_value(np.bincount(first[far], minlength=VOCABULARY), probabilities[0]) < 1e-4, (
        "the test notices a missing part"
    )


@pytest.mark.promise(2)
def test_tokens_of_one_proposal_are_drawn_independently() -> None:
    """Target and draft that give every token the same probability: neighbours are as seldom equal as chance has it."""
    model = tiny_llama(0)
    model.update(tree_map(mx.zeros_like, model.parameters()))
    prompts = [Prompt((1, 2, 3), Sampling(temperature=1.0, max_tokens=150)) for _ in range(8)]
    rows = decode(model, model, prompts, k=4, vocabulary=97, seed=1)
    assert sum(round.accepted for row in rows for round in row.rounds) > 800, "most tokens are the draft's"
    text = np.array([row.output for row in rows])
    pairs = text[:, 1:].size
    for distance in (1, 2, 3):
        equal = int((text[:, distance:] == text[:, :-distance]).sum())
        assert equal < 3 * pairs / 97, distance
