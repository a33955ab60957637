"""What a target call and a draft step cost here, by the number of rows and what they hold: measured once, when an engine
starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from service.core import Sampling
from service.engine.cache import RowCache
from service.engine.confidence import STOPS, Steps, Trust
from service.engine.costs import Costs, line
from service.engine.draft import bare
from service.engine.eagle import drafter as drafter_of
from service.engine.sampling import SamplingBatch, SharedNoise
from service.models.heads import cut_head

HELD = (64, 512)
"""Positions that a row holds already, whose keys and values a call must read: of those that give the costs of rows, and of
those that tell what more of them cost. On a CPU that is mostly the exponentials of the softmax: 5 us a position for one token
of the default target, 18 us for five."""
TELLING = 8
"""Rows on which that is told, or as many as there may be: on one, 450 positions are 2 ms of 45, which is no more than two
calls differ by chance."""
OWN = 256
"""Tokens that a row of some length has shown and the ranked list lacks."""
READ = 16
"""Tokens beside one, from which the cost of reading one more is told."""
FEW = 2
"""Rows up to which calls of every length are timed: products come in tiles of some four positions, and a call over four costs
hardly more than one over three. With more rows lines between a few lengths do."""
TURNS, SPENT = 5, 0.15
"""A call is timed at least so often, and for so many seconds in all; calls that are compared with one another in turn, so that
they have had the same moments."""
SPENT_ASKING = 0.6
"""The same for asking, a small difference of two times."""


def sizes(rows: int) -> list[int]:
    """1, 2, 4 ... up to `rows`, and `rows` itself."""
    return sorted({*(2**i for i in range(rows.bit_length())), rows})


def measure(target: nn.Module, draft: nn.Module | None, *, rows: Sequence[int], most: int) -> Costs:
    """Costs for batches of these sizes and up to `most` proposed tokens. The least of several, after one that compiles:
    whatever else runs beside can only add."""
    lengths = sorted({1, 2, (most + 1) // 2 + 1, most + 1})
    every = range(1, most + 2)
    verify = {size: _times(target, size, every if size <= FEW else lengths) for size in rows}
    telling = max(size for size in rows if size <= TELLING or size == min(rows))
    held = _per_position(target, telling, lengths)
    step, step_held, read, asked = {1: 0.0}, 0.0, 0.0, dict[int, float]()
    if draft is not None:
        step = {size: _step(draft, size) for size in rows}
        asked = {size: _asked(target, draft, size) for size in {min(rows), max(rows)}}
        step_held = _per_position(draft, telling, [1])[1]
        told = _times(draft, 1, [1, 1 + READ], head=False)
        read = max(told[1 + READ] - told[1], 0.0) / READ
    return Costs(
        verify={
            (size, n): seconds - size * HELD[0] * line(held, n)
            for size, of in verify.items()
            for n, seconds in of.items()
        },
        step={size: seconds - size * HELD[0] * step_held for size, seconds in step.items()},
        verify_held=held,
        step_held=step_held,
        read=read,
        asked=asked,
    )


def _per_position(model: nn.Module, rows: int, lengths: Sequence[int]) -> dict[int, float]:
    """Seconds for each position of each row more, by tokens. Never less than nothing, nor so much that nothing is left for the
    rest."""
    calls, found = [_caller(model, rows, held) for held in HELD], dict[int, float]()
    for tokens in lengths:
        few, many = (min(each) for each in _timed(*(partial(call, tokens) for call in calls), spent=SPENT))
        found[tokens] = min(max(many - few, 0.0) / (HELD[1] - HELD[0]), few / (2 * HELD[0])) / rows
    return found


def _step(draft: nn.Module, rows: int) -> float:
    """Seconds of a draft step, with tokens of the rows' own where the head is cut."""
    head = cut_head(draft)
    if head is not None:
        head.also(mx.array(np.tile(np.arange(OWN, dtype=np.int32) % len(head.keeps), (rows, 1))))
    try:
        return _times(draft, rows, [1])[1]
    finally:
        if head is not None:
            head.also(None)


def _asked(target: nn.Module, draft: nn.Module, rows: int) -> float:
    """Seconds that it takes to hear once how sure a draft is, beside steps that nobody waits for."""
    vocabulary = int(draft(mx.ones((1, 1), dtype=mx.int32)).shape[-1])
    batch = SamplingBatch.of([Sampling()] * rows, vocabulary)
    # The target's hidden states cost nothing to have here: whatever stands for them costs the same to read.
    drafter = drafter_of(bare(draft), vocabulary, RowCache(target, rows, features=True))
    drafter.cache = RowCache(draft, rows)
    tokens, noise, key = [[1] * (HELD[0] + 1)] * rows, SharedNoise(batch, [0] * rows, vocabulary), mx.random.key(0)

    def propose(trusts: Sequence[Trust]) -> None:
        drafter.cache.rewind([HELD[0]] * rows)
        proposal = drafter.propose(tokens, Steps(STOPS[1] + 1, trusts), batch, noise, key)
        mx.eval([] if proposal is None else proposal.tokens, drafter.cache.arrays())

    draft(mx.ones((rows, 1), dtype=mx.int32), cache=drafter.cache.layers)
    told, untold = _timed(lambda: propose([Trust()] * rows), lambda: propose([]), spent=SPENT_ASKING)
    return max(median(a - b for a, b in zip(told, untold, strict=True)), 0.0) / 2


def _times(model: nn.Module, rows: int, lengths: Sequence[int], *, head: bool = True) -> dict[int, float]:
    """Seconds of one call over n tokens of each row. head: with what comes of it, not only keys and values."""
    call = _caller(model, rows, HELD[0], head=head)
    times = _timed(*(partial(call, n) for n in lengths), spent=SPENT)
    return {tokens: min(taken) for tokens, taken in zip(lengths, times, strict=True)}


def _caller(model: nn.Module, rows: int, held: int, *, head: bool = True) -> Callable[[int], None]:
    """Calls over so many tokens of each row, all of which hold so many."""
    cache = RowCache(model, rows)

    def call(tokens: int) -> None:
        fed = mx.array(np.ones((rows, tokens), dtype=np.int32))
        logits = model(fed, cache=cache.layers)
        mx.eval(mx.argmax(logits, axis=-1) if head else [], cache.arrays())
        cache.rewind([held] * rows)

    # What is held need not have been read to cost what it costs: zeros do.
    call(1)
    return call


def _timed(*runs: Callable[[], None], spent: float) -> list[list[float]]:
    """Seconds of each, taken in turn, after one of each that compiles."""
    for run in runs:
        run()
    times: list[list[float]] = [[] for _ in runs]
    while len(times[0]) < TURNS or sum(times[0]) < spent:
        for run, taken in zip(runs, times, strict=True):
            begun = time.perf_counter()
            run()
            taken.append(time.perf_counter() - begun)
    return times
