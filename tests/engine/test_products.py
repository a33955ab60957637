"""Products of a few tokens: which go through the kernel, and what it computes."""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from numpy.typing import NDArray

from service.engine import products
from service.engine.folding import as_served
from service.engine.kernels import shared_memory
from service.engine.low_rank import add_low_rank
from service.learning import lora
from tests.support.cuda import NEEDS_CUDA
from tests.support.oracle import tiny_llama


def arrays(*sizes: tuple[int, ...], kind: mx.Dtype) -> list[mx.array]:
    random = np.random.default_rng(0)
    return [mx.array(random.normal(size=size).astype(np.float32)).astype(kind) for size in sizes]


def exact(x: mx.array, weight: mx.array) -> NDArray[np.float64]:
    one, other = (np.array(each.astype(mx.float32)).astype(np.float64) for each in (x, weight))
    return one @ other.T


@NEEDS_CUDA
@pytest.mark.parametrize("kind", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "outputs", "inner"),
    [
        (1, [16], 64),
        (5, [576, 192, 192], 1536),
        (16, [1536, 1536], 576),
        (31, [48], 12288),
        (50, [1536], 576),
        (64, [96, 32, 64], 576),
        (64, [80, 48], 640),
        (9, [50, 7, 130], 128),
        (40, [100, 1], 4608),
    ],
)
def test_by_the_kernel(tokens: int, outputs: list[int], inner: int, kind: mx.Dtype) -> None:
    x, *weights = arrays((1, tokens, inner), *((n, inner) for n in outputs), kind=kind)
    for found, weight in zip(products.few_tokens(x, [(weight,) for weight in weights]), weights, strict=True):
        wanted = exact(x, weight)
        assert found.shape == wanted.shape
        error = np.linalg.norm(np.array(found.astype(mx.float32)) - wanted) / np.linalg.norm(wanted)
        assert error < {mx.float16: 5e-4, mx.bfloat16: 4e-3}[kind]


@NEEDS_CUDA
@pytest.mark.parametrize("kind", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("group", products.GROUPS)
@pytest.mark.parametrize(
    ("tokens", "outputs", "inner"),
    [
        (1, [24], 256),
        (7, [576, 192, 192], 1536),
        (16, [100, 1], 4608),
        (31, [48], 12288),
        (40, [130], 512),
        (64, [80, 48], 768),
    ],
)
def test_weights_of_four_bits_by_the_kernel(
    tokens: int, outputs: list[int], inner: int, group: int, kind: mx.Dtype
) -> None:
    x, *whole = arrays((1, tokens, inner), *((n, inner) for n in outputs), kind=kind)
    weights = [mx.quantize(each, group_size=group, bits=4) for each in whole]
    assert all(products.fits(x, weight) for weight in weights)
    for found, weight in zip(products.few_tokens(x, weights), weights, strict=True):
        wanted = exact(x, mx.dequantize(*weight, group_size=group, bits=4))
        assert found.shape == wanted.shape
        error = np.linalg.norm(np.array(found.astype(mx.float32)) - wanted) / np.linalg.norm(wanted)
        assert error < {mx.float16: 1e-3, mx.bfloat16: 8e-3}[kind]


@NEEDS_CUDA
@pytest.mark.parametrize("kind", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [8, 16, 32])
@pytest.mark.parametrize(
    ("tokens", "outputs", "inner"),
    [
        (1, [24], 256),
        (1, [2048, 1024, 1024], 1024),
        (7, [576, 192, 192], 1536),
        (31, [50, 7], 3072),
        (64, [80, 48], 768),
    ],
)
def test_low_rank_products_by_the_kernel(
    tokens: int, outputs: list[int], inner: int, rank: int, kind: mx.Dtype
) -> None:
    x, *whole = arrays((1, tokens, inner), *((n, inner) for n in outputs), kind=kind)
    downs, ups = arrays((len(outputs) * rank, inner), kind=kind), arrays(*((n, rank) for n in outputs), kind=kind)
    weights = [mx.quantize(each, group_size=64, bits=4) for each in whole]
    low_ranks = [(downs[0][i * rank : (i + 1) * rank], 0.2 * up) for i, up in enumerate(ups)]
    made = products.few_tokens(x, weights, low_ranks)
    for found, weight, (down, up) in zip(made, weights, low_ranks, strict=True):
        factors = exact(x, down)
        wanted = exact(x, mx.dequantize(*weight, group_size=64, bits=4)) + factors @ np.array(up.astype(mx.float32)).T
        assert found.shape == wanted.shape
        error = np.linalg.norm(np.array(found.astype(mx.float32)) - wanted) / np.linalg.norm(wanted)
        assert error < {mx.float16: 1e-3, mx.bfloat16: 8e-3}[kind]


@NEEDS_CUDA
def test_a_tokens_product_has_the_same_bits_whatever_it_is_computed_with() -> None:
    x, *whole, down, up = arrays((64, 1536), (96, 1536), (64, 1536), (16, 1536), (96, 16), kind=mx.bfloat16)
    quantised = [mx.quantize(each, group_size=64, bits=4) for each in whole]
    adapted = [(down, up), (down, up[:64])]
    for (one, other), low in (([(each,) for each in whole], []), (quantised, []), (quantised, adapted)):
        together = products.few_tokens(x, [one], low[:1])[0]
        for tokens in (1, 2, 7, 16, 33, 60):
            alone = products.few_tokens(x[:tokens], [one], low[:1])[0]
            beside = products.few_tokens(x[:tokens], [other, one], low[::-1])[1]
            for found in (alone, beside):
                assert mx.array_equal(found, together[:tokens]).item()


def architecture(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": name})
    products.tilings.cache_clear()


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    architecture(monkeypatch, "sm_90")
    yield
    products.tilings.cache_clear()


@pytest.mark.parametrize(("name", "most"), [("sm_80", 64), ("sm_89", 32), ("sm_90", 64), ("sm_120", 32)])
@pytest.mark.usefixtures("h200")
def test_a_block_takes_no_more_shared_memory_than_there_is(
    monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    architecture(monkeypatch, name)
    for tiles, (deep, stages) in products.tilings().items():
        assert products.stages_bytes(tiles, deep, stages) <= shared_memory() < 2 * products.stages_bytes(8, 6, 2)
    for tiles, (deep, stages) in products.tilings(quantised=True).items():
        assert products.stages_bytes(tiles, deep, stages, quantised=True) <= shared_memory()
        for rank in range(0, products.MAX_RANK + 1, 8):
            sums = products.WARPS * 16 * -(-tiles // 2) * (8 * deep + rank + 1) * 4
            assert sums <= products.block_bytes(tiles, rank, quantised=True) <= shared_memory()
    weight = mx.zeros((16, 64), dtype=mx.bfloat16)
    assert products.most_tokens() == most
    assert products.fits(mx.zeros((most, 64), dtype=mx.bfloat16), (weight,))
    assert not products.fits(mx.zeros((most + 1, 64), dtype=mx.bfloat16), (weight,))


@pytest.mark.parametrize(
    ("x", "weight", "kind", "fits"),
    [
        ((1, 5, 64), (16, 64), mx.bfloat16, True),
        ((2, 8, 64), (16, 64), mx.float16, True),
        ((1, 1, 64), (16, 64), mx.bfloat16, True),
        ((8, 8, 64), (16, 64), mx.bfloat16, True),
        ((1, 65, 64), (16, 64), mx.bfloat16, False),
        ((1, 5, 96), (16, 96), mx.bfloat16, False),
        ((1, 5, 64), (23, 64), mx.bfloat16, True),
        ((1, 5, 64), (16, 64), mx.float32, False),
    ],
)
@pytest.mark.usefixtures("h200")
def test_what_fits(x: tuple[int, ...], weight: tuple[int, int], kind: mx.Dtype, fits: bool) -> None:
    assert products.fits(mx.zeros(x, dtype=kind), (mx.zeros(weight, dtype=kind),)) == fits


@pytest.mark.parametrize(
    ("tokens", "inner", "group", "kind", "fits"),
    [
        (4, 256, 64, mx.bfloat16, True),
        (4, 256, 128, mx.float16, True),
        (4, 64, 32, mx.bfloat16, True),
        (4, 192, 64, mx.bfloat16, False),
        (4, 128, 128, mx.bfloat16, False),
        (65, 256, 64, mx.bfloat16, False),
        (4, 256, 64, mx.float32, False),
    ],
)
@pytest.mark.usefixtures("h200")
def test_what_fits_of_weights_of_four_bits(tokens: int, inner: int, group: int, kind: mx.Dtype, fits: bool) -> None:
    weight = mx.quantize(mx.zeros((16, inner), dtype=kind), group_size=group, bits=4)
    assert products.fits(mx.zeros((tokens, inner), dtype=kind), weight) == fits


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the kernel is not: how many matrices each of its calls multiplies with."""
    counts: list[int] = []

    def few_tokens(
        x: mx.array, weights: Sequence[products.Weight], low_ranks: Sequence[products.LowRank]
    ) -> list[mx.array]:
        counts.append(len(weights))
        whole = [weight[0] if len(weight) == 1 else mx.dequantize(*weight, group_size=32, bits=4) for weight in weights]
        for i, (down, up) in enumerate(low_ranks):
            whole[i] = whole[i] + up @ down
        return [x @ weight.T for weight in whole]

    monkeypatch.setattr(products, "few_tokens", few_tokens)
    monkeypatch.setattr(products, "fits", lambda x, weight: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    return counts


@pytest.mark.parametrize("bits", [None, 4], ids=["whole", "quantised"])
def test_siblings_are_multiplied_together(bits: int | None, noted: list[int]) -> None:
    model, tokens = tiny_llama(0), mx.array([[5, 6, 7]])
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    before, layers = model(tokens), len(model.layers)
    products.route(model)
    # MLX on CUDA multiplies quantised weights in less precision.
    close = 1e-2 if bits and not (mx.default_device().type == mx.cpu or mx.metal.is_available()) else 1e-5
    with products.by_kernel():
        assert mx.allclose(model(tokens), before, atol=close).item()
    # Queries, keys and values; attention's output; gate and up; down. Then the head.
    assert noted == [3, 1, 2, 1] * layers + [1]


@pytest.mark.parametrize("rank", [4, 40])
def test_low_rank_products_are_added_in_the_kernel_up_to_some_rank(rank: int, noted: list[int]) -> None:
    model, tokens = tiny_llama(0), mx.array([[5, 6, 7]])
    nn.quantize(model, group_size=32, bits=4)
    lora.wrap(model, rank=rank, scale=2.0, seed=0)
    for i, (name, array) in enumerate(lora.weights_of(model).items()):
        model.load_weights([(name, 0.1 * mx.random.normal(array.shape, key=mx.random.key(i)))], strict=False)
    served = as_served(model, None)
    before, layers = served(tokens), len(model.layers)
    products.route(served)
    with products.by_kernel():
        assert mx.allclose(served(tokens), before, atol=1e-3).item()
    assert noted == [3, 1, 2, 1] * layers + [1], "one launch for queries, keys and values, as without an adapter"


def test_a_layer_with_an_adapter_is_not_multiplied_with_a_sibling_without(noted: list[int]) -> None:
    model = tiny_llama(0)
    nn.quantize(model, group_size=32, bits=4)
    attention: Any = model.layers[0].self_attn
    add_low_rank([attention.k_proj], [mx.ones((32, 8))], [mx.ones((8, 16))])
    products.route(attention)
    x = mx.random.normal((1, 3, 32))
    with products.by_kernel():
        for name in ("q_proj", "k_proj", "v_proj"):
            attention[name](x)
    assert noted == [2, 1]


def test_a_sibling_with_another_input_is_multiplied_by_itself(noted: list[int]) -> None:
    attention: Any = tiny_llama(0).layers[0].self_attn
    products.route(attention)
    x, other = mx.random.normal((2, 1, 3, 32))
    with products.by_kernel():
        attention.q_proj(x)
        assert mx.allclose(attention.k_proj(other), other @ attention.k_proj.weight.T, atol=1e-5).item()
        assert mx.allclose(attention.v_proj(x), x @ attention.v_proj.weight.T, atol=1e-5).item()
    assert noted == [3, 1]


def test_weights_of_other_numbers_of_bits_are_left_to_mlx(noted: list[int]) -> None:
    model, tokens = tiny_llama(0), mx.array([[5, 6, 7]])
    nn.quantize(model, group_size=32, bits=8)
    before = model(tokens)
    products.route(model)
    with products.by_kernel():
        assert mx.array_equal(model(tokens), before).item()
    assert not noted


def test_a_layer_that_is_quantised_otherwise_than_its_sibling_is_multiplied_by_itself(noted: list[int]) -> None:
    attention: Any = tiny_llama(0, hidden=64).layers[0].self_attn
    attention.q_proj = attention.q_proj.to_quantized(group_size=32, bits=4)
    products.route(attention)
    x = mx.random.normal((1, 3, 64))
    with products.by_kernel():
        for name in ("q_proj", "k_proj", "v_proj"):
            attention[name](x)
    assert noted == [1, 2]


def test_a_routed_model_computes_what_it_did_and_can_be_adapted() -> None:
    model, tokens = tiny_llama(0), mx.array([[5, 6, 7]])
    before, names = model(tokens), [name for name, _ in model.named_modules()]
    products.route(model)
    with products.by_kernel():
        assert mx.array_equal(model(tokens), before).item()
    linear = model.layers[0].self_attn.q_proj
    assert isinstance(linear, products.FewTokenLinear)
    assert isinstance(linear, nn.Linear)
    assert [name for name, _ in model.named_modules()] == names
