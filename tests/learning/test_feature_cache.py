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
from service.learning.batches import TokenRows, batches
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


def rows_of(head: Head, texts: Sequence[Sequence[int]]) -> list[mx.array]:
    read = TokenRows.of(texts)
    found = head.features_of(read.tokens, read.lengths)
    return [row[:length] for row, length in zip(found, read.lengths, strict=True)]


def test_a_text_has_the_same_features_in_every_batch(target: Target) -> None:
    head, alone = bound(target, PLENTY), bound(target, None)
    texts = [list(range(4, 4 + n)) for n in (3, 31, 40, 70)] + [[5, 0, 0], [5], [5, 0]]
    for chosen in ([0, 1], [1, 2, 0], [3, 0], [2, 4, 5, 6], range(7)):
        some = [texts[i] for i in chosen]
        for found, text in zip(rows_of(head, some), some, strict=True):
            assert found.shape[0] == len(text)
            assert mx.allclose(found, alone.features(mx.array([text]))[0], atol=1e-5).item()
    assert target.rows == len(texts) + sum(map(len, ([0, 1], [1, 2, 0], [3, 0], [2, 4, 5, 6], range(7))))


def test_no_more_bytes_than_allowed(target: Target) -> None:
    size = target.args.hidden_size
    head = bound(target, 4 * 32 * size * 2)
    for _ in range(3):
        rows_of(head, [[5, 6, 7], [8, 9]])
        rows_of(head, [[10, 11]])
    # Two rows of 32 tokens are what it holds.
    assert target.rows == 2 + 3


def test_epochs_and_scores_read_the_target_once(target: Target) -> None:
    texts = with_targets(target, random_texts(10, seed=3), VOCABULARY)
    held_out = answers(target)
    losses, calls = list[tuple[float, ...]](), list[np.ndarray]()
    for limit in (None, PLENTY):
        head = bound(target, limit)
        examples = build(texts, max_length=24, reject_weight=1.0, vocabulary=VOCABULARY).examples
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
    examples = build(texts, max_length=24, reject_weight=1.0, vocabulary=VOCABULARY).examples
    cached, alone = bound(target, PLENTY), bound(target, None)
    for seed in range(2):
        for batch in batches(examples, 3, seed):
            here = batch.at[: int((np.array(batch.weight) > 0).sum())]
            for mine, theirs in zip(
                *(window_states(head, None, batch, LEARNT_STEPS) for head in (cached, alone)), strict=True
            ):
                assert mx.allclose(mine[here], theirs[here], atol=1e-4).item()
