"""Gradient checkpointing and micro-batches: the same loss and gradients as a whole batch with stored activations."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map

from service.core import Generation
from service.learning import lora
from service.learning.batches import Batch, collate
from service.learning.examples import build
from service.learning.losses import TargetDivergence
from service.learning.make.distil import Distillation, TextBatch, freeze_shared
from service.learning.recompute import recomputed_blocks
from service.learning.train import Optimiser, train
from tests.support.eagle_models import plain_llama, tiny_head
from tests.support.families import IDENTICAL, RECURRENT, V
from tests.support.families import build as build_family
from tests.support.logged_texts import VOCABULARY, random_texts, with_targets
from tests.support.oracle import noisy_copy, tiny_llama
from tests.support.typed import as_float, layers_of, leaves

FAMILIES = {**IDENTICAL, **RECURRENT}
DAILY = ("llama", "qwen3", "gemma3_text", "gemma4_text", "qwen3_moe", "lfm2", "qwen3_5")


def batch_of(texts: Sequence[Generation]) -> Batch:
    return collate(build(texts, max_length=128, vocabulary=VOCABULARY).examples)


def unlike_texts() -> list[Generation]:
    """Texts whose answers have unlike lengths, so that micro-batches of them have unlike weights."""
    return with_targets(tiny_llama(1), random_texts(7, seed=2))


def gradients_of(model: nn.Module, loss: Callable[[nn.Module, Any], mx.array], batch: Any) -> dict[str, mx.array]:
    weights = model.trainable_parameters()
    value, gradients = nn.value_and_grad(model, loss)(model, batch)
    mx.eval(value, gradients)
    model.update(weights)
    return {"loss": value, **dict(leaves(gradients))}


def assert_close(one: dict[str, mx.array], other: dict[str, mx.array], tolerance: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        largest = max(as_float(mx.abs(array).max()), 1e-6)
        assert mx.allclose(array, other[name], rtol=0, atol=tolerance * largest).item(), name


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DAILY else pytest.mark.nightly) for name in FAMILIES]
)
def test_recomputed_activations_give_the_same_gradients(name: str) -> None:
    model = build_family(name, FAMILIES[name])
    kinds = [type(block) for block in layers_of(model)]
    lora.wrap(model, rank=4, scale=2.0, seed=0)
    # Where B is 0, A has no gradient.
    model.update(tree_map(lambda a: a + 0.02 * mx.random.normal(a.shape), model.trainable_parameters()))
    tokens = mx.random.randint(0, V, (3, 24))

    def loss(model: nn.Module, tokens: mx.array) -> mx.array:
        return mx.square(model(tokens)).mean()

    model.train()
    stored = gradients_of(model, loss, tokens)
    with recomputed_blocks(model):
        recomputed = gradients_of(model, loss, tokens)
        assert all(type(block) is not each for block, each in zip(layers_of(model), kinds, strict=True))
    assert [type(block) for block in layers_of(model)] == kinds
    assert_close(stored, recomputed, 1e-4)
    assert all(as_float(mx.abs(array).max()) > 0 for array in recomputed.values())


def test_blocks_are_called_again_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(2)
    lora.wrap(model, rank=4, scale=2.0, seed=0)
    kind, calls = type(layers_of(model)[0]), list[nn.Module]()
    call = kind.__call__

    def counted(self: nn.Module, *positional: Any, **named: Any) -> mx.array:
        calls.append(self)
        return call(self, *positional, **named)

    monkeypatch.setattr(kind, "__call__", counted)
    batch = batch_of(unlike_texts())
    blocks = len(layers_of(model))
    loss = TargetDivergence(model)
    counts: list[int] = []
    for on in (False, True):
        calls.clear()
        with recomputed_blocks(model, on=on):
            gradients_of(model, loss, batch)
        counts.append(len(calls))
    assert counts == [blocks, 2 * blocks]


@pytest.mark.parametrize("kind", ["draft", "head"])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_micro_batches_make_the_update_of_the_whole_batch(kind: str, rows: int) -> None:
    def trained(rows: int | None) -> tuple[dict[str, mx.array], tuple[float, ...], float]:
        model = noisy_copy(tiny_llama(1), 2, 0.5) if kind == "draft" else tiny_head(plain_llama(1), 2)
        lora.wrap(model, rank=4, scale=2.0, seed=0)
        batches = [batch_of(unlike_texts()), batch_of(unlike_texts()[::2])]
        weights = [part.loss_weight for part in batches[0].split(2)]
        assert len(set(weights)) > 1 and sum(weights) == pytest.approx(batches[0].loss_weight)
        # Two updates: the second one's size depends on how large the first gradient was.
        report = train(
            model, batches, loss_fn=TargetDivergence(model), optimiser=Optimiser(1e-2, 2, warmup=0.0), rows=rows
        )
        return dict(leaves(model.trainable_parameters())), report.losses, report.grad_norm

    whole, losses, norm = trained(None)
    parts, parts_losses, parts_norm = trained(rows)
    assert parts_losses == pytest.approx(losses, rel=1e-5) and parts_norm == pytest.approx(norm, rel=1e-4)
    assert_close(whole, parts, 1e-3)


def test_whole_drafts_are_distilled_alike_in_micro_batches_that_recompute() -> None:
    target = tiny_llama(1)
    tokens = mx.random.randint(3, VOCABULARY, (5, 20), key=mx.random.key(4))
    written = mx.array([[1.0] * (3 * row + 1) + [0.0] * (18 - 3 * row) for row in range(5)])

    def trained(rows: int | None, recompute: bool) -> tuple[dict[str, mx.array], tuple[float, ...]]:
        model = noisy_copy(target, 2, 0.5)
        freeze_shared(model)
        batch = TextBatch(np.array(tokens, dtype=np.int32), written)
        with recomputed_blocks(model, on=recompute):
            report = train(
                model,
                [batch, batch],
                loss_fn=Distillation(target, mx.float32),
                optimiser=Optimiser(1e-2, 2, warmup=0.0),
                rows=rows,
            )
        return dict(leaves(model.trainable_parameters())), report.losses

    whole, losses = trained(None, False)
    parts, parts_losses = trained(2, True)
    assert parts_losses == pytest.approx(losses, rel=1e-5)
    assert_close(whole, parts, 1e-3)
