"""Several processes that train one model together, as `mlx.launch` starts them: each on its own share of the data. Gradients
are averaged before anything is decided on them, so that all processes decide alike and have the same weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx.nn import average_gradients

Gradients = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ranks:
    """index: this process's rank among the `count` processes. With a count of 1 nothing is ever sent."""

    index: int = 0
    count: int = 1

    @classmethod
    def join(cls) -> Ranks:
        """Join the launch that this process is part of; a single process outside one.

        To be called early: with NCCL the others wait 15 seconds for rank 0. Raises RuntimeError when they cannot be reached.
        """
        if "MLX_RANK" not in os.environ:
            return cls()
        # MLX tries NCCL by itself only where it tries everything.
        group = mx.distributed.init(strict=True, backend="nccl" if "NCCL_HOST_IP" in os.environ else "any")
        return cls(group.rank(), group.size())

    @property
    def first(self) -> bool:
        """Whether this is rank 0; true of a single process."""
        return self.index == 0

    def gather(self, value: int) -> list[int]:
        """The values of all processes, by rank. All of them have to call this."""
        if self.count == 1:
            return [value]
        # A sum of one slot each: every backend has all_sum.
        slots = mx.zeros(self.count, dtype=mx.int32)
        slots[self.index] = value
        return cast("list[int]", mx.distributed.all_sum(slots).tolist())

    def mean(self, loss: mx.array, gradients: Gradients) -> tuple[mx.array, Gradients]:
        """Loss and gradients averaged over all processes; NaN for all where one has NaN."""
        if self.count == 1:
            return loss, gradients
        return mx.distributed.all_sum(loss) / self.count, cast("Gradients", average_gradients(gradients))
