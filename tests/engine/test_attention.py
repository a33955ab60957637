"""Attention over rows of unlike lengths: which calls take it, and what it computes."""

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from numpy.typing import NDArray

from service.core import Prompt, Sampling
from service.engine import attention
from service.engine.decoder import Decoder
from service.engine.kv.cache import RowCache
from service.engine.request import Request
from service.engine.strategy import CUDA, METAL, using
from tests.support.cuda import NEEDS_CUDA, row_calls
from tests.support.oracle import naive, tiny_llama

V = 97
SHAPES = [
    # rows, rows allocated, query heads, heads, tokens, capacity, dimensions
    (1, 1, 9, 3, 1, 128, 64),
    (4, 5, 9, 3, 5, 384, 64),
    (3, 3, 32, 8, 8, 640, 128),
    (2, 3, 8, 8, 16, 640, 96),
    (2, 2, 16, 4, 4, 4096, 128),
    (1, 1, 9, 3, 32, 2304, 64),
    (2, 2, 8, 2, 5, 384, 256),
    (3, 3, 4, 4, 3, 200, 80),
]


def expected(
    queries: mx.array, keys: mx.array, values: mx.array, starts: mx.array, window: int, sinks: mx.array | None
) -> NDArray[np.float64]:
    """In float64, a row and a query at a time."""
    q, k, v = (np.array(each.astype(mx.float32)).astype(np.float64) for each in (queries, keys, values))
    rows, heads, count, dims = q.shape
    out = np.zeros((rows, heads, count, v.shape[3]))
    for row in range(rows):
        for head in range(heads):
            shared = head // (heads // k.shape[1])
            for token in range(count):
                end = int(np.array(starts)[row]) + token + 1
                begin = max(end - window, 0) if window else 0
                scores = k[row, shared, begin:end] @ q[row, head, token] * dims**-0.5
                if sinks is not None:
                    scores = np.append(scores, float(np.array(sinks.astype(mx.float32))[head]))
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out[row, head, token] = weights[: end - begin] @ v[row, shared, begin:end]
    return out


def compare(run: Any, shape: Sequence[int], kind: mx.Dtype, window: int = 0, *, sinking: bool = False) -> None:
    rows, room, many, heads, count, capacity, dims = shape
    random = np.random.default_rng(0)

    def normal(*size: int) -> mx.array:
        return mx.array(random.normal(size=size).astype(np.float32)).astype(kind)

    queries, keys, values = (
        normal(rows, many, count, dims),
        normal(room, heads, capacity, dims),
        normal(room, heads, capacity, dims),
    )
    starts = mx.array(random.integers(0, capacity - count + 1, rows).astype(np.int32))
    sinks = normal(many) if sinking else None
    found = run(queries, attention.RowCall(keys, values, starts, window), scale=dims**-0.5, sinks=sinks)
    wanted = expected(queries, keys, values, starts, window, sinks)
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


def test_keys_that_a_model_has_changed_are_attended_as_they_are() -> None:
    target = tiny_llama(0)
    with using(CUDA):
        cache = RowCache(target, 2)
    layer = cache.attention[0]
    mask = layer.make_mask(2)
    keys, values = layer.update_and_fetch(mx.ones((2, 2, 2, 8)), mx.ones((2, 2, 2, 8)))
    assert layer.row_call(keys * 2, values, mask) is None
    keys, values = layer.keys_and_values()
    assert layer.row_call(keys, values, mask) is not None
    assert layer.row_call(keys, values, mask) is None, "views that are held would make the next write copy"
