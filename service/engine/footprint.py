"""The device memory that a pair takes, computed from shapes only: no weights are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from service.engine.activations import Activations, argument
from service.engine.folding import adapter_bytes
from service.engine.kv.budget import Budget, PoolRow, RowBytes, prefix_bytes, usable
from service.engine.kv.cache import RowCache
from service.engine.kv.groups import most_held
from service.engine.kv.pages import Pages
from service.engine.kv.rectangle_layer import RectangleLayer
from service.engine.strategy import BURST, PAGE, current
from service.engine.target import Target
from service.models.arrays import named_arrays

STATES = 3
"""Copies of a recurrent state per row: the state, the one it can be restored to, and the next one during computation."""
LOGITS = 4
"""Vocabulary-wide arrays per token that a round verifies or drafts: logits, their distribution, and the intermediates of
sampling and evidence."""
SCORES = 3
"""Arrays of attention scores that coexist if no kernel computes attention in one pass."""
FUSED_DIMS = frozenset({64, 80, 128})
"""Head dimensions for which MLX's Metal kernel computes attention over a prompt without storing scores
(mlx/backend/metal/scaled_dot_product_attention.cpp)."""
_FLOAT = 4
CACHE_SHARE = 1 / 8
"""Share of the memory free after loading the models that MLX may keep as freed memory for reuse (`device.cache_limit` at
most)."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the device memory that the weights leave is divided. All in bytes.

    cache: freed memory that MLX may keep for reuse. activations: of a prefill. adapters: what the drafting adapter and the next
    one add to the draft, at most half of the rest; 0 if none is trained. left: the remainder. idle: the part of it that a
    training run may take while the server is idle. training: what a run takes. prefix: limit of the prefix cache, which yields
    to rows. budget: for rows and cached prefixes.
    """

    cache: int
    activations: int
    adapters: int
    left: int
    idle: int
    training: int
    prefix: int
    budget: Budget

    @property
    def spare(self) -> int:
        """Bytes that a run may take but rows may not, if `engine.kv_budget_mb` leaves some."""
        return max(self.idle - self.budget.size, 0)

    @property
    def problem(self) -> str | None:
        """Why this plan cannot serve requests; None if it can."""
        size = self.budget.size
        if current().paged and size > (free := self.left + self.adapters):
            return f"engine.kv_budget_mb asks for {size >> 20} MiB of the device's memory, and {free >> 20} are free"
        if self.budget.longest() == 0:
            return f"{size >> 20} MiB are left for keys and values, too little for a request: see engine.kv_budget_mb"
        return None


def plan_memory(
    target: nn.Module,
    draft: nn.Module | None,
    free: int,
    *,
    cache: int,
    kv_mb: int,
    prefix_mb: int | None,
    chunk: int | None,
    proposed: int,
    rank: int | None = None,
    training: Callable[[int], int] = lambda idle: 0,
) -> MemoryPlan:
    """Divides the bytes that are free once the models are loaded.

    cache: `device.cache_limit`. kv_mb, prefix_mb, chunk: `engine.kv_budget_mb`, `engine.prefix_cache_mb` and
    `engine.prefill_chunk`. proposed: maximum tokens that a round verifies per row, besides one. rank: of the adapters that are
    trained; None: no training. training: bytes of a run, given those that it may take while idle. With paged rows this amount
    is set aside (`usable`); elsewhere a run borrows it while it works. Raises PairError.
    """
    if not current().paged:
        cache = min(cache, int(CACHE_SHARE * free))
    tokens = BURST * (chunk or current().prefill_chunk)
    activations = max(Activations.of(model).peak_bytes(tokens) for model in (target, draft) if model is not None)
    left = max(free - cache - activations, 0)
    adapters = min(2 * adapter_bytes(draft, rank), left // 2) if draft is not None and rank is not None else 0
    left -= adapters
    row = row_bytes(target, draft, proposed=proposed, chunk=chunk)
    idle = left if current().paged else usable(left, training=0)
    run = training(idle)
    budget = Budget.of(kv_mb, left, training=run, row=row, chunk=chunk)
    return MemoryPlan(cache, activations, adapters, left, idle, run, prefix_bytes(prefix_mb, budget.size), budget)


def weight_bytes(*models: nn.Module | None) -> int:
    """Bytes of all weights of these models; shared arrays count once."""
    arrays = {
        id(array): array.nbytes
        for model in models
        if model is not None
        for _, array in named_arrays(model.parameters())
    }
    return sum(arrays.values())


def row_bytes(
    target: nn.Module, draft: nn.Module | None, *, proposed: int | None = None, chunk: int | None = None
) -> RowBytes:
    """What rows take: keys and values of target and draft, the target's features if the draft reads them, recurrent states and,
    with rectangles, a round's logits and attention scores. proposed: maximum tokens that a round verifies per row, besides one;
    None: leave rounds out. chunk: tokens of a prefill's call; None: what suits the device. Only shapes are computed. Raises
    PairError."""
    both, tokens = Target(target, draft), mx.zeros((1, 1), dtype=mx.int32)
    cache = both.cache(1)
    widths = [both(tokens, cache).shape[-1]]
    caches = [cache]
    if draft is not None:
        caches.append(RowCache(draft, 1))
        widths.append(draft(tokens, cache=caches[1].layers).shape[-1])
    windows: dict[int, int] = {}
    for most, size in (each for one in caches for each in one.storage.window_bytes().items()):
        windows[most] = windows.get(most, 0) + size
    position = sum(one.storage.block_bytes for one in caches) // PAGE
    pools = tuple(PoolRow(*_of_pool(one.pages)) for one in caches if one.pages is not None)
    states = STATES * sum(one.state_bytes for one in caches)
    if current().paged:
        return RowBytes(position - sum(windows.values()), tuple(windows.items()), pools, fixed=states)
    logits = 0 if proposed is None else _FLOAT * LOGITS * (1 + proposed) * sum(widths)
    layers = [layer for one in caches for layer in cast("list[RectangleLayer]", one.attention)]
    models = [model for model in (target, draft) if model is not None]
    return RowBytes(
        position - sum(windows.values()),
        tuple(windows.items()),
        layer=max((layer.position_bytes for layer in layers), default=0),
        fixed=states + logits,
        scores=(chunk or current().prefill_chunk) * max(map(_score_bytes, models, caches)),
    )


def _score_bytes(model: nn.Module, cache: RowCache) -> int:
    """Bytes of attention scores stored per query and key; 0 if a kernel stores none."""
    keys = next((k for layer in cache.attention if (k := cast("RectangleLayer", layer).keys) is not None), None)
    if keys is None or (current().launch_ahead and keys.shape[3] in FUSED_DIMS):
        return 0
    heads = argument(model, ("num_attention_heads", "n_heads", "num_heads", "n_head")) or keys.shape[1]
    return SCORES * heads * keys.dtype.size


def _of_pool(pages: Pages) -> tuple[int, tuple[int | None, ...]]:
    if not pages.pool.page_bytes:
        # All layers of the model are recurrent.
        return 0, ()
    return pages.pool.page_bytes, tuple(None if n is None else most_held(n) for n in pages.groups.windows)
