"""A custom CUDA kernel for products of a few tokens with weight matrices.

MLX on CUDA asks cuBLAS for an algorithm at every product of more than one token and captures what it launches
(mlx/backend/cuda/gemms/cublas_gemm.cpp, `CublasGemm::execute`). That takes the host longer than many a product takes the
device. The kernel costs the host a third of that. It multiplies by several matrices that read the same input at once (queries,
keys and values; gate and up), and gives a token the same bits whatever else is in the call. Building the call in Python costs
as much again each time, so the kernel is used only in traced calls (`replay`).

The kernel widens 4-bit weights as it reads them, once for all tokens; with MLX's products of such weights, a server was 2 to 9
times slower with 4 to 64 clients (docs/results/serving.md). It adds the low-rank product of an adapter (`low_rank`) in the same
launch: each block multiplies the input by the adapter's down matrix again, from the L2 cache, because another launch would cost
more.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, TypeAlias, cast
from weakref import ReferenceType, ref

import mlx.core as mx
import mlx.nn as nn

from service.engine.kernels import cuda_kernel, shared_memory
from service.engine.low_rank import SIBLINGS, LowRankQuantizedLinear

THREADS, WARPS = 256, 8
"""Threads and warps of a block."""
Tilings: TypeAlias = dict[int, tuple[tuple[int, int], ...]]
"""By the number of tiles of 8 tokens that a block multiplies: the number of tiles of 8 outputs and of stages in which they are
fetched, fastest first (docs/results/accelerator.md). Each is a kernel to be compiled."""
TILINGS: Tilings = {1: ((1, 4),), 2: ((2, 2),), 4: ((8, 2), (6, 2), (2, 2)), 6: ((8, 2), (4, 2)), 8: ((6, 2), (2, 2))}
"""For unquantised weights. With more than 64 tokens cuBLAS is faster."""
QUANTISED_TILINGS: Tilings = {1: ((4, 4),), 2: ((4, 4),), 4: ((4, 2), (2, 2)), 6: ((8, 2), (2, 2)), 8: ((8, 2), (2, 2))}
"""For 4-bit weights."""
BITS, GROUPS = 4, (32, 64, 128)
"""For quantised weights: bits per number, and numbers that share a scale and a bias."""
MATRICES = 3
"""Maximum matrices that the kernel multiplies by in one call."""
INNER = 64
"""Elements of a row that a warp processes at a time."""
MAX_RANK = 32
"""Maximum rank of low-rank products that the kernel adds to quantised weights. MLX computes larger ones."""

Weight: TypeAlias = tuple[mx.array, ...]
"""An unquantised matrix (outputs, inner), or a quantised one: its 4-bit numbers (outputs, inner / 8), uint32, and their scales
and biases (outputs, groups)."""
LowRank: TypeAlias = tuple[mx.array, mx.array]
"""An adapter's matrices: down (rank, inner) and up (outputs, rank), the rank a multiple of 8."""
_Linear: TypeAlias = "FewTokenLinear | FewTokenQuantizedLinear | FewTokenLowRankLinear"


@dataclass(slots=True)
class _Call:
    """A call of a model in progress. ready: products that were computed with a sibling's, by the layer's id, with their
    input."""

    ready: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict[int, tuple[mx.array, mx.array]])


_call: ContextVar[_Call | None] = ContextVar("call", default=None)


@cache
def tilings(*, quantised: bool = False) -> dict[int, tuple[int, int]]:
    """The tilings whose stages fit into a block's shared memory on MLX's device."""
    room = shared_memory()
    fitting = {
        tiles: [(deep, stages) for deep, stages in shapes if stages_bytes(tiles, deep, stages, quantised) <= room]
        for tiles, shapes in (QUANTISED_TILINGS if quantised else TILINGS).items()
    }
    return {tiles: shapes[0] for tiles, shapes in fitting.items() if shapes}


def most_tokens(*, quantised: bool = False) -> int:
    """Maximum tokens of a call that the kernel multiplies on MLX's device: 64, or 32 if a block has less shared memory."""
    return 8 * max(tilings(quantised=quantised))


def stages_bytes(tiles: int, deep: int, stages: int, quantised: bool = False) -> int:
    """Bytes of shared memory of a block's stages. For a quantised row, a stage holds INNER numbers, two scales and two
    biases."""
    row = INNER * BITS // 8 + 8 if quantised else 2 * INNER
    return WARPS * stages * 8 * (tiles * 2 * INNER + deep * row)


def block_bytes(tiles: int, rank: int, *, quantised: bool) -> int:
    """Bytes of shared memory that a block takes on MLX's device: for its stages, then for the warps' sums of its outputs and
    ranks. rank: of a low-rank product; 0: none."""
    deep, stages = tilings(quantised=quantised)[tiles]
    sums = WARPS * 16 * ((tiles + 1) // 2) * (8 * deep + rank + 1) * 4
    return max(stages_bytes(tiles, deep, stages, quantised), sums)


@cache
def _kernel(tiles: int, group: int, rank: int) -> Any:
    """group: group size of quantised weights; 0 for unquantised. rank: of low-rank products; 0: none."""
    names = ("weight", "scales", "biases") if group else ("weight",)
    if rank:
        names = (*names, "down", "up")
    inputs = ["x", *(f"{name}{i}" for name in names for i in range(MATRICES))]
    shared = block_bytes(tiles, rank, quantised=group > 0)
    outputs = [f"out{i}" for i in range(MATRICES)]
    return cuda_kernel("few_tokens", inputs, outputs, shared=shared, QUANTISED=int(group > 0), GROUP=group, RANK=rank)


def _group(inner: int, weight: Weight) -> int:
    """Numbers of a quantised matrix that share a scale; 0 for an unquantised one."""
    return inner // weight[1].shape[1] if len(weight) > 1 else 0


def fits(x: mx.array, weight: Weight) -> bool:
    """Whether the kernel multiplies x (..., inner) by a matrix: up to `most_tokens` tokens in half precision."""
    inner, kind, quantised = x.shape[-1], weight[-1].dtype, len(weight) > 1
    if x.dtype != kind or kind not in (mx.bfloat16, mx.float16) or inner % INNER:
        return False
    if quantised and ((group := _group(inner, weight)) not in GROUPS or inner % (2 * group)):
        return False
    return prod(x.shape[:-1]) <= most_tokens(quantised=quantised)


def few_tokens(x: mx.array, weights: Sequence[Weight], low_ranks: Sequence[LowRank] = ()) -> list[mx.array]:
    """x (..., inner) times each of one to three similar matrices, transposed: (..., outputs) each. low_ranks: for each
    quantised matrix a low-rank product to add, all of one rank up to MAX_RANK; empty: none."""
    *lead, inner = x.shape
    tokens, outputs, group = prod(lead), [weight[0].shape[0] for weight in weights], _group(inner, weights[0])
    tiles = next(n for n in tilings(quantised=group > 0) if 8 * n >= tokens)
    deep, stages = tilings(quantised=group > 0)[tiles]
    template = [("T", x.dtype), ("HALF", x.dtype == mx.float16), ("TILES", tiles), ("DEEP", deep), ("STAGES", stages)]
    # No block computes the absent matrices. A separate kernel per number of matrices would multiply compile time.
    absent = MATRICES - len(weights)
    arrays = [(*w, *low) for w, low in zip(weights, low_ranks or [()] * len(weights), strict=True)]
    parts = zip(*arrays, *[arrays[0]] * absent, strict=True)
    made = _kernel(tiles, group, low_ranks[0][0].shape[0] if low_ranks else 0)(
        inputs=[x.reshape(tokens, inner), *(array for part in parts for array in part)],
        template=template,
        grid=(sum(-(-n // (8 * deep)) for n in outputs) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[*((tokens, n) for n in outputs), *[(1,)] * absent],
        output_dtypes=[x.dtype] * MATRICES,
    )
    return [out.reshape(*lead, n) for out, n in zip(made, outputs, strict=False)]


@dataclass(frozen=True, slots=True)
class _Siblings:
    """Other layers that usually get the same input as a layer. Weak references, because a reference cycle would keep the
    weights of a replaced draft until garbage collection."""

    layers: tuple[ReferenceType[_Linear], ...]


def _weight(layer: nn.Module) -> Weight:
    if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
        return layer["weight"], layer["scales"], layer["biases"]
    return (layer["weight"],)


def _low_rank(layer: nn.Module) -> tuple[LowRank, ...]:
    """The layer's low-rank product, if the kernel can add it."""
    if not isinstance(layer, LowRankQuantizedLinear) or layer.up.shape[1] > MAX_RANK:
        return ()
    return (layer.low_rank,)


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether the kernel can multiply by the weights of both layers in one call."""
    kinds = [
        [(a.dtype, a.shape[1]) for a in (*_weight(layer), *(a for low in _low_rank(layer) for a in low))]
        for layer in (one, other)
    ]
    return kinds[0] == kinds[1]


def _product(layer: _Linear, x: mx.array) -> mx.array | None:
    """The kernel's result for a linear layer's input, without its bias; None if the kernel does not support them."""
    call, weight = _call.get(), _weight(layer)
    if call is None or mx.default_device().type == mx.cpu or not fits(x, weight):
        return None
    given, out = call.ready.pop(id(layer), (None, x))
    if given is x:
        return out
    # A layer whose input differs from its sibling's multiplies alone.
    siblings: _Siblings | None = None if given is not None else getattr(layer, "siblings", None)
    alive = [] if siblings is None else [each for refer in siblings.layers if (each := refer()) is not None]
    others = [each for each in alive if _alike(each, layer)]
    low_ranks = [low for each in (layer, *others) for low in _low_rank(each)]
    out, *more = few_tokens(x, [weight, *map(_weight, others)], low_ranks)
    call.ready.update({id(each): (x, product) for each, product in zip(others, more, strict=True)})
    return out


class _ByKernel:
    """A layer whose calls over few tokens go through the kernel inside `by_kernel`. Parameters are those of the other base
    class."""

    __slots__ = ()

    def __call__(self: Any, x: mx.array) -> mx.array:
        """Calls a linear layer, together with its siblings. x (..., inner): (..., outputs)."""
        if (out := _product(self, x)) is None:
            return super().__call__(x)  # pyright: ignore[reportAttributeAccessIssue]
        return out + self["bias"] if "bias" in self else out


class _HeadByKernel:
    """The same for an embedding as output head."""

    __slots__ = ()

    def as_linear(self: Any, x: mx.array) -> mx.array:
        """x (..., inner): (..., outputs)."""
        if (out := _logits(self, x)) is None:
            return super().as_linear(x)  # pyright: ignore[reportAttributeAccessIssue]
        return out


class FewTokenLinear(_ByKernel, nn.Linear):
    """See _ByKernel."""


class FewTokenQuantizedLinear(_ByKernel, nn.QuantizedLinear):
    """See _ByKernel: with 4-bit weights."""


class FewTokenLowRankLinear(_ByKernel, LowRankQuantizedLinear):
    """See _ByKernel: with 4-bit weights and a low-rank product, which MLX computes above MAX_RANK."""

    __slots__ = ()

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., inner): (..., outputs)."""
        if (out := _product(self, x)) is None:
            return LowRankQuantizedLinear.__call__(self, x)
        out = out + self["bias"] if "bias" in self else out
        return out if _low_rank(self) else self.plus_low_rank(out, x)


class FewTokenEmbedding(_HeadByKernel, nn.Embedding):
    """See _HeadByKernel."""


class FewTokenQuantizedEmbedding(_HeadByKernel, nn.QuantizedEmbedding):
    """See _HeadByKernel: with 4-bit weights."""


def _logits(layer: nn.Module, x: mx.array) -> mx.array | None:
    """The kernel's result for an output head's input; None if the kernel does not support them."""
    if _call.get() is None or mx.default_device().type == mx.cpu or not fits(x, _weight(layer)):
        return None
    return few_tokens(x, [_weight(layer)])[0]


_LINEAR = (FewTokenLinear, FewTokenQuantizedLinear, FewTokenLowRankLinear)
_ROUTED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: FewTokenLinear,
    nn.Embedding: FewTokenEmbedding,
    nn.QuantizedLinear: FewTokenQuantizedLinear,
    LowRankQuantizedLinear: FewTokenLowRankLinear,
    nn.QuantizedEmbedding: FewTokenQuantizedEmbedding,
}


def route(model: nn.Module) -> None:
    """Prepare a model's layers for `by_kernel`, in place."""
    for module in cast("list[Any]", model.modules()):
        if (getattr(module, "mode", "affine"), getattr(module, "bits", BITS)) == ("affine", BITS):
            module.__class__ = _ROUTED.get(type(module), type(module))
    for module in model.modules():
        for names in SIBLINGS:
            found = [module.get(name) for name in names]
            layers = [each for each in found if isinstance(each, _LINEAR)]
            if len(layers) > 1:
                for layer in layers:
                    layer.siblings = _Siblings(tuple(ref(each) for each in layers if each is not layer))


def inside() -> bool:
    """Whether the caller is inside `by_kernel`."""
    return _call.get() is not None


@contextmanager
def by_kernel() -> Generator[None]:
    """Within the block, which is one call of a model, products of few tokens go through the kernel."""
    token = _call.set(_Call())
    try:
        yield
    finally:
        _call.reset(token)
