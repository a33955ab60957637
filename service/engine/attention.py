"""Attention of a few new tokens a row over rows of unlike lengths: a CUDA kernel of our own.

MLX on CUDA hands attention under a mask to cuDNN, which makes a plan for every new shape, 35 to 50 ms each
(mlx/backend/cuda/scaled_dot_product_attention.cpp, `sdpa_cudnn`), and its own vector kernel takes no masks. This kernel takes
each row's length instead of a mask, and any shape. Metal's kernels take masks of any shape
(mlx/backend/metal/scaled_dot_product_attention.cpp).

mlx-lm's models call `scaled_dot_product_attention` of `mlx_lm.models.base`, which they import by name: `route` puts a function
in its place that hands on whatever is not a call of this kind.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from service.engine.kernels import cuda_kernel

MOST, LONG = 256, 4096
"""New tokens a row; over rows of more than LONG positions only FEW: cuDNN reads such prompts faster, which repays its plans."""
FEW = 32
_ROUTED = "attention_is_routed"
"""Attribute of a model: what `route` has found."""
QUERIES = 16
"""Queries of a block (tokens times query heads that share one head of keys and values): the rows of a tensor core's product."""
WIDEST = 128
"""Dimensions of values that a block accumulates at most."""
THREADS = 256
"""Of a block, whose 8 warps take 16 keys each at a time."""
SPLIT_FROM = 1024
"""Positions from which a row's keys are shared among several blocks, whose results a second kernel merges."""
SPLIT_KEYS = 256
"""Positions of such a share at least."""
BLOCKS = 512
"""Blocks that keep a large GPU busy (an H200 has 132 multiprocessors)."""


@cache
def _kernel(split: bool) -> Any:
    inputs, outputs = ["queries", "keys", "values", "starts", "scale", "sinks", "written"], ["out", "sums", "tops"]
    return cuda_kernel("row_attention", inputs, outputs if split else outputs[:1], strided=True, SPLIT=int(split))


@cache
def _merge() -> Any:
    return cuda_kernel("row_attention_merge", ["parts", "sums", "tops"], ["out"])


@cache
def _scale(value: float) -> mx.array:
    return mx.array([value], dtype=mx.float32)


@dataclass(frozen=True, slots=True)
class RowCall:
    """What the newest N tokens of B rows attend to: keys (R, heads, capacity, dims) and values (R, heads, capacity, width),
    R >= B. starts: (B,), int32, the position of each row's first query. window: latest positions that a query sees, its own
    among them; 0: all up to its own. written: what `write_in_place` returned, where it has written the keys."""

    keys: mx.array
    values: mx.array
    starts: mx.array
    window: int = 0
    written: mx.array | None = None


def fits(queries: mx.array, call: RowCall) -> bool:
    """Whether the kernel computes calls of such arrays: half precision, up to 256 dimensions of keys, no long prefill."""
    dims, width = call.keys.shape[3], call.values.shape[3]
    same = queries.dtype == call.keys.dtype == call.values.dtype
    if queries.shape[2] > (MOST if call.keys.shape[2] <= LONG else FEW):
        return False
    return same and queries.dtype in (mx.bfloat16, mx.float16) and dims % 16 == 0 and dims <= 256 and width % 16 == 0


def row_attention(queries: mx.array, call: RowCall, *, scale: float, sinks: mx.array | None = None) -> mx.array:
    """Attention (B, H, N, width) of queries (B, H, N, dims), by the kernel. sinks: (H,), a score of each head that has no
    value."""
    keys, values = call.keys, call.values
    rows, many, count, dims = queries.shape
    heads, capacity, width = keys.shape[1], keys.shape[2], values.shape[3]
    share, kind = many // heads, queries.dtype
    chunk = next(size for size in range(min(width, WIDEST), 0, -16) if width % size == 0)
    chunks = -(-share * count // QUERIES) * (width // chunk)
    most = max(BLOCKS // (rows * heads * chunks), 1)
    splits = 1 if capacity <= SPLIT_FROM else min(most, capacity // SPLIT_KEYS)
    template = [("T", kind), ("HALF", kind == mx.float16), ("D", dims), ("V", width), ("VC", chunk), ("G", share)]
    template += [("WINDOW", call.window), ("SINKS", sinks is not None)]
    # In the order in which models project them, which rope keeps. Only queries that are not are copied, never keys or values:
    # a copy could be made before they are written in place.
    laid_out = mx.contiguous(queries.swapaxes(1, 2))
    shape = (rows, count, many)
    own_sinks = keys if sinks is None else sinks.astype(kind)
    written = call.starts if call.written is None else call.written
    made = _kernel(splits > 1)(
        inputs=[laid_out, keys, values, call.starts, _scale(scale), own_sinks, written],
        template=template,
        grid=(rows * heads * THREADS, splits, chunks),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(*shape, width)]
        if splits == 1
        else [(*shape, splits, width), (*shape, splits), (*shape, splits)],
        output_dtypes=[kind] if splits == 1 else [mx.float32] * 3,
    )
    if splits > 1:
        made = _merge()(
            inputs=made,
            template=[("T", kind), ("V", width)],
            grid=(rows * count * many * width, 1, 1),
            threadgroup=(width, 1, 1),
            output_shapes=[(*shape, width)],
            output_dtypes=[kind],
        )
    return made[0].swapaxes(1, 2)


def masked_attention(queries: mx.array, call: RowCall, *, scale: float, sinks: mx.array | None = None) -> mx.array:
    """`row_attention` by MLX's own attention under a mask, where there is no such kernel."""
    rows, count, window = queries.shape[0], queries.shape[2], call.window
    key, query = mx.arange(call.keys.shape[2]), (call.starts[:, None] + mx.arange(count))[:, None, :, None]
    mask = (key <= query) & (key > query - window) if window else key <= query
    return mx.fast.scaled_dot_product_attention(
        queries, call.keys[:rows], call.values[:rows], scale=scale, mask=mask, sinks=sinks
    )


def _routed(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: object,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    row_call = getattr(cache, "row_call", None)
    if row_call is not None:
        call: RowCall | None = row_call(keys, values, mask)
        if call is not None and mx.default_device().type == mx.cpu:
            # Where tests run: the same calls, without the kernel.
            return masked_attention(queries, call, scale=scale, sinks=sinks)
        if call is not None and fits(queries, call):
            cast("Any", cache).unread = False
            return row_attention(queries, call, scale=scale, sinks=sinks)
    return base.scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=scale, mask=cast("Any", mask), sinks=sinks
    )


def route(model: nn.Module) -> bool:
    """Let a model's attention over a few tokens a row go through `row_attention` where the cache's layer has a method
    `row_call`. False where the model has attention of its own. Other models of the family are routed with it, which changes
    nothing for other caches."""
    # Going through all modules takes milliseconds, and the cache of every request asks.
    known = cast("bool | None", getattr(model, _ROUTED, None))
    if known is not None:
        return known
    found = False
    for name in {type(module).__module__ for module in model.modules()}:
        namespace = cast("Any", sys.modules[name])
        if getattr(namespace, "scaled_dot_product_attention", None) is base.scaled_dot_product_attention:
            namespace.scaled_dot_product_attention = _routed
        found = found or getattr(namespace, "scaled_dot_product_attention", None) is _routed
    setattr(model, _ROUTED, found)
    return found
