"""The divergence against float64 arithmetic, and the positions at which it is computed."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from service.learning import lora
from service.learning.batches import Batch, collate
from service.learning.draft_steps import states_at_positions
from service.learning.examples import build
from service.learning.losses import Objective, TargetDivergence, buckets, forward_kl, jensen_shannon
from tests.support.logged_texts import VOCABULARY, random_texts, with_targets
from tests.support.oracle import tiny_llama
from tests.support.typed import as_float, layers_of, leaves


def divergence(logits: mx.array, ids: mx.array, logprobs: mx.array, tail: mx.array) -> mx.array:
    """Forward KL at each position."""
    return forward_kl(mx.concatenate([logprobs, tail[:, None]], axis=-1), buckets(logits, ids))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def stored(logp: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = np.argsort(-logp, axis=-1)[:, :top]
    largest = np.take_along_axis(logp, ids, axis=-1)
    rest = np.exp(logp).sum(axis=-1) - np.exp(largest).sum(axis=-1)
    with np.errstate(divide="ignore"):
        tail = np.log(np.where(top < logp.shape[1], np.maximum(rest, 0), 0))
    return ids, largest, tail


def ours(logits: np.ndarray, ids: np.ndarray, logp: np.ndarray, tail: np.ndarray) -> np.ndarray:
    return np.array(
        divergence(
            mx.array(logits.astype(np.float32)),
            mx.array(ids.astype(np.int32)),
            mx.array(logp.astype(np.float32)),
            mx.array(tail.astype(np.float32)),
        )
    )


@pytest.mark.parametrize("vocabulary", [5, 31, 32])
def test_a_complete_top_k_gives_the_full_kl(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    p, q = (log_softmax(3 * rng.normal(size=(40, vocabulary))) for _ in range(2))
    whole = (np.exp(p) * (p - q)).sum(axis=-1)
    assert np.allclose(ours(q, *stored(p, 32)), whole, rtol=1e-4, atol=1e-5)


def test_with_a_tail_it_is_the_kl_of_the_merged_distributions() -> None:
    rng = np.random.default_rng(7)
    p, q = (log_softmax(2 * rng.normal(size=(40, 300))) for _ in range(2))
    ids, top, tail = stored(p, 32)
    q_top = np.take_along_axis(q, ids, axis=-1)
    q_tail = np.log(1 - np.exp(q_top).sum(axis=-1))
    merged = (np.exp(top) * (top - q_top)).sum(axis=-1) + np.exp(tail) * (tail - q_tail)
    got = ours(q, ids, top, tail)
    assert np.allclose(got, merged, rtol=1e-4, atol=1e-5)
    assert (got <= (np.exp(p) * (p - q)).sum(axis=-1) + 1e-5).all()
    assert np.allclose(ours(p, ids, top, tail), 0.0, atol=1e-5)


def analytic(logits: np.ndarray, ids: np.ndarray, logp: np.ndarray, tail: np.ndarray) -> np.ndarray:
    """Gradient of the merged KL for one row, float64: q sum(p) - p on the top, minus the tail's share elsewhere."""
    logits = logits.astype(np.float64)
    q = np.exp(log_softmax(logits[None])[0])
    grad = q * (np.exp(logp).sum() + np.exp(tail))
    rest = np.ones(len(q), dtype=bool)
    rest[ids] = False
    grad[ids] -= np.exp(logp)
    if rest.any():
        inside = log_softmax(logits[None, rest])[0]
        grad[rest] -= np.exp(tail) * np.exp(inside)
    return grad


@pytest.mark.parametrize("mass", [0.3, 1e-4, 1e-12, 0.0])
@pytest.mark.parametrize("gap", [0.0, 20.0, 90.0, 400.0])
def test_gradients_are_right_however_small_either_tail(mass: float, gap: float) -> None:
    rng = np.random.default_rng(3)
    vocabulary, top = 200, 32
    ids = np.arange(top)
    logp = np.log(rng.dirichlet(np.ones(top)) * (1 - mass))
    tail = np.log(mass) if mass else -np.inf
    logits = rng.normal(size=vocabulary).astype(np.float32)
    logits[top:] -= gap  # the draft's own tail mass down to e^-400

    def loss(x: mx.array) -> mx.array:
        row = [mx.array(a.astype(np.float32))[None] for a in (logp,)]
        return divergence(x[None], mx.array(ids)[None], row[0], mx.array([tail], dtype=mx.float32)).sum()

    value, grad = mx.value_and_grad(loss)(mx.array(logits))
    assert np.isfinite(value.item())
    assert np.allclose(np.array(grad), analytic(logits, ids, logp, np.array(tail)), rtol=1e-3, atol=2e-6)


def test_gradients_are_finite_when_nothing_lies_outside_the_top() -> None:
    logits = mx.array(np.random.default_rng(1).normal(size=(3, 20)).astype(np.float32))
    ids = mx.broadcast_to(mx.arange(20), (3, 20))
    logp = mx.full((3, 20), float(-np.log(20)))
    grad = mx.grad(lambda x: divergence(x, ids, logp, mx.full((3,), -float("inf"))).sum())(logits)
    assert np.allclose(np.array(grad), np.array(mx.softmax(logits, axis=-1)) - 1 / 20, atol=1e-6)


def test_a_poisoned_target_shows() -> None:
    logp = np.full((1, 32), -np.log(32.0))
    logp[0, 5] = np.nan
    assert np.isnan(ours(np.zeros((1, 97)), np.arange(32)[None], logp, np.array([-np.inf]))).all()


@pytest.fixture
def model() -> nn.Module:
    return tiny_llama(2)


@pytest.fixture
def batch() -> Batch:
    texts = with_targets(tiny_llama(1), random_texts(6, seed=2))
    return collate(build(texts, max_length=512, vocabulary=VOCABULARY).examples)


def naive_loss(model: nn.Module, batch: Batch) -> float:
    logits = np.array(model(batch.tokens)).reshape(-1, VOCABULARY)[np.array(batch.at)]
    q = log_softmax(logits)
    ids, logp, tail, weight = (np.array(a) for a in (batch.ids, batch.logprobs, batch.tail, batch.weight))
    q_top = np.take_along_axis(q, ids, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        last = np.where(np.isinf(tail), 0, np.exp(tail) * (tail - np.log(1 - np.exp(q_top).sum(axis=-1))))
    each = (np.exp(logp) * (logp - q_top)).sum(axis=-1) + last
    return float((each * weight).sum() / weight.sum())


def test_the_loss_is_the_weighted_mean_over_response_positions(model: nn.Module, batch: Batch) -> None:
    loss = TargetDivergence(model, forward_kl)
    assert loss.parts is not None
    assert loss(model, batch).item() == pytest.approx(naive_loss(model, batch), rel=1e-4)


def test_a_model_that_cannot_be_split_gets_the_same_loss(model: nn.Module, batch: Batch) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
            return self.inner(tokens, cache=cache)

        @property
        def layers(self) -> list[nn.Module]:
            return layers_of(self.inner)

    whole = Whole()
    loss = TargetDivergence(whole, forward_kl)
    assert loss.parts is None
    assert loss(whole, batch).item() == pytest.approx(naive_loss(model, batch), rel=1e-4)


def counted_rows(model: nn.Module) -> list[int]:
    """Records the number of positions in each call of the model's head."""
    rows: list[int] = []

    class Counting(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __call__(self, states: mx.array) -> mx.array:
            rows.append(states.size // states.shape[-1])
            return self.inner(states)

    model.lm_head = Counting(model["lm_head"])
    return rows


def test_the_head_runs_on_response_positions_only(model: nn.Module, batch: Batch) -> None:
    rows = counted_rows(model)
    loss = TargetDivergence(model, forward_kl)
    rows.clear()
    loss(model, batch)
    assert rows == [batch.at.shape[0]]
    assert rows[0] < batch.tokens.size


def test_logits_of_many_positions_never_exist_at_once(model: nn.Module, batch: Batch) -> None:
    rows = counted_rows(model)
    loss = TargetDivergence(model, forward_kl, chunk=17)
    rows.clear()
    loss(model, batch)
    assert max(rows) == 17
    assert sum(rows) == batch.at.shape[0]


def test_many_positions_in_chunks_give_the_same_loss_and_gradients(model: nn.Module, batch: Batch) -> None:
    lora.wrap(model, rank=4, scale=2.0, seed=0)
    whole, in_chunks = TargetDivergence(model, forward_kl), TargetDivergence(model, forward_kl, chunk=17)

    def directly(model: nn.Module, batch: Batch) -> mx.array:
        """The loss without the gradient that was computed beside it."""
        assert whole.parts is not None
        states = states_at_positions(model, whole.parts, batch)
        positions = slice(0, batch.at.shape[0])
        each = whole._divergence(states, batch, positions)  # pyright: ignore[reportPrivateUsage]
        return (each * batch.weight).sum() / batch.weight.sum()

    value, grads = nn.value_and_grad(model, directly)(model, batch)
    assert nn.value_and_grad(model, whole)(model, batch)[0].item() == pytest.approx(value.item(), rel=1e-5)
    chunked, chunked_grads = nn.value_and_grad(model, in_chunks)(model, batch)
    assert chunked.item() == pytest.approx(value.item(), rel=1e-5)
    pairs = zip(leaves(grads), leaves(chunked_grads), strict=True)
    for (name, one), (other_name, other) in pairs:
        assert name == other_name
        assert mx.allclose(one, other, rtol=1e-3, atol=1e-6), name


def test_nothing_to_learn_is_zero_and_not_nan(model: nn.Module, batch: Batch) -> None:
    empty = replace(batch, weight=mx.zeros_like(batch.weight))
    none = replace(
        batch,
        at=batch.at[:0],
        ids=batch.ids[:0],
        logprobs=batch.logprobs[:0],
        tail=batch.tail[:0],
        weight=batch.weight[:0],
    )
    loss = TargetDivergence(model, forward_kl)
    for nothing in (empty, none):
        value, grads = nn.value_and_grad(model, loss)(model, nothing)
        assert value.item() == 0.0
        assert all(mx.array_equal(gradient, mx.zeros_like(gradient)).item() for _, gradient in leaves(grads))


@pytest.mark.parametrize("objective", [forward_kl, jensen_shannon])
def test_objectives_by_hand(objective: Objective) -> None:
    p, q = (3 * np.random.default_rng(seed).normal(size=(50, 9)) for seed in (0, 1))
    p, q = (each - np.log(np.exp(each).sum(axis=-1, keepdims=True)) for each in (p, q))
    middle = np.logaddexp(p, q) - np.log(2)
    by_hand = (np.exp(p) * (p - q)).sum(-1)
    if objective is jensen_shannon:
        by_hand = ((np.exp(p) * (p - middle)).sum(-1) + (np.exp(q) * (q - middle)).sum(-1)) / 2
    logp, logq = mx.array(p.astype(np.float32)), mx.array(q.astype(np.float32))
    assert np.allclose(np.array(objective(logp, logq)), by_hand, rtol=1e-4, atol=1e-5) and (by_hand > 0).all()
    assert np.allclose(np.array(objective(logp, logp)), 0, atol=1e-5)
    poisoned = np.array(objective(mx.where(mx.arange(50)[:, None] == 7, float("nan"), logp), logq))
    assert np.isnan(poisoned[7]) and np.isfinite(np.delete(poisoned, 7)).all()


@pytest.mark.parametrize("tail", [-np.inf, np.log(1e-12), np.log(0.3)])
@pytest.mark.parametrize("width", [8, 40])
def test_gradients_are_finite_whatever_the_tail(tail: float, width: int) -> None:
    """Also for a vocabulary inside the top-k, so that the draft has no mass outside it."""
    ids = mx.array(np.tile(np.arange(8), (4, 1)))
    top = 3 * np.random.default_rng(2).normal(size=(4, 8))
    top = top - np.log(np.exp(top).sum(axis=-1, keepdims=True)) + np.log1p(-np.exp(tail))
    logp = mx.array(np.concatenate([top, np.full((4, 1), tail)], axis=1).astype(np.float32))
    logits = mx.array(np.random.default_rng(3).normal(size=(4, width)).astype(np.float32) * 20)
    value, gradient = mx.value_and_grad(lambda z: jensen_shannon(logp, buckets(z, ids)).sum())(logits)
    assert mx.isfinite(value).item() and mx.isfinite(gradient).all().item()
    assert as_float(mx.abs(gradient).max()) > 0
