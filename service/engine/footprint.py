"""What a pair takes of the device's memory, from shapes alone: no weight is read."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from service.engine.activations import Activations
from service.engine.folding import adapter_bytes
from service.engine.kv.budget import Budget, PoolRow, RowBytes, prefix_bytes
from service.engine.kv.cache import RowCache
from service.engine.kv.groups import most_held
from service.engine.kv.pages import Pages
from service.engine.strategy import BURST, PAGE, current
from service.engine.target import Target
from service.models.arrays import named_arrays


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the device's memory is divided that weights and MLX's cache leave. activations: bytes of a prefill's. adapters: bytes
    of the matrices of the adapter that drafts and of the next one, half of the rest at most; 0 where none is trained.
    left: bytes without those. prefix: bytes of the prefix cache, at most. budget: of keys and values."""

    activations: int
    adapters: int
    left: int
    prefix: int
    budget: Budget

    @property
    def problem(self) -> str | None:
        """Why nothing can be served so; None where it can."""
        size = self.budget.size
        if current().paged and size > (free := self.left + self.adapters):
            return f"engine.kv_budget_mb asks for {size >> 20} MiB of the device's memory, and {free >> 20} are free"
        if self.budget.longest() == 0:
            return (
                f"{size >> 20} MiB are left for keys and values, too little for a request: see engine.kv_budget_mb and "
                "engine.prefix_cache_mb"
            )
        return None


def plan_memory(
    target: nn.Module,
    draft: nn.Module | None,
    left: int,
    *,
    kv_mb: int,
    prefix_mb: int | None,
    chunk: int | None,
    training: int,
    rank: int,
) -> MemoryPlan:
    """Divide `left` bytes as the settings ask. kv_mb, prefix_mb, chunk: `engine.kv_budget_mb`, `engine.prefix_cache_mb` and
    `engine.prefill_chunk`. training: bytes of a run; 0: there are none. rank: of
    adapters. Raises PairError."""
    tokens = BURST * (chunk or current().prefill_chunk)
    activations = max(Activations.of(model).peak_bytes(tokens) for model in (target, draft) if model is not None)
    left = max(left - activations, 0)
    adapters = min(2 * adapter_bytes(draft, rank), left // 2) if draft is not None and training else 0
    left -= adapters
    prefix, row = prefix_bytes(prefix_mb, left), row_bytes(target, draft)
    budget = Budget.of(kv_mb, left, prefix=prefix, training=training, row=row, chunk=chunk)
    return MemoryPlan(activations, adapters, left, prefix, budget)


def weight_bytes(*models: nn.Module | None) -> int:
    """Bytes of all weights of these models; arrays that several of them have count once."""
    arrays = {
        id(array): array.nbytes
        for model in models
        if model is not None
        for _, array in named_arrays(model.parameters())
    }
    return sum(arrays.values())


def row_bytes(target: nn.Module, draft: nn.Module | None) -> RowBytes:
    """What rows take: keys and values of target and draft, and the target's features where the draft reads them. States of
    recurrent layers do not grow with the row and are left out. Only shapes are computed. Raises PairError."""
    both, tokens = Target(target, draft), mx.zeros((1, 1), dtype=mx.int32)
    cache = both.cache(1)
    both(tokens, cache)
    caches = [cache]
    if draft is not None:
        caches.append(RowCache(draft, 1))
        draft(tokens, cache=caches[1].layers)
    windows: dict[int, int] = {}
    for most, size in (each for one in caches for each in one.storage.window_bytes().items()):
        windows[most] = windows.get(most, 0) + size
    position = sum(one.storage.block_bytes for one in caches) // PAGE
    pools = tuple(PoolRow(*_of_pool(one.pages)) for one in caches if one.pages is not None)
    return RowBytes(position - sum(windows.values()), tuple(windows.items()), pools)


def _of_pool(pages: Pages) -> tuple[int, tuple[int | None, ...]]:
    if not pages.pool.page_bytes:
        # All layers of the model are recurrent.
        return 0, ()
    return pages.pool.page_bytes, tuple(None if n is None else most_held(n) for n in pages.groups.windows)
