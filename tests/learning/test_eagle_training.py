"""Training an EAGLE head: the objective of every draft step, and that all of its adapter is trained."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.llama import Model

from service.core import Sampling
from service.engine.folding import as_served
from service.learning import lora
from service.learning.batches import Batch, collate
from service.learning.draft_steps import LEARNT_STEPS, window_states
from service.learning.examples import build
from service.learning.losses import Objective, TargetDivergence, buckets, forward_kl, jensen_shannon
from service.learning.scoring.score import score
from service.learning.train import Optimiser, train
from service.models.eagle import Model as Head
from tests.support.eagle_models import plain_llama, tiny_head
from tests.support.logged_texts import VOCABULARY, random_texts, served, with_targets
from tests.support.oracle import noisy_copy, tiny_llama
from tests.support.typed import as_float, leaves

KEYS = {"fuse"} | {f"self_attn.{n}_proj" for n in "qkvo"} | {f"mlp.{n}_proj" for n in ("gate", "up", "down")}
TURNS = np.array([0, 1, 0, 2, 0, 1, 2, 0, 1, 0, 1, 2])


@pytest.fixture
def target() -> Model:
    return plain_llama(1)


@pytest.fixture
def head(target: Model) -> Head:
    return tiny_head(target, 2)


def some_batch(target: Model, vocabulary: int = VOCABULARY) -> Batch:
    texts = with_targets(target, random_texts(4, seed=2, vocabulary=vocabulary), vocabulary)
    return collate(build(texts, max_length=128, vocabulary=vocabulary).examples)


def by_step(head: Head, batch: Batch, objective: Objective) -> list[mx.array]:
    """The objective (N,) at a batch's positions, step by step."""
    logp = mx.concatenate([batch.logprobs, batch.tail[:, None]], axis=-1)
    found = head.model.unrolled(batch.tokens, head.features(batch.tokens), LEARNT_STEPS)
    logits = [head.logits(states).reshape(-1, VOCABULARY)[batch.at] for states in found]
    return [objective(logp, buckets(some, batch.ids)) for some in logits]


@pytest.mark.parametrize("chunk", [512, 17])
@pytest.mark.parametrize("objective", [forward_kl, jensen_shannon])
def test_every_position_is_learnt_in_one_step_of_a_round(
    target: Model, head: Head, objective: Objective, chunk: int
) -> None:
    batch = some_batch(target)
    loss, steps = TargetDivergence(head, objective, chunk=chunk), by_step(head, batch, objective)
    turn = TURNS[np.array(batch.at) % batch.tokens.shape[1] % 12]
    every, weight = np.array(mx.stack(steps)), np.array(batch.weight)
    assert np.bincount(turn[weight > 0], minlength=3).min() > 0.15 * (weight > 0).sum()
    mean = float((every[turn, np.arange(len(turn))] * weight).sum() / weight.sum())
    assert loss(head, batch).item() == pytest.approx(mean, rel=1e-4)
    assert all(abs(mean - float((step * weight).sum() / weight.sum())) > 1e-3 * mean for step in every)


def test_a_window_has_the_targets_hidden_states_of_the_whole_text(target: Model, head: Head) -> None:
    texts = with_targets(target, [t for t in random_texts(8, seed=3) if len(t.prompt.tokens) + len(t.output) > 24])
    examples = build(texts, max_length=24, vocabulary=VOCABULARY).examples
    batch = collate(examples)
    found = window_states(head, None, batch, LEARNT_STEPS)
    length = batch.tokens.shape[1]
    assert len({len(example.before) for example in examples}) > 2
    for row, example in enumerate(examples):
        whole = mx.array([[*example.before.tolist(), *example.tokens.tolist()]])
        features = head.features(whole)[:, len(example.before) :]
        wanted = head.model.unrolled(mx.array(example.tokens)[None], features, LEARNT_STEPS)
        learnt = slice(row * length + example.start, row * length + example.start + example.positions)
        for step, states in enumerate(wanted):
            assert mx.allclose(found[step][learnt], states[0, example.start :], atol=1e-4).item()


def test_every_matrix_of_the_adapter_learns_from_the_first_step_on(target: Model, head: Head) -> None:
    before = [array for _, array in leaves(target.parameters())]
    shape = lora.wrap(head, rank=4, scale=2.0, seed=0)
    assert set(shape.keys) == KEYS
    batch, loss = some_batch(target), TargetDivergence(head)
    step = nn.value_and_grad(head, loss)
    value, grads = step(head, batch)
    found = dict(leaves(grads))
    assert set(found) == {f"model.layers.0.{key}.lora_{x}" for key in KEYS for x in "ab"}
    for name, gradient in found.items():
        assert (as_float(mx.abs(gradient).max()) > 1e-6) == name.endswith("lora_b"), name
    again, chunked = nn.value_and_grad(head, TargetDivergence(head, chunk=17))(head, batch)
    assert again.item() == pytest.approx(value.item(), rel=1e-5)
    for name, gradient in leaves(chunked):
        assert mx.allclose(gradient, found[name], rtol=1e-3, atol=1e-6).item(), name
    report = train(head, [batch] * 20, loss_fn=loss, optimiser=Optimiser(1e-2, 20))
    assert report.losses[-1] < 0.8 * report.losses[0]
    assert all(mx.array_equal(a, b).item() for a, (_, b) in zip(before, leaves(target.parameters()), strict=True))


@pytest.mark.nightly
def test_a_trained_adapter_is_served_scored_and_continued(target: Model, head: Head, tmp_path: Path) -> None:
    texts = served(target, tiny_llama(5), [Sampling(max_tokens=24)] * 12, k=0)
    data = build(texts, max_length=128, vocabulary=VOCABULARY)

    def calls(model: nn.Module) -> np.ndarray:
        return np.array([s.calls for s in score(model, texts, k=3, vocabulary=VOCABULARY)]).sum(axis=0)

    bare = calls(head)
    shape = lora.wrap(head, rank=8, scale=2.0, seed=0)
    train(head, [collate(data.examples)] * 25, loss_fn=TargetDivergence(head), optimiser=Optimiser(1e-2, 25))
    learnt = calls(head)
    assert (learnt < bare - 5).all()
    assert (calls(as_served(head, None)) == learnt).all()
    lora.save(head, shape, tmp_path / "a", draft="d", target="t")
    lora.detach(head)
    assert (calls(head) == bare).all()
    lora.attach(head, tmp_path / "a", "d")
    assert (calls(head) == learnt).all()
    child = tiny_head(target, 2)
    lora.warm_start(child, lora.wrap(child, rank=12, scale=2.0, seed=1), tmp_path / "a", "d")
    assert calls(child) == pytest.approx(learnt, abs=1)


def test_an_ordinary_draft_trains_unchanged() -> None:
    target = tiny_llama(1)
    draft, batch = noisy_copy(target, 2, 0.5), some_batch(target)
    logp = mx.concatenate([batch.logprobs, batch.tail[:, None]], axis=-1)
    logits = draft(batch.tokens).reshape(-1, VOCABULARY)[batch.at]
    alone = (forward_kl(logp, buckets(logits, batch.ids)) * batch.weight).sum() / batch.weight.sum()
    assert TargetDivergence(draft, forward_kl)(draft, batch).item() == pytest.approx(alone.item(), rel=1e-5)
