"""Features of texts: computed once, the same as without a cache, whatever batches the texts come in."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.llama import Model

from service.core import Generation, Sampling
from service.engine.folding import as_served
from service.learning import lora
from service.learning.batches import batches
from service.learning.draft_steps import LEARNT_STEPS, window_states
from service.learning.examples import build
from service.learning.losses import TargetDivergence
from service.learning.scoring.score import score
from service.learning.train import Optimiser, train
from service.models.eagle import Model as Head
from service.models.feature_cache import FeatureCache
from tests.support.eagle_models import plain_llama, tiny_head
from tests.support.logged_texts import VOCABULARY, random_texts, served, with_targets
from tests.support.oracle import tiny_llama

PLENTY = 2**30


class Target(Model):
    """Counts the rows of its calls."""

    rows = 0

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        self.rows += inputs.shape[0]
        return super().__call__(inputs, cache, input_embeddings)


@pytest.fixture
def target() -> Target:
    model = plain_llama(1)
    model.__class__ = Target
    assert isinstance(model, Target)
    return model


def bound(target: Target, limit: int | None) -> Head:
    """A head with a cache of `limit` bytes; None: without."""
    head = tiny_head(target, 2)
    head.bind(target, None if limit is None else FeatureCache(limit))
    target.rows = 0
    return head


def answers(target: Target) -> list[Generation]:
    return served(target, tiny_llama(5), [Sampling(max_tokens=n) for n in (3, 9, 24, 24, 17, 30)], k=0)


def of(head: Head, texts: Sequence[Sequence[int]], starts: Sequence[int], length: int) -> mx.array:
    return head.features_of([np.array(text, dtype=np.int32) for text in texts], starts, length)


TEXTS = [list(range(4, 4 + n)) for n in (3, 31, 40, 70)] + [[5, 0, 0], [5], [5, 0]]


@pytest.mark.parametrize("tokens", [2048, 64])
def test_a_text_has_the_same_features_in_every_batch(
    target: Target, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.models.padding.TOKENS", tokens)
    head, alone = bound(target, PLENTY), bound(target, None)
    wanted = [alone.features(mx.array([text]))[0] for text in TEXTS]
    target.rows = 0
    for chosen in ([0, 1], [1, 2, 0], [3, 0], [2, 4, 5, 6], range(7)):
        found = of(head, [TEXTS[i] for i in chosen], [0] * len(chosen), 64)
        assert found.shape[:2] == (len(chosen), 64)
        for row, i in zip(found, chosen, strict=True):
            here = min(len(TEXTS[i]), 64)
            assert mx.allclose(row[:here], wanted[i][:here], atol=1e-5).item()
            assert (row[here:] == 0).all().item()
    assert target.rows == len(TEXTS)


def test_a_window_reads_from_its_place_on(target: Target) -> None:
    head, alone = bound(target, PLENTY), bound(target, None)
    (wanted,) = alone.features(mx.array([TEXTS[3]]))
    target.rows = 0
    for start in (0, 50, 50, 20):
        (found,) = of(head, [TEXTS[3]], [start], 32)
        there = wanted[start : start + 32]
        assert mx.allclose(found[: len(there)], there, atol=1e-5).item()
    assert target.rows == 3


def test_no_more_bytes_than_allowed(target: Target) -> None:
    cache = FeatureCache(9 * target.args.hidden_size * 4)
    head = bound(target, None)
    head.bind(target, cache)
    target.rows = 0
    for _ in range(3):
        of(head, [[5, 6, 7], [8, 9, 10, 11]], [0, 0], 32)
        of(head, [[12, 13, 14]], [0], 32)
    # Seven tokens are what it holds, where nine would fit: nothing of a text's padding, and no part of a text.
    assert (target.rows, cache.size) == (2 + 3, 7 * target.args.hidden_size * 4)
    head.clear_features()
    assert cache.size == 0
    of(head, [[12, 13, 14]], [0], 32)
    assert cache.size == 3 * target.args.hidden_size * 4


def test_a_long_text_is_computed_by_itself(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.models.padding.TOKENS", 128)
    calls = list[tuple[int, ...]]()
    head = bound(target, PLENTY)
    features = head.features

    def watched(tokens: mx.array) -> mx.array:
        calls.append(tokens.shape)
        return features(tokens)

    object.__setattr__(head, "features", watched)
    of(head, [list(range(90)), [5], [6, 7], list(range(40)), [8]], [0] * 5, 32)
    assert calls == [(3, 32), (1, 64), (1, 96)]


def test_epochs_and_scores_read_the_target_once(target: Target) -> None:
    texts = with_targets(target, random_texts(10, seed=3), VOCABULARY)
    held_out = answers(target)
    losses, calls = list[tuple[float, ...]](), list[np.ndarray]()
    for limit in (None, PLENTY):
        head = bound(target, limit)
        examples = build(texts, max_length=24, vocabulary=VOCABULARY).examples
        lora.wrap(head, rank=4, scale=2.0, seed=0)
        epochs = [batch for seed in range(3) for batch in batches(examples, 3, seed)]
        report = train(head, epochs, loss_fn=TargetDivergence(head), optimiser=Optimiser(1e-3, len(epochs)))
        losses.append(report.losses)
        learnt = target.rows
        assert learnt == len(examples) * (3 if limit is None else 1)
        scored = [score(as_served(head, ids), held_out, k=3, vocabulary=VOCABULARY) for ids in (None, range(60))]
        calls.append(np.array([[one.calls for one in found] for found in scored]))
        assert target.rows - learnt == len(held_out) * (2 if limit is None else 1)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert np.allclose(calls[0], calls[1])


def test_a_window_reads_the_features_of_its_place(target: Target) -> None:
    texts = with_targets(target, random_texts(8, seed=3), VOCABULARY)
    examples = build(texts, max_length=24, vocabulary=VOCABULARY).examples
    cached, alone = bound(target, PLENTY), bound(target, None)
    for seed in range(2):
        for batch in batches(examples, 3, seed):
            here = batch.at[: int((np.array(batch.weight) > 0).sum())]
            for mine, theirs in zip(
                *(window_states(head, None, batch, LEARNT_STEPS) for head in (cached, alone)), strict=True
            ):
                assert mx.allclose(mine[here], theirs[here], atol=1e-4).item()
