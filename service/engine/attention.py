"""A custom CUDA kernel for attention of a few new tokens per row over paged rows of different lengths.

MLX on CUDA passes masked attention to cuDNN, which builds a plan for every new shape, at 35 to 50 ms each
(mlx/backend/cuda/scaled_dot_product_attention.cpp, `sdpa_cudnn`). MLX's vector kernel accepts no masks. This kernel takes each
row's length instead of a mask, and any shape. Metal's kernels accept masks of any shape
(mlx/backend/metal/scaled_dot_product_attention.cpp).

mlx-lm's models import `scaled_dot_product_attention` from `mlx_lm.models.base` by name. `route` replaces it with a function
that passes on all other calls.
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
from service.engine.strategy import PAGE

MOST, LONG, FEWER = 256, 4096, 64
"""Maximum new tokens per row; only FEWER over rows of more than LONG positions, where cuDNN is fast enough to repay its
plans."""
FEW = 32
"""Maximum new tokens per row of calls whose shapes repeat (`replay`)."""
_ROUTED = "attention_is_routed"
"""Attribute of a model that caches the result of `route`."""
QUERIES = 16
"""Queries of a block (tokens times the query heads that share a head of keys and values): the rows of a tensor core product."""
WIDEST = 128
"""Maximum dimensions of values that a block accumulates."""
THREADS = 256
"""Threads of a block. Its 8 warps take 16 keys each at a time."""
SHARES = 11
"""Maximum blocks that share a row's keys. A second kernel merges their results, and takes longer the more there are."""
SHARE, SHARE_BUSY = 512, 2048
"""Minimum positions of such a share: when the GPU is otherwise idle, and when other rows keep it busy."""
BUSY = 128
"""Blocks that keep a large GPU busy (an H200 has 132 multiprocessors)."""
GATHER_THREADS = 64
"""Threads of a block of the kernel that copies pages."""


@cache
def _kernel(split: bool) -> Any:
    inputs = ["queries", "keys", "values", "page_table", "starts", "scale", "least", "sinks", "written"]
    outputs = ["out", "sums", "tops"] if split else ["out"]
    return cuda_kernel("row_attention", inputs, outputs, strided=True, SPLIT=int(split), PAGE=PAGE)


@cache
def _merge() -> Any:
    return cuda_kernel("row_attention_merge", ["parts", "sums", "tops"], ["out"])


@cache
def _gather() -> Any:
    inputs = ["pool", "page_table", "ends", "written"]
    return cuda_kernel("gather_pages", inputs, ["out"], strided=True, PAGE=PAGE)


@cache
def _constant(value: float, kind: mx.Dtype) -> mx.array:
    return mx.array([value], dtype=kind)


@dataclass(frozen=True, slots=True)
class RowCall:
    """The arguments of attention for the newest N tokens of B rows.

    keys: (pages, heads, PAGE, dims), values: (pages, heads, PAGE, width), the pool's. starts: (B,), int32, the position of each
    row's first query. table: (B, W), int32, the numbers of each row's pages. window: number of latest positions that a query
    sees, including its own; 0: all up to its own. written: the result of `write_in_place`, if it has written the keys. fresh:
    keys and values (B, heads, N, ...) of the N tokens, if there are no others.
    """

    keys: mx.array
    values: mx.array
    starts: mx.array
    table: mx.array
    window: int = 0
    written: mx.array | None = None
    fresh: tuple[mx.array, mx.array] | None = None

    @property
    def capacity(self) -> int:
        """Positions that the table can hold."""
        return self.table.shape[1] * PAGE


def fits(queries: mx.array, call: RowCall) -> bool:
    """Whether the kernel supports these arrays: half precision, up to 256 key dimensions, no long prefill."""
    dims, width = call.keys.shape[3], call.values.shape[3]
    same = queries.dtype == call.keys.dtype == call.values.dtype
    if queries.shape[2] > (MOST if call.capacity <= LONG else FEWER):
        return False
    return same and queries.dtype in (mx.bfloat16, mx.float16) and dims % 16 == 0 and dims <= 256 and width % 16 == 0


def gather_pages(
    pool: mx.array, table: mx.array, ends: mx.array, width: int, written: mx.array | None = None
) -> mx.array:
    """The first `width` positions of each row, (B, heads, width, dims), from its pages. Zeros from ends[b] on and for missing
    pages (page 0), so that nothing outside the row is read. written: the last result of `write_in_place`."""
    rows, (_, heads, _, dims), count = table.shape[0], pool.shape, -(-width // PAGE)
    if written is None:
        pages = pool[table[:, :count]].swapaxes(1, 2).reshape(rows, heads, count * PAGE, dims)[:, :, :width]
        held = (mx.arange(width) < ends[:, None]) & mx.repeat(table[:, :count] != 0, PAGE, axis=1)[:, :width]
        return mx.where(held[:, None, :, None], pages, mx.array(0, dtype=pool.dtype))
    whole = _gather()(
        inputs=[pool, table, ends, written],
        template=[("T", pool.dtype)],
        grid=(heads * count * GATHER_THREADS, rows, 1),
        threadgroup=(GATHER_THREADS, 1, 1),
        output_shapes=[(rows, heads, count * PAGE, dims)],
        output_dtypes=[pool.dtype],
    )[0]
    return whole[:, :, :width]


def row_attention(queries: mx.array, call: RowCall, *, scale: float, sinks: mx.array | None = None) -> mx.array:
    """Attention (B, H, N, width) of queries (B, H, N, dims), computed by the kernel. sinks: (H,), a score per head that has no
    value."""
    keys, values = call.keys, call.values
    rows, many, count, dims = queries.shape
    heads, capacity, width = keys.shape[1], call.capacity, values.shape[3]
    share, kind = many // heads, queries.dtype
    chunk = next(size for size in range(min(width, WIDEST), 0, -16) if width % size == 0)
    chunks = -(-share * count // QUERIES) * (width // chunk)
    blocks = rows * heads * chunks
    least = SHARE_BUSY if blocks >= BUSY else SHARE
    splits = max(min(max(SHARES, BUSY // blocks), (capacity - 1) // least), 1)
    template = [("T", kind), ("HALF", kind == mx.float16), ("D", dims), ("V", width), ("VC", chunk), ("G", share)]
    template += [("WINDOW", call.window), ("SINKS", sinks is not None)]
    # The layout in which models project queries, which RoPE preserves. Only queries in another layout are copied, never keys or
    # values: a copy could be made before they are written in place.
    laid_out = mx.contiguous(queries.swapaxes(1, 2))
    shape = (rows, count, many)
    own_sinks = keys if sinks is None else sinks.astype(kind)
    written = call.starts if call.written is None else call.written
    numbers = [_constant(scale, mx.float32), _constant(least, mx.int32)]
    made = _kernel(splits > 1)(
        inputs=[laid_out, keys, values, call.table, call.starts, *numbers, own_sinks, written],
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
    """`row_attention` with MLX's masked attention, for devices without this kernel."""
    count, window, width, ends = queries.shape[2], call.window, call.capacity, call.starts + queries.shape[2]
    key, query = mx.arange(width), (call.starts[:, None] + mx.arange(count))[:, None, :, None]
    mask = (key <= query) & (key > query - window) if window else key <= query
    keys, values = (gather_pages(each, call.table, ends, width, call.written) for each in (call.keys, call.values))
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


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
    call: RowCall | None = None if row_call is None else row_call(keys, values, mask)
    if call is not None:
        on_cpu = mx.default_device().type == mx.cpu
        if on_cpu and queries.shape[2] <= FEW:
            # Tests on a CPU run the same calls without the kernel.
            return masked_attention(queries, call, scale=scale, sinks=sinks)
        if not on_cpu and fits(queries, call):
            return row_attention(queries, call, scale=scale, sinks=sinks)
        if call.fresh is not None:
            keys, values, mask = *call.fresh, "causal"
    return base.scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=scale, mask=cast("Any", mask), sinks=sinks
    )


def route(model: nn.Module) -> bool:
    """Route a model's attention over few tokens per row through `row_attention` if the cache's layer has a method `row_call`.
    Returns False if the model has a custom attention. Other models of the same family are routed as well, which has no effect
    with other caches."""
    # Cached, because visiting all modules takes milliseconds and every request's cache asks.
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
