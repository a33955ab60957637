"""Products of a few tokens with a weight matrix: a CUDA kernel of our own.

MLX on CUDA asks cuBLAS for an algorithm at every product of more than one token and captures what it launches
(mlx/backend/cuda/gemms/cublas_gemm.cpp, `CublasGemm::execute`), which takes the host longer than many a product takes the
device. A custom kernel costs the host as much again in Python, so that it is used in traced calls alone (`replay`), which pay
that once.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

MOST = 16
"""Tokens: with more cuBLAS is faster."""
ROWS, THREADS = 16, 256
"""Rows of the weight matrix that a block multiplies; its threads."""
INNER = 64
"""Elements of a row that a warp takes at a time."""

_KERNELS = Path(__file__).parent / "kernels"
_tracing: ContextVar[bool] = ContextVar("tracing", default=False)


@cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="few_tokens",
        input_names=["x", "weight"],
        output_names=["out"],
        source=(_KERNELS / "few_tokens.cu").read_text(),
        header=(_KERNELS / "fragments.cuh").read_text(),
    )


def fits(x: mx.array, weight: mx.array) -> bool:
    """Whether the kernel multiplies x (..., inner) by weight (outputs, inner): 2 to MOST tokens in half precision."""
    tokens = prod(x.shape[:-1])
    kinds = x.dtype == weight.dtype and x.dtype in (mx.bfloat16, mx.float16)
    return kinds and 1 < tokens <= MOST and weight.shape[0] % ROWS == 0 and weight.shape[1] % INNER == 0


def few_tokens(x: mx.array, weight: mx.array) -> mx.array:
    """x (..., inner) times weight (outputs, inner), transposed: (..., outputs)."""
    *lead, inner = x.shape
    tokens, outputs = prod(lead), weight.shape[0]
    (out,) = _kernel()(
        inputs=[x.reshape(tokens, inner), weight],
        template=[("T", x.dtype), ("HALF", x.dtype == mx.float16), ("TILES", -(-tokens // 8))],
        grid=(outputs // ROWS * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(tokens, outputs)],
        output_dtypes=[x.dtype],
    )
    return out.reshape(*lead, outputs)


class FewTokenLinear(nn.Linear):
    """A linear layer whose traced calls over few tokens go through the kernel. Parameters are nn.Linear's."""

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., inner): (..., outputs)."""
        weight = cast("mx.array", self["weight"])
        if not _tracing.get() or mx.default_device().type == mx.cpu or not fits(x, weight):
            return super().__call__(x)
        out = few_tokens(x, weight)
        return out + cast("mx.array", self["bias"]) if "bias" in self else out


def route(model: nn.Module) -> None:
    """Make a model's linear layers ready for traced calls, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FewTokenLinear


@contextmanager
def tracing() -> Generator[None]:
    """Products inside the block are part of a trace."""
    token = _tracing.set(True)
    try:
        yield
    finally:
        _tracing.reset(token)
