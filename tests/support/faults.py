"""Faults planted in the engine's cache: a position off by one, a stale key or value, a wrong mask.

They act only in batches, as real faults of the engine would; a cache of one row stays correct.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

from service.engine.kv.cache import RowCache, RowLayer

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
    init, written, make_mask, update = (
        RowCache.__init__,
        RowLayer._append,
        RowLayer.make_mask,
        RowLayer.update_and_fetch,
    )
    sound = False

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

    def stale(layer: Any, keys: mx.array, values: mx.array) -> Any:
        rows, held = hit(layer), layer.keys if fault.kind == "stale key" else layer.values
        if rows is not None and held is not None:
            new = keys if fault.kind == "stale key" else values
            at = mx.broadcast_to(starts(layer)[:, None, None, None], (*new.shape[:2], 1, new.shape[3]))
            room = mx.pad(held[: new.shape[0]], [(0, 0), (0, 0), (0, new.shape[2] + 1), (0, 0)])
            before = mx.take_along_axis(room, at, axis=2).astype(new.dtype)
            first = mx.where(rows[:, None, None, None], before, new[:, :, :1])
            new = mx.concatenate([first, new[:, :, 1:]], axis=2)
            keys, values = (new, values) if fault.kind == "stale key" else (keys, new)
        return update(layer, keys, values)

    def masked(layer: Any, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
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

    patch.setattr(RowCache, "__init__", numbered)
    if fault.kind.startswith("position"):
        patch.setattr(RowLayer, "offset", property(offset))
        patch.setattr(RowLayer, "_append", soundly(written))
        patch.setattr(RowLayer, "make_mask", soundly(make_mask))
    elif fault.kind.startswith("stale"):
        patch.setattr(RowLayer, "update_and_fetch", stale)
    else:
        patch.setattr(RowLayer, "make_mask", masked)
