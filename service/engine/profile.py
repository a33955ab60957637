"""What a target call and a draft step cost here, by the number of rows: measured once, when an engine starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from service.engine.cache import RowCache
from service.engine.length import Costs

CONTEXT = 64
"""Positions that are there already, of which a call over many rows must read the keys and values."""
TURNS = 4


def sizes(rows: int) -> list[int]:
    """1, 2, 4 ... up to `rows`, and `rows` itself."""
    return sorted({*(2**i for i in range(rows.bit_length())), rows})


def measure(target: nn.Module, draft: nn.Module | None, *, rows: Sequence[int], most: int) -> Costs:
    """Costs for batches of these sizes and up to `most` proposed tokens. The least of four, after one that compiles: whatever
    else runs beside can only add."""
    lengths = sorted({1, 2, (most + 1) // 2 + 1, most + 1})
    verify = {(size, n): seconds for size in rows for n, seconds in _times(target, size, lengths).items()}
    step = {size: _times(draft, size, [1])[1] for size in rows} if draft is not None else {1: 0.0}
    return Costs(verify, step)


def _times(model: nn.Module, rows: int, lengths: Sequence[int]) -> dict[int, float]:
    """Seconds of one call over n tokens of each row."""
    cache = RowCache(model, rows)

    def call(tokens: int) -> None:
        fed = mx.array(np.ones((rows, tokens), dtype=np.int32))
        mx.eval(mx.argmax(model(fed, cache=cache.layers), axis=-1), cache.arrays())
        cache.rewind([CONTEXT] * rows)

    call(CONTEXT)
    return {tokens: _seconds(lambda tokens=tokens: call(tokens)) for tokens in lengths}


def _seconds(run: Callable[[], None]) -> float:
    run()
    times: list[float] = []
    for _ in range(TURNS):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return min(times)
