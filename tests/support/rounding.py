"""Layers whose rounding depends on the shape of the call, as on an accelerator. On a CPU it does not."""

from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class SplitLinear(nn.Linear):
    """Sums in parts whose number depends on the tokens, each rounded to the input's precision (split K)."""

    def __call__(self, x: mx.array) -> mx.array:
        tokens = x.size // x.shape[-1]
        parts = 1 if tokens == 1 else 2 + tokens % 3
        weights = self.weight.astype(mx.float32).T
        edges = [weights.shape[0] * i // parts for i in range(parts + 1)]
        wide = x.astype(mx.float32)
        sums = [(wide[..., a:b] @ weights[a:b]).astype(x.dtype) for a, b in pairwise(edges)]
        total = sum(sums[1:], sums[0])
        return total + self.bias if "bias" in self else total


def shape_dependent(model: Any) -> Any:
    """Replace the linear layers of the model in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = SplitLinear
    return model
