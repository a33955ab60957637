"""Transformer blocks of Llama and its likes in eight CUDA kernels, where mlx-lm's take thirteen.

On CUDA a kernel costs the host some 10 us, and a round of a few tokens waits for the host (docs/measurements.md). In traced calls
(`replay`) a block's products add the residual and apply the gate, and one kernel rotates and writes (`rotation`). Blocks of other
families, with quantised layers, LoRA layers or biases behind the residual run as they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from service.engine import attention, products
from service.engine.attention import RowCall
from service.engine.kv.cache import RowLayer
from service.engine.products import FewTokenLinear
from service.engine.rotation import Rotation, rotation

FAMILIES = ("llama", "qwen2", "qwen3")
"""Modules of mlx_lm.models whose TransformerBlock is input_layernorm, self_attn, post_attention_layernorm and mlp, with a gated
silu, and adds twice. Qwen 2 has biases of queries, keys and values; Qwen 3 normalises queries and keys."""


class FewTokenBlock:
    """Mixin in front of a block's class. Parameters are the block's."""

    def __call__(self, x: mx.array, mask: object = None, cache: object = None) -> mx.array:
        """x (B, N, hidden): the same."""
        if products.inside() and isinstance(cache, RowLayer) and (out := _by_kernels(self, x, mask, cache)) is not None:
            return out
        return cast("Any", super()).__call__(x, mask, cache)


def route(model: nn.Module) -> None:
    """Make a model's blocks ready for `products.by_kernel`, in place."""
    for module in model.modules():
        kind = type(module)
        if kind.__name__ == "TransformerBlock" and kind.__module__ in [f"mlx_lm.models.{name}" for name in FAMILIES]:
            module.__class__ = _class_of(kind)


@cache
def _class_of(kind: type[nn.Module]) -> type[nn.Module]:
    if issubclass(kind, FewTokenBlock):
        return kind
    return type(kind.__name__, (FewTokenBlock, kind), {"__module__": kind.__module__})


def _by_kernels(block: Any, x: mx.array, mask: object, cache: RowLayer) -> mx.array | None:
    """The block's output; None, and nothing is done, where a part of it is not what the kernels compute."""
    own, mlp = block.self_attn, block.mlp
    reading = [own.q_proj, own.k_proj, own.v_proj]
    rest = [own.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if any(type(layer) is not FewTokenLinear for layer in (*reading, *rest)) or any("bias" in layer for layer in rest):
        return None
    through, gate, up, down = weights = [cast("mx.array", layer.weight) for layer in rest]
    rows, count, _ = x.shape
    call, turning = cache.call_in_place(mask), rotation(own.rope, own.q_proj.weight.shape[0] // own.n_heads)
    if call is None or turning is None or not attention.fits(count, x.dtype, call):
        return None
    if not all(
        products.takes(rows * count, x.dtype, weight) for weight in (*weights, *(each.weight for each in reading))
    ):
        return None
    queries, keys, values = _projected(own, reading, block.input_layernorm(x))
    rotated, call = cache.append_rotated(queries, keys, values, turning, call)
    attended = attention.by_tokens(rotated, call, scale=own.scale)
    (hidden,) = products.few_tokens(attended, [through], added=x)
    gated = products.few_tokens_gated(block.post_attention_layernorm(hidden), gate, up)
    return products.few_tokens(gated, [down], added=hidden)[0]


def _projected(own: Any, layers: list[FewTokenLinear], x: mx.array) -> list[mx.array]:
    """Queries, keys and values (B, N, heads, dims) of x (B, N, hidden)."""
    heads = (own.n_heads, own.n_kv_heads, own.n_kv_heads)
    weights = [cast("mx.array", layer["weight"]) for layer in layers]
    shapes = [(*x.shape[:2], many, weight.shape[0] // many) for many, weight in zip(heads, weights, strict=True)]
    made = products.few_tokens(x, weights, shapes=shapes)
    biases = [cast("mx.array | None", layer.get("bias")) for layer in layers]
    queries, keys, values = (
        out if bias is None else out + bias.reshape(out.shape[2:]) for out, bias in zip(made, biases, strict=True)
    )
    return [own.q_norm(queries), own.k_norm(keys), values] if "q_norm" in own else [queries, keys, values]
