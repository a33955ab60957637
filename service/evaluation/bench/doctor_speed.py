"""`redraft doctor --speed`: what calls and rounds cost here, and from which acceptance rate a draft length pays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from service.engine.adapters import Draft, served
from service.evaluation.bench.model_calls import ModelCalls, queued
from service.evaluation.bench.round import measure
from service.evaluation.bench.round_modes import PROMPT_TOKENS, Mode
from service.evaluation.progress import OnProgress, silent
from service.evaluation.prompts import encode_prompts
from service.evaluation.sql_prompts import traffic_prompts
from service.models.pair import Pair, load_pair

ROWS = (1, 4, 16)
WIDTHS = tuple(range(1, 17))
"""Tokens of each row in a timed target call."""
LENGTHS = (1, 2, 3, 4, 6, 8)
"""Draft lengths for which it is computed when they pay."""
K, ROUNDS = 4, 30
"""Draft length and number of the rounds that give the overhead."""
TURNS = 3
"""How often each call is timed, in turn with the others; the median counts."""
QUEUE_SECONDS, MIN_QUEUED, MAX_QUEUED = 0.1, 2, 20
"""Calls are queued together: about so many seconds of them, but a number between these."""


def run_speed(models: tuple[Path, Path | None], on_progress: OnProgress = silent) -> dict[str, Any]:
    """Load the models and time them. models: folders of target and draft.

    Returns call_ms{rows{tokens}}, milliseconds of a target call over so many tokens of each row; step_ms{rows}, of a draft
    step; overhead_ms{plain, drafted}, what a round over one row takes beyond its calls, with draft length `k`;
    pays_from{length}, the acceptance rate from which drafts of that length make one stream faster, None where none does.
    Without a draft step_ms and pays_from are empty, and overhead_ms has `plain` alone. Raises ModelError.
    """
    on_progress("loading the pair", 0, 1)
    pair = load_pair(*models)
    draft = served(pair.draft) if pair.draft is not None else None
    texts = encode_prompts(pair, traffic_prompts(max(ROWS)))
    calls, steps = dict[int, dict[int, float]](), dict[int, float]()
    for done, rows in enumerate(ROWS):
        on_progress("timing calls", done, len(ROWS))
        prompts = [(text * PROMPT_TOKENS)[:PROMPT_TOKENS] for text in texts[:rows]]
        calls[rows], step = _time_calls(pair, draft, prompts)
        if step is not None:
            steps[rows] = step
    overhead = dict[str, float]()
    for done, mode in enumerate(("plain", "drafted") if draft is not None else ("plain",)):
        on_progress("timing rounds", done, 2)
        one = measure(pair, draft, Mode(1, mode), texts[:1], k=K, rounds=ROUNDS)
        overhead[mode] = one["wall_ms"] - one["calls_ms"]
    pays = {k: pays_from(k, calls[1], steps[1], overhead) for k in LENGTHS} if draft is not None else {}
    return {"call_ms": calls, "step_ms": steps, "overhead_ms": overhead, "k": K, "pays_from": pays}


def _time_calls(
    pair: Pair, draft: Draft | None, texts: Sequence[Sequence[int]]
) -> tuple[dict[int, float], float | None]:
    """Milliseconds of a target call by its tokens a row, and of a draft step."""
    with ModelCalls(pair, draft, texts) as calls:
        runs: dict[int, Callable[[], list[mx.array]]] = {n: partial(calls.target, n) for n in WIDTHS}
        if draft is not None:
            runs[0] = calls.step
        found: dict[int, list[float]] = {n: [] for n in runs}
        for _ in range(TURNS):
            for n, run in runs.items():
                if found[n]:
                    count = min(max(int(QUEUE_SECONDS / found[n][-1]), MIN_QUEUED), MAX_QUEUED)
                    found[n].append(queued(run, count, warm=0))
                else:
                    found[n].append(queued(run, MIN_QUEUED))
    times = {n: 1000 * median(seconds) for n, seconds in found.items()}
    return {n: times[n] for n in WIDTHS}, times.get(0)


def pays_from(k: int, call: Mapping[int, float], step: float, overhead: Mapping[str, float]) -> float | None:
    """The acceptance rate a from which rounds of draft length k, which emit 1 + a + ... + a^k tokens on average, emit more
    tokens a second than plain ones; None where even a = 1 does not. call: ms by tokens a row. step, overhead: ms."""
    # A measured overhead below zero is noise.
    plain = call[1] + max(overhead["plain"], 0.0)
    needed = (call[k + 1] + k * step + max(overhead["drafted"], 0.0)) / plain
    if needed > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(k + 1)) < needed else (low, middle)
    return high
