"""Products of a few tokens with weight matrices: a CUDA kernel of our own.

MLX on CUDA asks cuBLAS for an algorithm at every product of more than one token and captures what it launches
(mlx/backend/cuda/gemms/cublas_gemm.cpp, `CublasGemm::execute`), which takes the host longer than many a product takes the
device. The kernel costs the host a third of that, multiplies with several matrices that read the same input at once (queries,
keys and values; gate and up), and gives a token the same bits whatever else is in the call. Python pays as much again for it
in every call, so that it is used in calls that are traced (`replay`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from service.engine.kernels import cuda_kernel, shared_memory

THREADS, WARPS = 256, 8
"""Of a block."""
TILINGS = {1: ((1, 4),), 2: ((2, 2),), 4: ((8, 2), (6, 2), (2, 2)), 6: ((8, 2), (4, 2)), 8: ((6, 2), (2, 2))}
"""By how many tiles of 8 tokens a block multiplies: how many tiles of 8 outputs, fetched in how many stages, the fastest first
(docs/measurements.md). Each is a kernel to be compiled. With more than 64 tokens cuBLAS is faster."""
MATRICES = 3
"""That the kernel multiplies by in one call, at most."""
INNER = 64
"""Elements of a row that a warp takes at a time."""
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that mlx-lm's models give the same input."""


@dataclass(slots=True)
class _Call:
    """A model's call under way. ready: products that were computed with a sibling's, by the layer's id, with their input."""

    ready: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict[int, tuple[mx.array, mx.array]])


_call: ContextVar[_Call | None] = ContextVar("call", default=None)


@cache
def tilings() -> dict[int, tuple[int, int]]:
    """TILINGS of which a block's stages find room on MLX's device."""
    room = shared_memory()
    fitting = {
        tiles: [(deep, stages) for deep, stages in shapes if stages_bytes(tiles, deep, stages) <= room]
        for tiles, shapes in TILINGS.items()
    }
    return {tiles: shapes[0] for tiles, shapes in fitting.items() if shapes}


def most_tokens() -> int:
    """Tokens of a call that the kernel multiplies on MLX's device at most: 64, or 32 where a block has less shared memory."""
    return 8 * max(tilings())


def stages_bytes(tiles: int, deep: int, stages: int) -> int:
    """Bytes of shared memory that a block takes."""
    return WARPS * stages * 8 * (tiles + deep) * INNER * 2


@cache
def _kernel(tiles: int) -> Any:
    inputs, outputs = ["x", *(f"weight{i}" for i in range(MATRICES))], [f"out{i}" for i in range(MATRICES)]
    return cuda_kernel("few_tokens", inputs, outputs, shared=stages_bytes(tiles, *tilings()[tiles]))


def fits(x: mx.array, weight: mx.array) -> bool:
    """Whether the kernel multiplies x (..., inner) by weight (outputs, inner): up to `most_tokens` in half precision."""
    if x.dtype != weight.dtype or x.dtype not in (mx.bfloat16, mx.float16) or weight.shape[1] % INNER:
        return False
    return prod(x.shape[:-1]) <= most_tokens()


def few_tokens(x: mx.array, weights: Sequence[mx.array]) -> list[mx.array]:
    """x (..., inner) times each of one to three weights (outputs, inner), transposed: (..., outputs) each."""
    *lead, inner = x.shape
    tokens, outputs = prod(lead), [weight.shape[0] for weight in weights]
    tiles = next(n for n in tilings() if 8 * n >= tokens)
    deep, stages = tilings()[tiles]
    template = [("T", x.dtype), ("HALF", x.dtype == mx.float16), ("TILES", tiles), ("DEEP", deep), ("STAGES", stages)]
    # No block computes those that are not there. A kernel for each number of matrices would take as long again to compile.
    absent = MATRICES - len(weights)
    made = _kernel(tiles)(
        inputs=[x.reshape(tokens, inner), *weights, *[weights[0]] * absent],
        template=template,
        grid=(sum(-(-n // (8 * deep)) for n in outputs) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[*((tokens, n) for n in outputs), *[(1,)] * absent],
        output_dtypes=[x.dtype] * MATRICES,
    )
    return [out.reshape(*lead, n) for out, n in zip(made, outputs, strict=False)]


@dataclass(frozen=True, slots=True)
class _Siblings:
    """Layers that are usually given the same input."""

    layers: tuple[FewTokenLinear, ...]


class FewTokenLinear(nn.Linear):
    """A linear layer whose calls over few tokens go through the kernel inside `by_kernel`, together with those of its siblings.
    Parameters are nn.Linear's."""

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., inner): (..., outputs)."""
        call, weight = _call.get(), self._weight
        if call is None or mx.default_device().type == mx.cpu or not fits(x, weight):
            return super().__call__(x)
        given, out = call.ready.pop(id(self), (None, x))
        if given is not x:
            # A layer that was given something else than its sibling multiplies by itself.
            siblings: _Siblings | None = None if given is not None else getattr(self, "siblings", None)
            others = [] if siblings is None else [each for each in siblings.layers if each is not self]
            others = [each for each in others if each._weight.shape[1] == x.shape[-1] and fits(x, each._weight)]
            out, *more = few_tokens(x, [weight, *(each._weight for each in others)])
            call.ready.update({id(each): (x, product) for each, product in zip(others, more, strict=True)})
        return out + cast("mx.array", self["bias"]) if "bias" in self else out

    @property
    def _weight(self) -> mx.array:
        return cast("mx.array", self["weight"])


class FewTokenEmbedding(nn.Embedding):
    """An embedding that, as output head, goes through the kernel inside `by_kernel`. Parameters are nn.Embedding's."""

    def as_linear(self, x: mx.array) -> mx.array:
        """x (..., inner): (..., outputs)."""
        weight = cast("mx.array", self["weight"])
        if _call.get() is None or mx.default_device().type == mx.cpu or not fits(x, weight):
            return super().as_linear(x)
        return few_tokens(x, [weight])[0]


def route(model: nn.Module) -> None:
    """Make a model's layers ready for `by_kernel`, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FewTokenLinear
        elif type(module) is nn.Embedding:
            module.__class__ = FewTokenEmbedding
    for module in model.modules():
        for names in SIBLINGS:
            layers = tuple(each for name in names if isinstance(each := module.get(name), FewTokenLinear))
            if len(layers) > 1:
                for layer in layers:
                    layer.siblings = _Siblings(layers)


def inside() -> bool:
    """Whether this is inside `by_kernel`."""
    return _call.get() is not None


@contextmanager
def by_kernel() -> Generator[None]:
    """Products of few tokens in the block, which is one call of a model, go through the kernel."""
    token = _call.set(_Call())
    try:
        yield
    finally:
        _call.reset(token)
