"""Attention of a few new tokens a row over rows of unlike lengths: a CUDA kernel of our own.

MLX on CUDA hands attention under a mask to cuDNN, which makes a plan for every new shape (35 to 50 ms) and costs the host
0.1 ms a layer even where it has one (mlx/backend/cuda/scaled_dot_product_attention.cpp, `sdpa_cudnn`); its own vector kernel
takes no masks. This one needs neither plans nor masks: it takes each row's length. Metal's kernels take masks of any shape
(mlx/backend/metal/scaled_dot_product_attention.cpp).

mlx-lm's models call `scaled_dot_product_attention` of `mlx_lm.models.base`, which they import by name: `route` puts a function
in its place that hands on whatever is not a call of this kind.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, cast, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

MOST = 32
"""New tokens a row: more is prefill, which cuDNN does better."""
TILE, WARPS = 256, 8
"""Keys that a block of threads scores at a time, one a thread; its warps."""
QUERIES = 16
"""Queries of a block at most: tokens times query heads that share one head of keys and values."""
SPLIT_FROM = 2048
"""Positions from which a row's keys are shared among several blocks, whose results a second kernel merges."""
BLOCKS = 512
"""Blocks that keep a large GPU busy (an H200 has 132 multiprocessors)."""

_SOURCE = r"""
constexpr int W = 8, P = MC + 4;
constexpr int VEC = 16 / sizeof(T), VPT = V / 32;
const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
const int heads = keys_shape[1], capacity = keys_shape[2], N = queries_shape[2], M = G * N;
const int b = blockIdx.x / heads, h = blockIdx.x % heads, m0 = blockIdx.z * MC;
const int start = starts[b], total = start + N;
const float log2 = scale[0] * 1.4426950408889634f;

__shared__ alignas(16) float qs[MC * D];
__shared__ alignas(16) float ps[256 * P];
__shared__ float part[W * MC], top[MC], factor[MC], first[MC];

for (int i = tid; i < MC * D; i += 256) {
  int m = m0 + i / D, n = m / G, g = m % G;
  qs[i] = m < M ? log2 * static_cast<float>(queries[((b * heads + h) * G + g) * N * D + n * D + i % D]) : 0.0f;
}
if (tid < MC) {
  const bool sinks_here = SINKS && blockIdx.y == 0 && m0 + tid < M;
  top[tid] = sinks_here ? 1.4426950408889634f * static_cast<float>(sinks[h * G + (m0 + tid) % G]) : -INFINITY;
  first[tid] = sinks_here ? 1.0f : 0.0f;
}
__syncthreads();

float acc[MC][VPT], sum[MC];
for (int m = 0; m < MC; m++) {
  sum[m] = 0.0f;
  for (int j = 0; j < VPT; j++) { acc[m][j] = 0.0f; }
}
const T* K = keys + (int64_t)(b * heads + h) * capacity * D;
const T* U = values + (int64_t)(b * heads + h) * capacity * V;
const int begin = (WINDOW > 0 && start + 1 > WINDOW) ? (start + 1 - WINDOW) / 256 : 0;

for (int tile = begin + blockIdx.y; tile * 256 < total; tile += gridDim.y) {
  const int key = tile * 256 + tid, count = min(256, total - tile * 256);
  float s[MC];
  for (int m = 0; m < MC; m++) { s[m] = 0.0f; }
  if (key < total) {
    const T* row = K + (int64_t)key * D;
    for (int d = 0; d < D; d += VEC) {
      alignas(16) T held[VEC];
      *reinterpret_cast<uint4*>(held) = *reinterpret_cast<const uint4*>(row + d);
      float k[VEC];
      for (int j = 0; j < VEC; j++) { k[j] = static_cast<float>(held[j]); }
      #pragma unroll
      for (int m = 0; m < MC; m++) {
        #pragma unroll
        for (int j = 0; j < VEC; j += 4) {
          float4 q = *reinterpret_cast<const float4*>(&qs[m * D + d + j]);
          s[m] += q.x * k[j] + q.y * k[j + 1] + q.z * k[j + 2] + q.w * k[j + 3];
        }
      }
    }
  }
  #pragma unroll
  for (int m = 0; m < MC; m++) {
    const int at = start + (m0 + m) / G;
    if (key > at || m0 + m >= M || (WINDOW > 0 && key + WINDOW <= at)) { s[m] = -INFINITY; }
    float most = s[m];
    for (int o = 16; o > 0; o >>= 1) { most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, o)); }
    if (lane == 0) { part[warp * MC + m] = most; }
  }
  __syncthreads();
  if (tid < MC) {
    float most = top[tid];
    for (int w = 0; w < W; w++) { most = fmaxf(most, part[w * MC + tid]); }
    factor[tid] = top[tid] == -INFINITY ? 0.0f : exp2f(top[tid] - most);
    first[tid] *= factor[tid];
    top[tid] = most;
  }
  __syncthreads();
  #pragma unroll
  for (int m = 0; m < MC; m++) { ps[tid * P + m] = s[m] == -INFINITY ? 0.0f : exp2f(s[m] - top[m]); }
  #pragma unroll
  for (int m = 0; m < MC; m++) {
    sum[m] *= factor[m];
    for (int j = 0; j < VPT; j++) { acc[m][j] *= factor[m]; }
  }
  __syncthreads();
  #pragma unroll 4
  for (int i = warp; i < count; i += W) {
    const T* row = U + (int64_t)(tile * 256 + i) * V + lane * VPT;
    float v[VPT];
    for (int j = 0; j < VPT; j++) { v[j] = static_cast<float>(row[j]); }
    #pragma unroll
    for (int m = 0; m < MC; m += 4) {
      float4 p = *reinterpret_cast<const float4*>(&ps[i * P + m]);
      sum[m] += p.x; sum[m + 1] += p.y; sum[m + 2] += p.z; sum[m + 3] += p.w;
      for (int j = 0; j < VPT; j++) {
        acc[m][j] += p.x * v[j]; acc[m + 1][j] += p.y * v[j];
        acc[m + 2][j] += p.z * v[j]; acc[m + 3][j] += p.w * v[j];
      }
    }
  }
}
// The warps' shares, added in their order, so that the same call always gives the same bits.
__syncthreads();
for (int w = 0; w < W; w++) {
  if (warp == w) {
    for (int m = 0; m < MC; m++) {
      for (int j = 0; j < VPT; j++) {
        float* at = &ps[m * V + lane * VPT + j];
        *at = w ? *at + acc[m][j] : acc[m][j];
      }
      if (lane == 0) { part[m] = w ? part[m] + sum[m] : sum[m] + first[m]; }
    }
  }
  __syncthreads();
}
for (int i = tid; i < MC * V; i += 256) {
  const int m = m0 + i / V, n = m / G, head = h * G + m % G;
  if (m < M) {
    const int64_t row = ((int64_t)b * N + n) * heads * G + head;
    STORE
  }
}
"""

_WHOLE = "out[row * V + i % V] = static_cast<T>(part[i / V] > 0.0f ? ps[i] / part[i / V] : 0.0f);"

_PART = r"""
    out[(row * gridDim.y + blockIdx.y) * V + i % V] = ps[i];
    if (i % V == 0) {
      sums[row * gridDim.y + blockIdx.y] = part[i / V];
      tops[row * gridDim.y + blockIdx.y] = top[i / V];
    }
"""

_MERGE = r"""
const int64_t row = blockIdx.x;
const int S = sums_shape[3];
float most = -INFINITY, total = 0.0f, value = 0.0f;
for (int s = 0; s < S; s++) { most = fmaxf(most, tops[row * S + s]); }
for (int s = 0; s < S; s++) {
  const float share = tops[row * S + s] == -INFINITY ? 0.0f : exp2f(tops[row * S + s] - most);
  total += share * sums[row * S + s];
  value += share * parts[(row * S + s) * V + threadIdx.x];
}
out[row * V + threadIdx.x] = static_cast<T>(total > 0.0f ? value / total : 0.0f);
"""


@cache
def _kernel(split: bool) -> Any:
    return mx.fast.cuda_kernel(
        name="row_attention_part" if split else "row_attention",
        input_names=["queries", "keys", "values", "starts", "scale", "sinks"],
        output_names=["out", "sums", "tops"] if split else ["out"],
        source=_SOURCE.replace("STORE", _PART if split else _WHOLE),
    )


@cache
def _merge() -> Any:
    return mx.fast.cuda_kernel(
        name="row_attention_merge", input_names=["parts", "sums", "tops"], output_names=["out"], source=_MERGE
    )


@cache
def _scale(value: float) -> mx.array:
    made = mx.array([value], dtype=mx.float32)
    mx.eval(made)  # noqa: TID251  (a constant, once)
    return made


def fits(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """Whether the kernel computes calls of such arrays."""
    dims, width = keys.shape[3], values.shape[3]
    same = queries.dtype == keys.dtype == values.dtype
    kinds = queries.dtype in (mx.bfloat16, mx.float16, mx.float32)
    return same and kinds and dims % 8 == 0 and dims <= 256 and width % 32 == 0 and width <= 256


def row_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    starts: mx.array,
    *,
    scale: float,
    window: int = 0,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention (B, H, N, width) of queries (B, H, N, dims), the newest N tokens of each row, over keys (R, heads, capacity,
    dims) and values (R, heads, capacity, width), R >= B. starts: (B,), int32, the position of each row's first query, which
    sees the keys up to its own position, or the last `window` of them. sinks: (H,), a score of each head that has no value."""
    rows, many, count, dims = queries.shape
    heads, capacity, width = keys.shape[1], keys.shape[2], values.shape[3]
    share = many // heads
    # Of few sizes: each is compiled once.
    most = QUERIES if max(dims, width) <= 128 else QUERIES // 2
    chunk = next(size for size in (QUERIES // 4, QUERIES // 2, QUERIES) if size >= min(share * count, most))
    chunks = -(-share * count // chunk)
    tiles = -(-capacity // TILE)
    splits = 1 if capacity <= SPLIT_FROM else min(max(BLOCKS // (rows * heads * chunks), 1), tiles)
    kind = queries.dtype
    template = [("T", kind), ("D", dims), ("V", width), ("G", share), ("MC", chunk), ("WINDOW", window)]
    template += [("SINKS", sinks is not None)]
    shape = (rows, count, many)
    made = _kernel(splits > 1)(
        inputs=[queries, keys, values, starts, _scale(scale), queries if sinks is None else sinks.astype(kind)],
        template=template,
        grid=(rows * heads * TILE, splits, chunks),
        threadgroup=(TILE, 1, 1),
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


def _masked(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    starts: mx.array,
    *,
    scale: float,
    window: int = 0,
    sinks: mx.array | None = None,
) -> mx.array:
    """`row_attention` by MLX's own, under a mask: where there is no such kernel."""
    rows, count = queries.shape[0], queries.shape[2]
    key, query = mx.arange(keys.shape[2]), (starts[:, None] + mx.arange(count))[:, None, :, None]
    mask = (key <= query) & (key > query - window) if window else key <= query
    return mx.fast.scaled_dot_product_attention(
        queries, keys[:rows], values[:rows], scale=scale, mask=mask, sinks=sinks
    )


@dataclass(frozen=True, slots=True)
class RowCall:
    """A layer's keys and values, each row's first position, and the layer's window (0: none)."""

    keys: mx.array
    values: mx.array
    starts: mx.array
    window: int


@runtime_checkable
class RowAttended(Protocol):
    """A layer of a cache whose rows have lengths of their own."""

    def row_call(self, keys: mx.array, values: mx.array, mask: object) -> RowCall | None:
        """What a call over `keys` and `values` under `mask` is, where these are the layer's own."""
        ...


def _routed(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: object,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    if queries.shape[2] <= MOST and isinstance(cache, RowAttended):
        call = cache.row_call(keys, values, mask)
        if call is not None and fits(queries, call.keys, call.values):
            run = _masked if mx.default_device().type == mx.cpu else row_attention
            return run(queries, call.keys, call.values, call.starts, scale=scale, window=call.window, sinks=sinks)
    return base.scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=scale, mask=cast("Any", mask), sinks=sinks
    )


def route(model: nn.Module) -> bool:
    """Let a model's attention over a few tokens a row of a RowAttended cache go through `row_attention`. False where the model
    has attention of its own. Other models of the family are routed with it, which changes nothing for other caches."""
    found = False
    for name in {type(module).__module__ for module in model.modules()}:
        namespace = cast("Any", sys.modules[name])
        if getattr(namespace, "scaled_dot_product_attention", None) is base.scaled_dot_product_attention:
            namespace.scaled_dot_product_attention = _routed
        found = found or getattr(namespace, "scaled_dot_product_attention", None) is _routed
    return found
