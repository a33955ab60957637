"""Adapters of quantised drafts: what their layers compute, what a step reads, and that they can be switched and taken back."""

from functools import cache
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import qwen3

from service.core import Prompt, Sampling
from service.engine.adapters import Draft, bare
from service.engine.decoder import Decoder
from service.engine.folding import adapter_bytes, as_served
from service.engine.footprint import weight_bytes
from service.engine.low_rank import LowRankQuantizedLinear
from service.engine.request import Request
from service.learning import lora
from tests.support.oracle import naive, noisy_copy, tiny_llama
from tests.support.typed import layers_of, leaves

TOKENS = mx.array([[5, 6, 7, 8]])


def quantised(kind: mx.Dtype = mx.float32, mode: str = "affine") -> nn.Module:
    model = noisy_copy(tiny_llama(1, hidden=64), 2, 0.05)
    model.set_dtype(kind)
    nn.quantize(model, group_size=32, bits=4, mode=mode)
    return model


def with_lora(model: nn.Module, rank: int = 4, scale: float = 1.7) -> nn.Module:
    """The model itself, with LoRA layers whose matrices are random."""
    lora.wrap(model, rank=rank, scale=scale, seed=0)
    noise = [
        (name, 0.1 * mx.random.normal(a.shape, key=mx.random.key(i)))
        for i, (name, a) in enumerate(leaves(model.trainable_parameters()))
    ]
    model.load_weights(noise, strict=False)
    return model


def distance(one: mx.array, other: mx.array) -> float:
    """Of logits, as a share of the other's norm."""
    a, b = (np.array(each.astype(mx.float32)) for each in (one, other))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("rank", [1, 4, 8, 40])
@pytest.mark.parametrize(("kind", "close"), [(mx.float32, 1e-5), (mx.bfloat16, 0.03)], ids=["float32", "bfloat16"])
def test_the_adapter_keeps_its_effect_beside_four_bits(rank: int, kind: mx.Dtype, close: float) -> None:
    base = quantised(kind)
    before, kept = base(TOKENS), {name: id(array) for name, array in leaves(base.parameters())}
    trained = with_lora(base, rank)
    served = as_served(trained, None)
    assert distance(served(TOKENS), trained(TOKENS)) < close
    assert distance(before, trained(TOKENS)) > 0.2, "the adapter does something"
    assert served(TOKENS).dtype == kind
    own = {name: id(array) for name, array in leaves(served.parameters())}
    assert kept.items() <= own.items(), "the quantised weights are the base's own"
    kinds = [type(module) for module in layers_of(served)[0].modules() if isinstance(module, nn.QuantizedLinear)]
    assert kinds == [LowRankQuantizedLinear] * 7
    assert {each.dtype for name, each in leaves(served.parameters()) if name.endswith((".up", ".down"))} == {kind}


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
def test_weights_whose_scales_have_eight_bits_keep_their_bits_too(mode: str) -> None:
    model = noisy_copy(tiny_llama(1, hidden=64), 2, 0.05)
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=16 if mode == "nvfp4" else 32, bits=4, mode=mode)
    trained = with_lora(model)
    served = as_served(trained, None)
    layer: Any = layers_of(served)[0]
    assert type(layer.mlp.down_proj) is LowRankQuantizedLinear and layer.mlp.down_proj.up.dtype == mx.bfloat16
    assert distance(served(TOKENS), trained(TOKENS)) < 0.05


def test_siblings_share_one_product_of_the_same_input() -> None:
    trained = with_lora(quantised())
    attention: Any = layers_of(as_served(trained, None))[0].self_attn
    wanted: Any = layers_of(trained)[0].self_attn
    assert attention.q_proj.down is attention.k_proj.down is attention.v_proj.down
    assert attention.o_proj.down is not attention.q_proj.down
    held: Any = attention.q_proj._shared
    x, other = mx.random.normal((2, 1, 3, 64), key=mx.random.key(1))
    for name, given in (("q_proj", x), ("v_proj", other), ("k_proj", x), ("q_proj", x)):
        assert mx.allclose(attention[name](given), wanted[name](given), atol=1e-4).item(), "whatever the others got"
    first = held._held[1]
    assert mx.allclose(attention.v_proj(x), wanted.v_proj(x), atol=1e-4).item()
    assert first.shape == (1, 3, 24), "of three layers, each rank padded to eight"
    assert held._held is None, "an array that is kept would keep its graph"


def test_a_layer_keeps_its_bias() -> None:
    linear = nn.Linear(64, 32)
    holder = nn.Module()
    holder.layers = [nn.Module()]
    holder.layers[0].q_proj = linear.to_quantized(group_size=32, bits=4)
    trained = with_lora(holder)
    x = mx.random.normal((2, 64), key=mx.random.key(1))
    one, other = (cast("Any", layers_of(model)[0]) for model in (as_served(trained, None), trained))
    assert mx.allclose(one.q_proj(x), other.q_proj(x), atol=1e-4).item()


@cache
def qwen3_06b() -> nn.Module:
    """Qwen3-0.6B at 4 bits, of which no weight is ever computed."""
    config = qwen3.ModelArgs(
        model_type="qwen3",
        hidden_size=1024,
        num_hidden_layers=28,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_theta=1e6,
        tie_word_embeddings=True,
    )
    model = qwen3.Model(config)
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=64, bits=4)
    return model


def test_a_step_with_an_adapter_reads_a_tenth_more_at_most() -> None:
    """All weights are read in a step: the embedding is the head too."""
    base = qwen3_06b()
    before = weight_bytes(base)
    expected = adapter_bytes(base, 16)
    assert 330e6 < before < 340e6, "as published"
    served = as_served(_with_zero_lora(base), None)
    after = weight_bytes(served)
    assert before < after < 1.1 * before
    assert after - before == expected, "what is left free for it"


def _with_zero_lora(base: nn.Module) -> nn.Module:
    lora.wrap(base, rank=16, scale=2.0, seed=0)
    return base


def test_an_adapter_of_an_unquantised_draft_adds_a_copy_of_its_matrices() -> None:
    base = tiny_llama(1, hidden=64)
    matrices = sum(array.nbytes for name, array in leaves(base.parameters()) if "_proj" in name)
    assert adapter_bytes(base, 4) == matrices


def test_switching_to_an_adapter_and_back_changes_no_text() -> None:
    """Rows are decoded by the base draft, by one with an adapter, and by the base again."""
    target, base = tiny_llama(0, hidden=64), quantised()
    adapted = Draft(1, as_served(with_lora(quantised()), None))
    first = bare(base)
    before = base(TOKENS)
    decoder = Decoder(target, first, vocabulary=97, k=3, key=mx.random.key(0))
    tokens = tuple(4 + i for i in range(20))
    request = Request("0", Prompt(tokens, Sampling(max_tokens=48)), frozenset(), None)
    decoder.admit(request)
    used: list[int] = []
    for i in range(60):
        if not decoder.rows:
            break
        decoder.switch((adapted, first)[i // 3 % 2])
        report = decoder.round()
        used += [each.adapter for each in report.rounds]
    assert list(request.tokens)[len(tokens) :] == naive(target, tokens, Sampling(max_tokens=48))
    assert {0, 1} <= set(used)
    assert mx.array_equal(base(TOKENS), before), "taken back, it is the base draft"
