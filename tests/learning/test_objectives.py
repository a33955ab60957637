"""Every objective against float64 arithmetic, and its gradients."""

import mlx.core as mx
import numpy as np
import pytest

from service.learning import lora
from service.learning.dataset import build, collate
from service.learning.fitting import fit
from service.learning.loss import TargetDivergence, buckets
from service.learning.objectives import Objective, each
from service.settings import TrainingSettings
from tests.support.logged_texts import VOCABULARY, random_texts, with_targets
from tests.support.oracle import noisy_copy, tiny_llama
from tests.support.typed import as_float


def draw_logprobs(seed: int, count: int = 50, width: int = 9) -> np.ndarray:
    logits = 3 * np.random.default_rng(seed).normal(size=(count, width))
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def by_hand(objective: Objective, logp: np.ndarray, logq: np.ndarray) -> np.ndarray:
    p, q = np.exp(logp), np.exp(logq)
    overlap = np.minimum(p, q).sum(-1)
    forward = (p * (logp - logq)).sum(-1)
    match objective:
        case Objective.KL:
            return forward
        case Objective.REVERSE_KL:
            return (q * (logq - logp)).sum(-1)
        case Objective.TV:
            return np.abs(p - q).sum(-1) / 2
        case Objective.JSD:
            m = (p + q) / 2
            return (p * np.log(p / m) + q * np.log(q / m)).sum(-1) / 2
        case Objective.LK:
            share = np.exp(-3 * overlap)
            return share * forward - (1 - share) * np.log(overlap)
        case Objective.ARGMAX:
            return -logq[np.arange(len(p)), p[:, :-1].argmax(-1)]


@pytest.mark.parametrize("objective", Objective)
def test_values(objective: Objective) -> None:
    p, q = draw_logprobs(0), draw_logprobs(1)
    got = np.array(each(objective, mx.array(p.astype(np.float32)), mx.array(q.astype(np.float32))))
    assert np.allclose(got, by_hand(objective, p, q), rtol=1e-4, atol=1e-5)
    if objective is not Objective.ARGMAX:
        same = np.array(each(objective, mx.array(p.astype(np.float32)), mx.array(p.astype(np.float32))))
        assert np.allclose(same, 0, atol=1e-5)
        assert (got > 0).all()


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("tail", [-np.inf, np.log(1e-12), np.log(0.3)])
def test_gradients_are_finite_whatever_the_tail(objective: Objective, tail: float) -> None:
    """Also for a vocabulary inside the top-k, so that the draft has no mass outside it."""
    for width in (8, 40):
        ids = mx.array(np.tile(np.arange(8), (4, 1)))
        top = draw_logprobs(2, 4, 8) + np.log1p(-np.exp(tail))
        logp = mx.array(np.concatenate([top, np.full((4, 1), tail)], axis=1).astype(np.float32))
        logits = mx.array(np.random.default_rng(3).normal(size=(4, width)).astype(np.float32) * 20)
        value, gradient = mx.value_and_grad(lambda z: each(objective, logp, buckets(z, ids)).sum())(logits)  # noqa: B023
        assert mx.isfinite(value).item()
        assert mx.isfinite(gradient).all().item()
        assert as_float(mx.abs(gradient).max()) > 0


@pytest.mark.parametrize("objective", Objective)
def test_a_poisoned_target_shows(objective: Objective) -> None:
    logp = draw_logprobs(4).astype(np.float32)
    logp[7] = np.nan
    got = np.array(each(objective, mx.array(logp), mx.array(draw_logprobs(5).astype(np.float32))))
    assert np.isnan(got[7])
    assert np.isfinite(np.delete(got, 7)).all()


@pytest.mark.parametrize("objective", Objective)
def test_a_fit_lowers_its_objective(objective: Objective) -> None:
    target = tiny_llama(1)
    draft = noisy_copy(target, 2, 0.5)
    logged = with_targets(target, random_texts(12, 0))
    examples = build(logged, max_length=64, reject_weight=1.0, vocabulary=VOCABULARY).examples
    lora.wrap(draft, rank=8, scale=2.0, seed=0)
    loss = TargetDivergence(draft, objective)
    batch = collate(examples)
    before = as_float(loss(draft, batch))
    each_position = np.array(loss.positions(draft, batch))
    weight = np.array(batch.weight)
    assert before == pytest.approx((each_position * weight).sum() / weight.sum(), rel=1e-4)
    fit(draft, examples, TrainingSettings(epochs=3, learning_rate=1e-2, batch_size=4), seed=1, loss=loss)
    assert as_float(loss(draft, batch)) < 0.95 * before
