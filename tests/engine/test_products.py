"""Products of a few tokens: which go through the kernel, and what it computes."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from service.engine import products
from tests.support.oracle import tiny_llama


@pytest.mark.skipif(mx.default_device().type == mx.cpu or mx.metal.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "outputs", "inner"), [(2, 16, 64), (5, 576, 1536), (16, 1536, 576), (31, 48, 12288)]
)
def test_by_the_kernel(tokens: int, outputs: int, inner: int, kind: mx.Dtype) -> None:
    random = np.random.default_rng(0)
    x, weight = (
        mx.array(random.normal(size=size).astype(np.float32)).astype(kind)
        for size in ((1, tokens, inner), (outputs, inner))
    )
    wanted = np.array(x.astype(mx.float32)).astype(np.float64) @ np.array(weight.astype(mx.float32)).T.astype(
        np.float64
    )
    found = np.array(products.few_tokens(x, weight).astype(mx.float32))
    assert found.shape == (1, tokens, outputs)
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < {mx.float16: 5e-4, mx.bfloat16: 4e-3}[kind]


@pytest.mark.parametrize(
    ("x", "weight", "kind", "fits"),
    [
        ((1, 5, 64), (16, 64), mx.bfloat16, True),
        ((2, 8, 64), (16, 64), mx.float16, True),
        ((1, 1, 64), (16, 64), mx.bfloat16, False),
        ((1, 17, 64), (16, 64), mx.bfloat16, False),
        ((1, 5, 96), (16, 96), mx.bfloat16, False),
        ((1, 5, 64), (24, 64), mx.bfloat16, False),
        ((1, 5, 64), (16, 64), mx.float32, False),
    ],
)
def test_what_fits(x: tuple[int, ...], weight: tuple[int, int], kind: mx.Dtype, fits: bool) -> None:
    assert products.fits(mx.zeros(x, dtype=kind), mx.zeros(weight, dtype=kind)) == fits


def test_a_routed_model_computes_what_it_did_and_can_be_adapted() -> None:
    model, tokens = tiny_llama(0), mx.array([[5, 6, 7]])
    before, names = model(tokens), [name for name, _ in model.named_modules()]
    products.route(model)
    with products.tracing():
        assert mx.array_equal(model(tokens), before).item()
    linear = model.layers[0].self_attn.q_proj
    assert isinstance(linear, products.FewTokenLinear)
    assert isinstance(linear, nn.Linear)
    assert [name for name, _ in model.named_modules()] == names
