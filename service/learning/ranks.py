"""Several processes that train one model together, as started by `mlx.launch`, each on its part of the data. Gradients
are averaged before any decision, so that all processes decide alike and keep the same weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx.nn import average_gradients

Gradients = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ranks:
    """index: this process's rank among the `count` processes. With a count of 1 nothing is sent."""

    index: int = 0
    count: int = 1

    @classmethod
    def join(cls) -> Ranks:
        """Joins the launch that this process is part of; outside a launch, returns a single process.

        Call early: with NCCL the others wait 15 seconds for rank 0. Raises RuntimeError when they cannot be reached.
        """
        if "MLX_RANK" not in os.environ:
            return cls()
        # MLX tries NCCL only under the backend "any" or when it is named.
        group = mx.distributed.init(strict=True, backend="nccl" if "NCCL_HOST_IP" in os.environ else "any")
        return cls(group.rank(), group.size())

    @property
    def first(self) -> bool:
        """Whether this is rank 0; true for a single process."""
        return self.index == 0

    def gather(self, value: int) -> list[int]:
        """The values of all processes, by rank. Every process has to call this."""
        if self.count == 1:
            return [value]
        # A sum with one slot per rank: every backend has all_sum.
        slots = mx.zeros(self.count, dtype=mx.int32)
        slots[self.index] = value
        return cast("list[int]", mx.distributed.all_sum(slots).tolist())

    def mean(self, loss: mx.array, gradients: Gradients) -> tuple[mx.array, Gradients]:
        """Loss and gradients averaged over all processes; NaN for all if one has NaN."""
        if self.count == 1:
            return loss, gradients
        return mx.distributed.all_sum(loss) / self.count, cast("Gradients", average_gradients(gradients))
