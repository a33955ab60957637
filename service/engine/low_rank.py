"""Quantised linear layers with a separate LoRA adapter.

The weights stay unchanged. Added to 4-bit weights, an adapter would be lost to rounding, or the weights would need two to four
times the bytes (docs/decisions/engine.md, "An adapter is added to unquantised weights and kept next to quantised ones").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

RANKS = 8
"""Ranks are padded with zeros to a multiple of this, the rows of a tile in the CUDA kernel."""
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that get the same input in mlx-lm's models."""


class _SharedProduct:
    """The product of the latest input with the down matrices of several layers, kept until each of them has used it."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._held: tuple[mx.array, mx.array, int] | None = None

    def of(self, x: mx.array, down: mx.array) -> mx.array:
        """x (..., inner) times down (ranks, inner), transposed: (..., ranks). Computed once for all layers that get the same
        array x."""
        if self._held is not None and self._held[0] is x:
            _, product, left = self._held
        else:
            product, left = x @ down.T, self._layers
        # Dropped after the last use, because a kept array keeps its whole graph alive.
        self._held = (x, product, left - 1) if left > 1 else None
        return product


class LowRankQuantizedLinear(nn.QuantizedLinear):
    """A quantised linear layer plus a low-rank product. Made by `add_low_rank`.

    down: (ranks, inner), the matrices of all layers that share the product. up: (outputs, rank), including the adapter's scale.
    """

    down: mx.array
    up: mx.array
    _own: mx.array
    _first: int
    _shared: _SharedProduct

    @property
    def low_rank(self) -> tuple[mx.array, mx.array]:
        """This layer's part of down (rank, inner), and up (outputs, rank)."""
        return self._own, self.up

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., inner): (..., outputs)."""
        return self.plus_low_rank(super().__call__(x), x)

    def plus_low_rank(self, product: mx.array, x: mx.array) -> mx.array:
        """product (..., outputs) of the quantised weights with x (..., inner), plus the low-rank product."""
        ranks = self._shared.of(x, self.down)[..., self._first : self._first + self.up.shape[1]]
        return mx.addmm(product, ranks, self.up.T)


def padded_rank(rank: int) -> int:
    """The padded rank at which an adapter of this rank is stored."""
    return -(-rank // RANKS) * RANKS


def add_low_rank(layers: Sequence[nn.QuantizedLinear], a: Sequence[mx.array], b: Sequence[mx.array]) -> list[mx.array]:
    """Turn layers that usually get the same input into LowRankQuantizedLinear, in place.

    a: (inner, rank) of each. b: (rank, outputs) of each, including the adapter's scale. All of one dtype. Returns the layers'
    arrays, not yet evaluated.
    """
    rank = b[0].shape[0]
    padding = padded_rank(rank) - rank
    down = mx.contiguous(mx.concatenate([mx.pad(each.T, [(0, padding), (0, 0)]) for each in a]))
    shared, arrays = _SharedProduct(len(layers)), [down]
    for i, (layer, each) in enumerate(zip(layers, b, strict=True)):
        adapted = cast("Any", layer)
        adapted.__class__ = LowRankQuantizedLinear
        adapted.down = down
        adapted.up = mx.contiguous(mx.pad(each.T, [(0, 0), (0, padding)]))
        # The kernel reads this part separately. It is a view of `down`; MLX does not count names with an underscore as
        # parameters.
        adapted._first = i * (rank + padding)
        adapted._own = down[adapted._first : adapted._first + rank + padding]
        adapted._shared = shared
        arrays += [adapted.up, adapted._own]
    return arrays
