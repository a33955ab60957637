"""Rotary positions of a few new tokens a row, in the kernel that writes their keys and values in place.

mlx-lm's models rotate queries and keys in a kernel each before a third writes the keys; on CUDA the host pays for every kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import log2
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE

from service.engine.kernels import cuda_kernel

THREADS = 64
"""Of a block of the kernel, which rotates a head of one token."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """How positions rotate the two halves of a head against each other. frequencies: float32, a period (over 2 pi) for each pair
    of dimensions where `periods`; else (1,), log2 of the base that they are powers of."""

    frequencies: mx.array
    periods: bool


@cache
def _base(log_base: float) -> mx.array:
    return mx.array([log_base], dtype=mx.float32)


def rotation(rope: nn.Module, dims: int) -> Rotation | None:
    """What a module of MLX or mlx-lm does to heads of so many dimensions; None where the kernel does not do that."""
    parts = cast("Any", rope)
    if type(rope) not in (nn.RoPE, Llama3RoPE) or parts.dims != dims or parts.traditional:
        return None
    if type(rope) is Llama3RoPE:
        return Rotation(parts._freqs, periods=True)
    return Rotation(_base(log2(parts.base)), periods=False) if parts.scale == 1.0 else None


@cache
def _kernel() -> Any:
    inputs = ["queries", "new_keys", "new_values", "keys", "values", "starts", "frequencies"]
    return cuda_kernel("rotate_rows", inputs, ["rotated", "written"], strided=True)


def rotate_and_write(
    new: Sequence[mx.array], keys: mx.array, values: mx.array, starts: mx.array, rotation: Rotation
) -> tuple[mx.array, mx.array]:
    """new: queries (B, N, H, dims), keys and values (B, N, heads, dims) of tokens whose first is at position starts[b] (B,),
    int32, of each row. Writes keys, rotated, and values to the first B slots of the buffers keys and values (see `kv.buffers`), in
    place. Returns the rotated queries, and what `write_in_place` returns."""
    queries, new_keys, _ = new
    rows, count, many, _ = queries.shape
    rotated, written = _kernel()(
        inputs=[*new, keys, values, starts, rotation.frequencies],
        template=[("T", queries.dtype), ("PERIODS", rotation.periods)],
        grid=(rows * count * (many + new_keys.shape[2]) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[queries.shape, (1,)],
        output_dtypes=[queries.dtype, mx.int32],
    )
    return rotated, written
