"""Rows join and leave the cache in place: remaining rows keep their contents, and only moved rows are copied."""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.kv.buffers import (
    SPARE,
    compaction_order,
    copy_moved,
    join_rows,
    keep_rows,
    scatter,
    write,
)
from service.engine.strategy import CPU, METAL, STEP, using


def kept(buffers: Sequence[mx.array | None], rows: list[int], top: int) -> list[mx.array | None]:
    copies = copy_moved(buffers, rows, top)
    mx.eval([copy for copy in copies if copy is not None])
    return keep_rows(buffers, copies, rows, top)


def join(buffers: Sequence[mx.array | None], rows: Sequence[int]) -> mx.array | None:
    """Behind the rows of the first."""
    return join_rows(buffers, rows, range(rows[0], sum(rows)), sum(rows))


def filled(rows: int, capacity: int = STEP, first: int = 1) -> mx.array:
    """Every row is filled with its own number, from `first` on."""
    return mx.zeros((rows, 2, capacity, 4)) + mx.arange(first, first + rows)[:, None, None, None]


def numbers(buffer: mx.array | None, rows: int) -> list[float]:
    assert buffer is not None
    seen = np.array(buffer)[:rows, 0, 0, 0]
    assert (np.array(buffer)[:rows] == seen[:, None, None, None]).all(), "rows are whole"
    return seen.tolist()


@given(st.integers(0, 12).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, max(n - 1, 0)), max_size=n))))
def test_rows_at_the_end_move_into_freed_slots(case: tuple[int, set[int]]) -> None:
    rows, leaving = case[0], {row for row in case[1] if row < case[0]}
    order = compaction_order(rows, leaving)
    assert sorted(order) == [row for row in range(rows) if row not in leaving]
    moved = [row for place, row in enumerate(order) if place != row]
    assert len(moved) == sum(row < len(order) for row in leaving), "no more moves than holes"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 5), st.sets(st.integers(0, 7), min_size=1)), max_size=12))
def test_rows_keep_their_contents_as_others_join_and_leave(events: list[int | set[int]]) -> None:
    buffer: mx.array | None = None
    contents: list[float] = []
    named = 1
    for event in events:
        if isinstance(event, int):
            buffer = join([buffer, filled(event, first=named)], [len(contents), event])
            contents += range(named, named + event)
            named += event
        else:
            order = compaction_order(len(contents), {row for row in event if row < len(contents)})
            (buffer,) = kept([buffer], order, STEP if order else 0)
            contents = [contents[row] for row in order]
        assert buffer is not None or not contents
        if buffer is not None:
            assert numbers(buffer, len(contents)) == contents
            assert buffer.shape[0] <= max(2 * len(contents), len(contents) + len(contents) // SPARE)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.integers(0, 7), min_size=1), min_size=1, max_size=8))
def test_rows_join_in_any_free_slots(batches: list[set[int]]) -> None:
    """Each set of slots gets new rows, in an order of their own."""
    buffer: mx.array | None = None
    contents: dict[int, float] = {}
    for number, places in enumerate(batches):
        slots = sorted(places, key=lambda slot: (slot * 5) % 8)
        new = filled(len(slots), first=10 * number + 1)
        size = max([*contents, *slots]) + 1
        buffer = join_rows([buffer, new], [max(contents, default=-1) + 1, len(slots)], slots, size)
        contents |= {slot: 10.0 * number + 1 + i for i, slot in enumerate(slots)}
        found = numbers(buffer, size)
        assert [found[slot] for slot in contents] == list(contents.values())


def test_capacity_is_reused_and_released() -> None:
    # On CUDA capacities are others, of rows in pages.
    with using(CPU):
        batch = join([filled(8), filled(4, first=9)], [8, 4])
        assert batch is not None and batch.shape[0] == 12 + 12 // SPARE
        (buffer,) = kept([batch], compaction_order(12, {2, 5}), STEP)
        assert buffer is not None and buffer.shape[0] == 15 and numbers(buffer, 10) == [1, 2, 12, 4, 5, 11, 7, 8, 9, 10]
        again = join([buffer, filled(3, first=20)], [10, 3])
        assert again is buffer, "the spare capacity is enough"
        assert numbers(again, 13)[10:] == [20, 21, 22]
        (few,) = kept([again], [12, 0], STEP)
        assert few is not None and few.shape[0] == 2 and numbers(few, 2) == [22, 1]
        wide = join([None, filled(2, capacity=4 * STEP)], [0, 2])
        (short,) = kept([wide], [0, 1], STEP)
        assert short is not None and short.shape[2] == STEP


@pytest.mark.parametrize("starts", [[3, 3, 3], [0, 7, 40]])
def test_slots_not_in_use_are_not_overwritten(starts: list[int]) -> None:
    """Three of five slots are in use."""
    new = mx.ones((3, 2, 2, 4)) * 9
    if starts == [3, 3, 3]:
        buffer = np.array(write(filled(5), new, 3))
    else:
        positions = (mx.array(starts)[:, None] + mx.arange(2))[:, None]
        buffer = np.array(scatter(filled(5), new, mx.arange(3)[:, None, None], mx.arange(2)[None, :, None], positions))
    for row, begin in enumerate(starts):
        assert (buffer[row, :, begin : begin + 2] == 9).all()
        assert (np.delete(buffer[row], [begin, begin + 1], axis=1) == row + 1).all()


def test_a_buffer_that_is_filled_at_once_is_laid_out_as_any_other() -> None:
    new = mx.zeros((1, STEP, 2, 4)).swapaxes(1, 2)
    whole = write(mx.zeros(new.shape, dtype=mx.float32), new, 0)
    (short,) = kept([mx.zeros((2, 2, 4 * STEP, 4))], [0], STEP)
    mx.eval(whole, short)
    assert (
        short is not None
        and memoryview(cast("Any", whole)).c_contiguous
        and memoryview(cast("Any", short)).c_contiguous
    )


def test_only_moved_rows_are_copied() -> None:
    """Where batches are of any size: peak memory stays below that of a second batch."""
    with using(METAL):
        batch = [filled(16, capacity=8 * STEP) for _ in range(8)]
        mx.eval(batch)
        size = sum(one.nbytes for one in batch)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        left = kept(batch, compaction_order(16, {3, 9}), 8 * STEP)
        batch.clear()
        mx.eval([one for one in left if one is not None])
    assert mx.get_peak_memory() - before < 0.3 * size
    assert numbers(left[0], 14)[3] == 16.0 and numbers(left[7], 14)[9] == 15.0
