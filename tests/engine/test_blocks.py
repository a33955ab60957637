"""Blocks in fewer kernels compute what the blocks of mlx-lm's models do. On a CPU the kernels are replaced by MLX's operations."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.rope_utils import YarnRoPE
from numpy.typing import NDArray

from service.engine import attention, blocks, products
from service.engine.attention import RowCall
from service.engine.kv import cache as kv
from service.engine.kv.cache import RowCache
from service.engine.rotation import Rotation
from service.engine.strategy import CUDA, using

ON_CPU = mx.default_device().type == mx.cpu
HIDDEN, HEADS, KV_HEADS, DIMS, VOCABULARY = 128, 4, 2, 32, 64
LENGTHS = (9, 5)
"""Positions that the rows hold."""
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}


def model_of(family: str, **more: object) -> nn.Module:
    """Two random layers in bfloat16."""
    module = cast("Any", import_module(f"mlx_lm.models.{family}"))
    arguments: dict[str, object] = {
        "model_type": family,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "intermediate_size": 192,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIMS,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        **more,
    }
    mx.random.seed(0)
    model = cast("nn.Module", module.Model(module.ModelArgs.from_dict(arguments)))
    # Larger than at their start, so that every part shows in the output; biases are zeros at first.
    scaled = [(name, 0.2 * mx.random.normal(each.shape)) for name, each in flat(model) if "norm" not in name]
    model.load_weights(scaled, strict=False)
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def flat(model: nn.Module) -> list[tuple[str, mx.array]]:
    return cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels as they are called; on a CPU MLX's operations in their place."""
    names: list[str] = []

    def few_tokens(
        x: mx.array, weights: Sequence[mx.array], *, shapes: Sequence[Sequence[int]] = (), added: mx.array | None = None
    ) -> list[mx.array]:
        flat = x.reshape(-1, weights[0].shape[1])
        made = [flat @ weight.T for weight in weights]
        if added is not None:
            return [made[0].reshape(added.shape) + added]
        return [out.reshape(shape) for out, shape in zip(made, shapes, strict=True)]

    def few_tokens_gated(x: mx.array, gate: mx.array, up: mx.array) -> mx.array:
        return nn.silu(x @ gate.T) * (x @ up.T)

    def rotate_and_write(
        new: Sequence[mx.array], keys: mx.array, values: mx.array, starts: mx.array, turning: Rotation
    ) -> tuple[mx.array, mx.array]:
        base = None if turning.periods else 2.0 ** float(turning.frequencies.item())
        periods = turning.frequencies if turning.periods else None
        queries, new_keys, new_values = (each.swapaxes(1, 2) for each in new)
        queries, new_keys = (
            mx.fast.rope(each, DIMS, traditional=False, base=base, scale=1.0, offset=starts, freqs=periods)
            for each in (queries, new_keys)
        )
        for row, start in enumerate(cast("list[int]", starts.tolist())):
            keys[row, :, start : start + new_keys.shape[2]] = new_keys[row]
            values[row, :, start : start + new_keys.shape[2]] = new_values[row]
        return queries.swapaxes(1, 2), starts

    def by_tokens(queries: mx.array, call: RowCall, *, scale: float) -> mx.array:
        return attention.masked_attention(queries.swapaxes(1, 2), call, scale=scale).swapaxes(1, 2)

    for owner, stand_in in (
        (products, few_tokens),
        (products, few_tokens_gated),
        (kv, rotate_and_write),
        (attention, by_tokens),
    ):
        name = stand_in.__name__
        run = stand_in if ON_CPU else getattr(owner, name)

        def noting(*positional: Any, name: str = name, run: Any = run, **named: Any) -> Any:
            names.append(name)
            return run(*positional, **named)

        monkeypatch.setattr(owner, name, noting)
    return names


def logits(model: nn.Module, count: int, *, by_kernel: bool) -> tuple[NDArray[np.float32], list[NDArray[np.float32]]]:
    """Of `count` tokens behind rows of LENGTHS, and the keys and values that they leave."""
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (len(LENGTHS), max(LENGTHS) + count)).astype(np.int32)
    with using(CUDA):
        cache = RowCache(model, len(LENGTHS))
        model(mx.array(tokens[:, : max(LENGTHS)]), cache=cache.layers)
        cache.truncate(LENGTHS)
        cache.reserve(count)
        for layer in cache.attention:
            layer.in_place = by_kernel
        new = mx.array(tokens[:, -count:])
        if by_kernel:
            with products.by_kernel():
                out = cast("mx.array", model(new, cache=cache.layers))
        else:
            out = cast("mx.array", model(new, cache=cache.layers))
        mx.eval(out, cache.arrays())
        held = [
            np.array(each[row, :, : length + count].astype(mx.float32))
            for each in cache.buffers()
            for row, length in enumerate(LENGTHS)
        ]
    return np.array(out.astype(mx.float32)), held


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("llama", {"rope_scaling": LLAMA_3}),
        ("qwen2", {"rope_scaling": None}),
        ("qwen3", {}),
    ],
)
@pytest.mark.parametrize("count", [1, 4])
def test_a_block_of_eight_kernels_computes_what_its_own_code_does(
    family: str, more: dict[str, object], count: int, called: list[str]
) -> None:
    model = model_of(family, **more)
    expected, keys = logits(model, count, by_kernel=False)
    products.route(model)
    blocks.route(model)
    got, written = logits(model, count, by_kernel=True)
    assert called == 2 * ["few_tokens", "rotate_and_write", "by_tokens", "few_tokens", "few_tokens_gated", "few_tokens"]
    for mine, usual in zip([got, *written], [expected, *keys], strict=True):
        assert rms(mine - usual) < 0.05 * rms(usual), (rms(mine - usual), rms(usual))


def rms(array: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.square(array).mean()))


@pytest.mark.parametrize(
    ("more", "rope"),
    [
        ({"mlp_bias": True}, None),
        ({"attention_bias": True}, None),
        ({"hidden_size": 96}, None),
        ({}, nn.RoPE(DIMS, traditional=True)),
        ({}, nn.RoPE(DIMS, scale=0.5)),
        ({}, nn.RoPE(DIMS // 2)),
        ({}, YarnRoPE(DIMS)),
    ],
)
def test_a_block_that_is_not_what_the_kernels_compute_runs_as_it_is(
    more: dict[str, object], rope: nn.Module | None, called: list[str]
) -> None:
    model = model_of("llama", **more)
    products.route(model)
    blocks.route(model)
    layer = cast("Any", model).layers[0]
    if rope is not None:
        layer.self_attn.rope = rope
    x, mask = mx.ones((1, 1, layer.hidden_size), dtype=mx.bfloat16), mx.ones((1, 1, 1, 8), dtype=mx.bool_)
    with using(CUDA):
        cache = RowCache(model, 1)
        model(mx.array([[1, 2, 3]]), cache=cache.layers)
        own = cache.attention[0]
        own.in_place = True
        own.lengths.masks[id(mask)] = (mask, mx.array([3]), 0)
        assert blocks._by_kernels(layer, x, mask, own) is None
    assert not called


def test_blocks_of_other_caches_and_outside_of_traces_run_as_they_are(called: list[str]) -> None:
    model, tokens = model_of("llama"), mx.array([[1, 2, 3, 4]])
    expected = cast("mx.array", model(tokens, cache=make_prompt_cache(model)))
    products.route(model)
    blocks.route(model)
    with products.by_kernel():
        got = cast("mx.array", model(tokens, cache=make_prompt_cache(model)))
    assert "rotate_and_write" not in called
    if ON_CPU:
        assert mx.array_equal(got, expected)
    with using(CUDA):
        assert mx.array_equal(cast("mx.array", model(tokens, cache=RowCache(model, 1).layers)), expected) or not ON_CPU
