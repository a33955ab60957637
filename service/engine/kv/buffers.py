"""The memory of a batch's keys and values: arrays (R, heads, capacity, dims) with room for more rows and positions than are in
use, which are the first of each.

Rows come and go in place. To copy all of them for each, 180 MB where 16 rows of the default target hold 200 positions, is a
third of a round on two cores. MLX writes into an array where it is unless something else still reads it; then it copies, which
costs time and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import mlx.core as mx

from service.engine import device
from service.engine.strategy import current

STEP = 128
"""Positions allocated at a time."""
SPARE = 4
"""One row more is allocated for so many."""


def capacity(top: int) -> int:
    """Positions allocated for `top` positions."""
    return -(-top // STEP) * STEP


def grown(held: mx.array | None, like: mx.array, top: int) -> mx.array:
    """`held` with room for `top` positions (new room is zeros), allocated in steps; None: with as many rows as `like`."""
    have = 0 if held is None else held.shape[2]
    if held is not None and top <= have:
        return held
    rows, heads, _, dims = like.shape
    extra = mx.zeros((rows if held is None else held.shape[0], heads, capacity(top) - have, dims), dtype=like.dtype)
    return extra if held is None else mx.concatenate([held, extra], axis=2)


def written(held: mx.array, new: mx.array, start: int) -> mx.array:
    """`held` with new (B, heads, N, dims) in the first B rows, at positions from `start` on."""
    rows, _, count, _ = new.shape
    held[:rows, :, start : start + count] = new
    return held


def scattered(held: mx.array, new: mx.array, rows: mx.array, positions: mx.array) -> mx.array:
    """`held` with new (B, heads, N, dims) in rows (B, 1) at positions (B, N)."""
    held[rows, :, positions] = new.swapaxes(1, 2)
    return held


def joined(held: Sequence[mx.array | None], rows: Sequence[int]) -> mx.array | None:
    """The rows in use of several arrays, one below the other, in the first of them where they fit. None: an array that holds no
    position yet."""
    like = next((one for one in held if one is not None), None)
    if like is None:
        return None
    first, total = held[0], sum(rows)
    top = max(one.shape[2] for one in held if one is not None)
    if first is not None and rows[0] and first.shape[0] >= total and first.shape[2] == top:
        begin = rows[0]
        for one, count in zip(held[1:], rows[1:], strict=True):
            if one is not None:
                first[begin : begin + count, :, : one.shape[2]] = one[:count]
            begin += count
        return first
    parts: list[mx.array] = []
    for one, count in zip(held, rows, strict=True):
        if count:
            part = mx.zeros((count, *like.shape[1:]), dtype=like.dtype) if one is None else one[:count]
            parts.append(grown(part, part, top))
    if spare := total // SPARE:
        parts.append(mx.zeros((spare, like.shape[1], top, like.shape[3]), dtype=like.dtype))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)


def closed(rows: int, gone: Collection[int]) -> list[int]:
    """Which rows of a batch stay when some go, in the order that moves fewest: the last ones come into the places of those."""
    count, last = rows - len(gone), rows
    staying: list[int] = []
    for row in range(count):
        if row in gone:
            last = next(other for other in range(last - 1, count - 1, -1) if other not in gone)
        staying.append(last if row in gone else row)
    return staying


def kept(held: Sequence[mx.array | None], rows: Sequence[int], top: int) -> list[mx.array | None]:
    """These rows of each array, in this order, with room for `top` positions at least. Only those that change places are
    copied; where less than half of an array would be in use, all that stays is, and the rest given back."""
    moved = [(place, row) for place, row in enumerate(rows) if row != place]
    sources = mx.array([row for _, row in moved], dtype=mx.int32)
    # Apart and at once: an array from which something is still to be read cannot be written in place.
    copies = [one[sources] if moved and _stays(one, rows, top) and one is not None else None for one in held]
    (device.launch if current().launch_ahead else device.wait)([copy for copy in copies if copy is not None])
    found: list[mx.array | None] = []
    for one, copy in zip(held, copies, strict=True):
        if one is not None and copy is not None:
            for i, (place, _) in enumerate(moved):
                one[place : place + 1] = copy[i : i + 1]
        elif one is not None and not _stays(one, rows, top):
            one = one[mx.array(list(rows), dtype=mx.int32)][:, :, :top]
        found.append(one if rows and top else None)
    return found


def _stays(held: mx.array | None, rows: Sequence[int], top: int) -> bool:
    return held is not None and 2 * len(rows) >= held.shape[0] and 2 * top >= held.shape[2]
