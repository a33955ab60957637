"""Attention over rows of unlike lengths: which calls take it, and what it computes."""

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, RotatingKVCache
from numpy.typing import NDArray

from service.core import Prompt, Sampling
from service.engine import attention
from service.engine.decoder import Decoder
from service.engine.kv.cache import RowCache
from service.engine.kv.paged_layer import PagedLayer
from service.engine.kv.pool import scatter, write_in_place
from service.engine.request import Request
from service.engine.strategy import CUDA, FEWEST, METAL, PAGE, using
from tests.support.cuda import NEEDS_CUDA, row_calls
from tests.support.oracle import naive, tiny_llama

V = 97
SHAPES = [
    # rows, rows for which there are pages, query heads, heads, tokens, positions at most, dimensions
    (1, 1, 9, 3, 1, 128, 64),
    (4, 5, 9, 3, 5, 384, 64),
    (3, 3, 32, 8, 8, 640, 128),
    (2, 3, 8, 8, 16, 640, 96),
    (2, 2, 16, 4, 4, 4096, 128),
    (1, 1, 9, 3, 32, 2304, 64),
    (2, 2, 8, 2, 5, 384, 256),
    (3, 3, 4, 4, 3, 200, 80),
    (1, 1, 4, 1, 1, 9000, 64),
    (16, 16, 16, 8, 2, 5000, 64),
]


def pools(
    random: np.random.Generator, ends: Sequence[int], *, rows: int, positions: int, shapes: Sequence[Sequence[int]]
) -> tuple[list[NDArray[np.float32]], NDArray[np.int32]]:
    """Pools (pages, heads, PAGE, dims) for each of shapes (heads, dims), and the table of rows that end there, whose pages are
    in any order. There are pages for `rows` rows of so many positions; what is nobody's is NaN, page 0 too."""
    width = -(-positions // PAGE)
    free = random.permutation(np.arange(1, 1 + rows * width)).tolist()
    table = np.zeros((len(ends), width), dtype=np.int32)
    made = [np.full((1 + rows * width, heads, PAGE, dims), np.nan, dtype=np.float32) for heads, dims in shapes]
    for row, end in enumerate(ends):
        for place in range(-(-end // PAGE)):
            page = table[row, place] = free.pop()
            held = min(end - place * PAGE, PAGE)
            for pool in made:
                pool[page, :, :held] = random.normal(size=pool[page, :, :held].shape)
    return made, table


def gathered(pool: NDArray[Any], table: NDArray[np.int32], row: int) -> NDArray[Any]:
    """(heads, positions, dims) of a row."""
    _, heads, _, dims = pool.shape
    return pool[table[row]].swapaxes(0, 1).reshape(heads, -1, dims)


def expected(queries: mx.array, call: attention.RowCall, sinks: mx.array | None) -> NDArray[np.float64]:
    """In float64, a row and a query at a time."""
    q, pool_k, pool_v = (
        np.array(each.astype(mx.float32)).astype(np.float64) for each in (queries, call.keys, call.values)
    )
    starts, table, window = np.array(call.starts), np.array(call.table), call.window
    rows, heads, count, dims = q.shape
    out = np.zeros((rows, heads, count, pool_v.shape[3]))
    for row in range(rows):
        k, v = gathered(pool_k, table, row), gathered(pool_v, table, row)
        for head in range(heads):
            shared = head // (heads // k.shape[0])
            for token in range(count):
                end = int(starts[row]) + token + 1
                begin = max(end - window, 0) if window else 0
                scores = k[shared, begin:end] @ q[row, head, token] * dims**-0.5
                if sinks is not None:
                    scores = np.append(scores, float(np.array(sinks.astype(mx.float32))[head]))
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out[row, head, token] = weights[: end - begin] @ v[shared, begin:end]
    return out


def compare(run: Any, shape: Sequence[int], kind: mx.Dtype, window: int = 0, *, sinking: bool = False) -> None:
    rows, room, many, heads, count, positions, dims = shape
    random = np.random.default_rng(0)

    def normal(*size: int) -> mx.array:
        return mx.array(random.normal(size=size).astype(np.float32)).astype(kind)

    starts = random.integers(0, positions - count + 1, rows).astype(np.int32)
    both, table = pools(
        random, (starts + count).tolist(), rows=room, positions=positions, shapes=[(heads, dims), (heads, dims)]
    )
    if window:
        # The rows have given back what no query sees.
        for row, start in enumerate(starts):
            table[row, : max(start + 1 - window, 0) // PAGE] = 0
    keys, values = (mx.array(pool).astype(kind) for pool in both)
    queries, sinks = normal(rows, many, count, dims), normal(many) if sinking else None
    call = attention.RowCall(keys, values, mx.array(starts), mx.array(table), window)
    found, wanted = run(queries, call, scale=dims**-0.5, sinks=sinks), expected(queries, call, sinks)
    error = np.linalg.norm(np.array(found.astype(mx.float32)) - wanted) / np.linalg.norm(wanted)
    # MLX computes float32 on CUDA in TF32.
    whole = 2e-6 if mx.default_device().type == mx.cpu or mx.metal.is_available() else 1e-3
    assert error < {mx.float32: whole, mx.float16: 1e-3, mx.bfloat16: 4e-3}[kind]


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("sinking", [False, True])
def test_under_a_mask(window: int, sinking: bool) -> None:
    compare(attention.masked_attention, SHAPES[1], mx.float32, window, sinking=sinking)


@NEEDS_CUDA
@pytest.mark.parametrize("kind", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_by_the_kernel(shape: tuple[int, ...], kind: mx.Dtype) -> None:
    compare(attention.row_attention, shape, kind)
    compare(attention.row_attention, shape, kind, 100, sinking=True)


@pytest.mark.parametrize("width", [2 * PAGE, 4 * PAGE])
def test_rows_are_gathered_from_their_pages_without_what_is_behind_their_ends(width: int) -> None:
    """Nor what they have given back."""
    ends = [4 * PAGE, PAGE + 5, PAGE, 1, 0, 3 * PAGE]
    (pool,), table = pools(np.random.default_rng(0), ends, rows=6, positions=4 * PAGE, shapes=[(2, 16)])
    pool[0], table[5, 1] = 0.0, 0
    wanted, pool[0] = [gathered(pool, table, row) for row in range(len(ends))], np.nan
    found = np.array(attention.gather_pages(mx.array(pool), mx.array(table), mx.array(ends), width))
    assert found.shape == (len(ends), 2, width, 16)
    for row, end in enumerate(ends):
        upto = min(end, width)
        assert (found[row, :, :upto] == wanted[row][:, :upto]).all()
        assert (found[row, :, upto:] == 0).all()


@NEEDS_CUDA
@pytest.mark.parametrize("kind", [mx.float16, mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize("count", [1, 5, 70])
def test_what_is_written_and_gathered_by_kernels_is_what_would_be_by_mlx(kind: mx.Dtype, count: int) -> None:
    """Though others refer to the pool, and in whatever order new keys and values lie."""
    random, starts = np.random.default_rng(0), [0, 3, PAGE - 1, PAGE, 2 * PAGE + 7]
    ends = [start + count for start in starts]
    both, table = pools(random, ends, rows=6, positions=6 * PAGE, shapes=[(3, 64), (3, 48)])
    # What the last row has given back is nobody's.
    table[4, 0] = 0
    by_kernel, by_mlx = ([mx.array(np.nan_to_num(pool, nan=1.0)).astype(kind) for pool in both] for _ in range(2))
    new = [mx.array(random.normal(size=(5, count, 3, dims))).astype(kind).swapaxes(1, 2) for dims in (64, 48)]
    new[1] = new[1][..., ::-1]
    numbers, at, upto = mx.array(table), mx.array(starts), mx.array(ends)
    mx.eval(by_kernel, by_mlx, new)
    view = by_kernel[1][1:]
    written = write_in_place(new[0], new[1], by_kernel[0], by_kernel[1], at, numbers)
    found = [attention.gather_pages(pool, numbers, upto, 6 * PAGE, written) for pool in by_kernel]
    pools_after = [scatter(pool, each, at, numbers) for pool, each in zip(by_mlx, new, strict=True)]
    wanted = [attention.gather_pages(pool, numbers, upto, 6 * PAGE) for pool in pools_after]
    mx.eval(found, wanted, view)
    for mine, same in zip([*found, *by_kernel], [*wanted, *pools_after], strict=True):
        assert mx.array_equal(mine, same).item()
    assert mx.array_equal(view, by_kernel[1][1:]).item(), "it was not copied"


def test_ragged_rows_take_it_on_cuda_and_decode_as_the_target_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target, calls = tiny_llama(0), row_calls(monkeypatch)
    prompts = [tuple(random.Random(i).randrange(4, V) for _ in range(9 + 5 * i)) for i in range(3)]
    with using(CUDA):
        decoder = Decoder(target, None, vocabulary=V, k=0)
        rows = [Request(str(i), Prompt(p, Sampling(max_tokens=12)), frozenset(), None) for i, p in enumerate(prompts)]
        for row in rows:
            decoder.admit(row)
        calls.clear()
        while decoder.unfinished:
            decoder.round()
    # The first call as it is, one traced, the others replayed.
    assert len(calls) == 2 * len(target.layers) and None not in calls
    assert [row.output for row in rows] == [naive(target, p, Sampling(max_tokens=12)) for p in prompts]


def test_other_strategies_and_caches_keep_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    target, calls = tiny_llama(0), row_calls(monkeypatch)
    before = [int(token) for token, _ in generate_step(mx.array([5, 6, 7]), target, max_tokens=8)]
    with using(METAL):
        cache = RowCache(target, 2)
        target(mx.array([[5, 6, 7], [8, 9, 10]]), cache=cache.layers)
        cache.truncate([3, 1])
        target(mx.array([[5], [6]]), cache=cache.layers)
    assert set(calls) <= {None}
    with using(CUDA):
        RowCache(target, 1)
    assert [int(token) for token, _ in generate_step(mx.array([5, 6, 7]), target, max_tokens=8)] == before


@pytest.mark.parametrize(("window", "alone"), [(0, True), (64, True), (32, False)])
def test_a_prompt_that_is_read_at_once_is_attended_as_it_is(
    window: int, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the pool, but for what its window hides. The next tokens see what the pool holds."""
    seen: list[tuple[int, object]] = []
    fused: Any = base.scaled_dot_product_attention

    def noted(queries: mx.array, keys: mx.array, values: mx.array, *, mask: Any, **more: Any) -> mx.array:
        seen.append((keys.shape[2], mask if isinstance(mask, str) else None))
        return fused(queries, keys, values, mask=mask, **more)

    target, text = tiny_llama(0), mx.array([[4 + i % 90 for i in range(60)]])
    with using(CUDA):
        cache = RowCache(target, 1)
        for layer in cache.attention:
            layer.window = window or None
        monkeypatch.setattr(base, "scaled_dot_product_attention", noted)
        found = [target(text[:, :50], cache=cache.layers)]
        prompt = list(seen)
        cache.commit(50)
        found.append(target(text[:, 50:], cache=cache.layers))
    assert prompt == [(50, "causal") if alone else (FEWEST, None)] * len(target.layers)
    plain = [RotatingKVCache(window) if window else KVCache() for _ in target.layers]
    wanted = [target(text[:, :50], cache=plain), *(target(text[:, i : i + 1], cache=plain) for i in range(50, 60))]
    # MLX computes float32 on CUDA in TF32.
    close = 1e-4 if mx.default_device().type == mx.cpu or mx.metal.is_available() else 2e-2
    assert mx.allclose(mx.concatenate(found, axis=1), mx.concatenate(wanted, axis=1), atol=close).item()


def test_keys_that_a_model_has_changed_are_attended_as_they_are() -> None:
    target = tiny_llama(0)
    with using(CUDA):
        cache = RowCache(target, 2)
    layer = cache.attention[0]
    assert isinstance(layer, PagedLayer)
    mask = layer.make_mask(2)
    keys, values = layer.update_and_fetch(mx.ones((2, 2, 2, 8)), mx.ones((2, 2, 2, 8)))
    assert layer.row_call(keys * 2, values, mask) is None
    keys, values = layer.keys_and_values()
    assert layer.row_call(keys, values, mask) is not None
    assert layer.row_call(keys, values, mask) is None, "views that are held would make the next write copy"
