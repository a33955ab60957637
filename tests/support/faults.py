"""Faults planted in the engine's cache: a position off by one, a stale key or value, a wrong mask.

They act only in batches, as real faults of the engine would; a cache of one row stays correct.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

from service.engine.kv.cache import RowCache
from service.engine.kv.layer import RowLayer
from service.engine.kv.paged_layer import PagedLayer
from service.engine.kv.rectangle_layer import RectangleLayer
from service.engine.strategy import PAGE

MASKS: dict[str, Callable[[mx.array, mx.array], mx.array]] = {
    "mask shows the future": lambda key, query: key <= query + 1,
    "mask hides the token itself": lambda key, query: (key < query) | (key == 0),
    "mask hides the token before": lambda key, query: (key <= query) & (key != query - 1),
    "mask hides the first token": lambda key, query: (key <= query) & ((key > 0) | (query == 0)),
}
KINDS = ("position one on", "position one back", "stale key", "stale value", *MASKS)


@dataclass(frozen=True)
class Fault:
    """layer: index among the attention layers; row: of the batch; None: all."""

    kind: str
    layer: int | None
    row: int | None


def plant(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    """Give every RowCache created from now on this fault."""
    start: Any = RowLayer.offset.fget  # pyright: ignore[reportFunctionMemberAccess]
    init, written, sound = RowCache.__init__, RectangleLayer._append, False

    def numbered(cache: RowCache, model: Any, rows: int, **more: Any) -> None:
        init(cache, model, rows, **more)
        for i, layer in enumerate(cache.attention):
            layer.number = i  # pyright: ignore[reportAttributeAccessIssue]

    def hit(layer: Any) -> mx.array | None:
        """The faulty rows, or None if this layer is correct."""
        rows = len(layer.lengths.host)
        if rows < 2 or fault.layer not in (None, layer.number):
            return None
        return mx.array([fault.row in (None, row) for row in range(rows)])

    def starts(layer: Any) -> mx.array:
        return layer.lengths.starts(layer.ahead)

    def offset(layer: Any) -> Any:
        rows = None if sound else hit(layer)
        by = 1 if fault.kind == "position one on" else -1
        return start(layer) if rows is None else starts(layer) + by * rows.astype(mx.int32)

    def soundly(call: Callable[..., Any]) -> Callable[..., Any]:
        """Positions are wrong only for RoPE."""

        def within(*positional: Any, **named: Any) -> Any:
            nonlocal sound
            sound = True
            try:
                return call(*positional, **named)
            finally:
                sound = False

        return within

    def held_at(layer: Any, at: mx.array, which: int) -> mx.array | None:
        """What the rows' slots at positions `at` (B,) hold: keys (0) or values (1), (B, heads, 1, dims)."""
        if isinstance(layer, PagedLayer):
            layers = layer._pages.pool.layers
            array = layers[layer.slot][which] if layer.slot < len(layers) else None
            if array is None:
                return None
            numbers = mx.take_along_axis(layer.table, (at // PAGE)[:, None], axis=1)[:, 0]
            return array[numbers, :, at % PAGE][:, :, None]
        array = (layer.keys, layer.values)[which]
        if array is None:
            return None
        # With room for the position behind the last one.
        room = mx.pad(array[: at.size], [(0, 0), (0, 0), (0, 1), (0, 0)])
        return mx.take_along_axis(room, mx.minimum(at, array.shape[2])[:, None, None, None], axis=2)

    def stale(update: Callable[..., Any]) -> Callable[..., Any]:
        which = 0 if fault.kind == "stale key" else 1

        def updated(layer: Any, keys: mx.array, values: mx.array) -> Any:
            rows, new = hit(layer), [keys, values]
            before = None if rows is None else held_at(layer, starts(layer), which)
            if rows is not None and before is not None:
                fresh = new[which]
                first = mx.where(rows[:, None, None, None], before.astype(fresh.dtype), fresh[:, :, :1])
                new[which] = mx.concatenate([first, fresh[:, :, 1:]], axis=2)
            return update(layer, *new)

        return updated

    def masked(make_mask: Callable[..., Any]) -> Callable[..., Any]:
        def made(layer: Any, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
            rows, right = hit(layer), make_mask(layer, N, return_array, window_size)
            if rows is None:
                return right
            width = right.shape[-1] if isinstance(right, mx.array) else layer.lengths.longest + layer.ahead + N
            key = mx.arange(width)
            query = (starts(layer)[:, None] + mx.arange(N))[:, None, :, None]
            wrong = MASKS[fault.kind](key, query)
            if isinstance(right, mx.array):
                return mx.where(rows[:, None, None, None], wrong, right)
            return mx.where(rows[:, None, None, None], wrong, key <= query)

        return made

    patch.setattr(RowCache, "__init__", numbered)
    if fault.kind.startswith("position"):
        patch.setattr(RowLayer, "offset", property(offset))
        patch.setattr(RectangleLayer, "_append", soundly(written))
        patch.setattr(RectangleLayer, "make_mask", soundly(RectangleLayer.make_mask))
        return
    for kind in (RectangleLayer, PagedLayer):
        if fault.kind.startswith("stale"):
            patch.setattr(kind, "update_and_fetch", stale(kind.update_and_fetch))
        else:
            patch.setattr(kind, "make_mask", masked(kind.make_mask))
