"""Buffers for the keys and values of a batch: arrays (slots, heads, capacity, dims) that rows join and leave in place. On CUDA,
rows have `pages` instead.

The batch's rows occupy the first slots, and a row's positions the first positions of its slot. The rest is spare. Only rows
that move are copied (why: docs/decisions/engine.md, "Batches on a CPU and Metal grow and shrink in place"). MLX writes in place
only if nothing else refers to the array. Otherwise it copies the array, which takes time but does not change the result.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import mlx.core as mx

SPARE = 4
"""One spare slot is allocated per this many rows."""
PART = 2**27
"""Bytes of new buffers computed at a time when a batch grows, joins others or shrinks; more if one layer is larger. The old and
new buffers of that many layers coexist."""


def grow(buffer: mx.array | None, like: mx.array, capacity: int) -> mx.array:
    """`buffer` with at least `capacity` positions; new positions are zeros. None: a new buffer with the rows, heads and dims of
    `like`."""
    have = 0 if buffer is None else buffer.shape[2]
    if buffer is not None and capacity <= have:
        return buffer
    rows, heads, _, dims = like.shape
    slots, more = rows if buffer is None else buffer.shape[0], capacity - have
    extra = mx.zeros((slots, heads, more, dims), dtype=like.dtype)
    return extra if buffer is None else mx.concatenate([buffer, extra], axis=2)


def write(buffer: mx.array, new: mx.array, start: int) -> mx.array:
    """Write new (B, heads, N, dims) to the first B slots, starting at position `start` of each row. Returns the buffer."""
    rows, _, count, _ = new.shape
    if new.shape == buffer.shape:
        # MLX would use `new` itself as the buffer, whatever its memory layout.
        return mx.contiguous(new.astype(buffer.dtype))
    buffer[:rows, :, start : start + count] = new
    return buffer


def scatter(buffer: mx.array, new: mx.array, rows: mx.array, heads: mx.array, positions: mx.array) -> mx.array:
    """Write new (B, heads, N, dims) to slots rows (B, 1, 1), heads (1, heads, 1) and positions (B, 1, N), all int32, because
    MLX would otherwise create index arrays in every call. Returns the buffer."""
    buffer[rows, heads, positions] = new
    return buffer


def join_rows(
    buffers: Sequence[mx.array | None], rows: Sequence[int], slots: Sequence[int], size: int
) -> mx.array | None:
    """Write the first rows[i] slots of each buffer except the first, row after row, to the given slots of the first buffer,
    which then has `size` rows.

    None among `buffers` stands for a buffer without positions; its rows become zeros. Returns None if all are None.
    """
    like = next((each for each in buffers if each is not None), None)
    if like is None:
        return None
    first, top = buffers[0], max(each.shape[2] for each in buffers if each is not None)
    if first is None and rows[1:] == [size] and (only := buffers[1]) is not None and list(slots) == list(range(size)):
        return only[:size]
    if first is None or first.shape[0] < size or first.shape[2] < top:
        first = _grown(first, like, size, top)
    at = 0
    for each, count in zip(buffers[1:], rows[1:], strict=True):
        places, at = slots[at : at + count], at + count
        if each is not None:
            for start, end in _runs(places):
                first[places[start] : places[start] + end - start, :, : each.shape[2]] = each[start:end]
    return first


def slots(rows: int) -> int:
    """Slots of a buffer that grows to `rows` rows."""
    return rows + rows // SPARE


def _grown(buffer: mx.array | None, like: mx.array, size: int, top: int) -> mx.array:
    """A buffer for `size` rows and `top` positions with the contents of `buffer`, padded with zeros."""
    made = mx.zeros((slots(size), like.shape[1], top, like.shape[3]), dtype=like.dtype)
    if buffer is not None:
        rows = min(size, buffer.shape[0])
        made[:rows, :, : buffer.shape[2]] = buffer[:rows]
    return made


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """The start and end of each run of consecutive values in `slots`."""
    starts = [i for i in range(len(slots)) if i == 0 or slots[i] != slots[i - 1] + 1]
    return list(zip(starts, [*starts[1:], len(slots)], strict=True))


def compaction_order(rows: int, leaving: Collection[int]) -> list[int]:
    """The slot that each remaining row comes from when some of `rows` rows leave. The last rows move into the freed slots; the
    others stay in place."""
    count, last = rows - len(leaving), rows
    order: list[int] = []
    for row in range(count):
        if row in leaving:
            last = next(other for other in range(last - 1, count - 1, -1) if other not in leaving)
        order.append(last if row in leaving else row)
    return order


def copy_moved(
    buffers: Sequence[mx.array | None], rows: Sequence[int], top: int, *, tight: bool = False
) -> list[mx.array | None]:
    """Copies of the rows that change slots in `keep_rows`. They must be computed first, because an array that is still read
    from cannot be written in place."""
    sources = [row for slot, row in enumerate(rows) if row != slot]
    if not sources:
        return [None] * len(buffers)
    at = mx.array(sources, dtype=mx.int32)
    return [
        each[at] if each is not None and not tight and _stays_in_place(each, rows, top) else None for each in buffers
    ]


def keep_rows(
    buffers: Sequence[mx.array | None],
    copies: Sequence[mx.array | None],
    rows: Sequence[int],
    top: int,
    *,
    tight: bool = False,
) -> list[mx.array | None]:
    """Keep these rows of each buffer, in this order, with capacity for at least `top` positions. copies: from `copy_moved`.

    A buffer is replaced by a smaller one if less than half of its slots or positions would be in use. tight: replace every
    buffer by one without spare slots.
    """
    moved, order = [slot for slot, row in enumerate(rows) if row != slot], mx.array(list(rows), dtype=mx.int32)
    remaining: list[mx.array | None] = []
    for buffer, copy in zip(buffers, copies, strict=True):
        each = buffer
        if each is not None and copy is not None:
            for i, slot in enumerate(moved):
                each[slot : slot + 1] = copy[i : i + 1]
        elif each is not None and (tight or not _stays_in_place(each, rows, top)):
            each = mx.contiguous(each[:, :, :top][order])
        remaining.append(each if rows and top else None)
    return remaining


def _stays_in_place(buffer: mx.array, rows: Sequence[int], top: int) -> bool:
    return 2 * len(rows) >= buffer.shape[0] and 2 * top >= buffer.shape[2]
