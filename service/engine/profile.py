"""Times target calls and draft steps when an engine starts. The results seed the cost model, which real rounds then correct."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from service.engine import device
from service.engine.costs import USUALLY_HELD, Costs, line
from service.engine.drafters.head import draft_calls
from service.engine.drafters.model import DraftCalls
from service.engine.kv.budget import pages_of
from service.engine.kv.cache import RowCache
from service.engine.replay import FIRST_CALLS
from service.engine.strategy import current
from service.engine.target import Target
from service.models.arrays import named_arrays
from service.models.heads import cut_head, extra_ids_allowed

log = logging.getLogger(__name__)

HELD = (64, 512)
"""Positions per row: in calls that measure the cost of rows, and in those that measure the cost of a position."""
HELD_ROWS = 4
"""An intermediate number of rows that is timed too, and over which the cost of a position is timed. Over one row that cost is 2
ms of 45, no more than random variation."""
EXTRA_IDS = 256
"""Extra ids that a row of some length adds to a reduced vocabulary."""
READ = 16
"""Number of additional tokens from which the cost of reading one more is measured."""
SWEEPS, ENOUGH_SECONDS = 2, 5.0
"""Timed sweeps over all calls, after one that compiles. Fewer if they took ENOUGH_SECONDS. The minimum time of a call counts,
because other load can only add time."""
SHORT_SECONDS = 0.5
"""Minimum total time of the sweeps, for short calls."""
SWITCH_SECONDS = 0.05
"""The same for a step of the old and of the new draft at a switch, while requests wait."""

Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...], str], ...]
"""Names, shapes and precisions of a model's weights."""


_Model: TypeAlias = Literal["target", "draft", "backbone"]


class _Call(NamedTuple):
    """A call of the target, of the draft, or of the draft without its head, over `tokens` tokens per row, with `held` positions
    per row."""

    model: _Model
    rows: int
    held: int
    tokens: int


def sizes(rows: int) -> list[int]:
    """The numbers of rows that are timed for batches of up to `rows`: the smallest, the largest, and the largest for which
    proposals of three tokens and of one may be planned."""
    most = current().most_tokens
    bounded = [] if most is None else [most // 4, most // 2]
    return sorted({1, min(HELD_ROWS, rows), rows, *(size for size in bounded if 1 < size < rows)})


def measure(target: nn.Module, draft: nn.Module | None, *, rows: Sequence[int], most: int) -> Costs:
    """Time calls over batches of these sizes, for proposals of up to `most` tokens. Raises what the models raise.

    Calls over 1, 2, ... most + 1 tokens per row are those of the first rounds, so what a device prepares once per shape is then
    prepared.
    """
    started_at = time.perf_counter()
    calls = _calls(target, draft, rows, most)
    least = _least(calls, SHORT_SECONDS)
    costs = _fit(least)
    if _queued() > 1:
        plain = [call for call in calls if call.model == "target" and call.tokens == 1 and call.held == HELD[0]]
        alone = _least({call: calls[call] for call in plain}, SHORT_SECONDS / 5, queued=1)
        costs = replace(costs, alone={call.rows: max(alone[call] - least[call], 0.0) for call in plain})
    log.info("timed %d calls in %.1f s", len(calls), time.perf_counter() - started_at)
    return costs


def _calls(
    target: nn.Module, draft: nn.Module | None, rows: Sequence[int], most: int
) -> dict[_Call, Callable[..., None]]:
    # Every length over one row: products come in tiles of four positions, and a call over four costs little more than one over
    # three. Over more rows, interpolation between a few lengths is sufficient.
    shapes = [(n, HELD[0], _lengths(n, most) if n == min(rows) else _few(_lengths(n, most))) for n in rows]
    held_rows = max(size for size in rows if size <= HELD_ROWS or size == min(rows))
    few = _few(_lengths(held_rows, most))
    shapes.append((held_rows, HELD[1], [few[0], few[-1]]))
    both, calls = Target(target, draft), dict[_Call, Callable[..., None]]()
    if (pages := both.cache(0).pages) is not None:
        # Whenever the pool grows, all calls are traced again.
        needed = sum(size * pages_of([held + max(lengths)]) for size, held, lengths in shapes)
        pages.pool.grow(1 + needed * len(pages.groups.windows))
    steps = None if draft is None else draft_calls(draft).replayed(draft)
    for size, held, lengths in shapes:
        run = _caller(both.verify, both.cache(size), held)
        calls |= {_Call("target", size, held, n): partial(run, n) for n in lengths}
        if draft is not None and steps is not None:
            calls[_Call("draft", size, held, 1)] = partial(_draft_step(draft, steps, size, held), 1)
    if draft is not None and steps is not None:
        run = _caller(lambda tokens, cache: steps.hidden([tokens], cache), RowCache(draft, 1), HELD[0])
        calls |= {_Call("backbone", 1, HELD[0], n): partial(run, n) for n in (1, 1 + READ)}
    return calls


def _lengths(rows: int, most: int) -> list[int]:
    """Tokens per row of the calls that may be planned over this many rows."""
    strategy = current()
    return [1, *(n + 1 for n in strategy.allowed(most) if strategy.fits(rows, n))]


def _few(lengths: Sequence[int]) -> list[int]:
    """The lengths between which interpolation is sufficient."""
    return sorted({*lengths[:2], lengths[len(lengths) // 2], lengths[-1]})


def _fit(least: Mapping[_Call, float]) -> Costs:
    """The cost table from the seconds of all calls."""
    position: dict[_Model, dict[int, float]] = {"target": {}, "draft": {1: 0.0}, "backbone": {1: 0.0}}
    for call, far in least.items():
        if call.held == HELD[1]:
            near = least[call._replace(held=HELD[0])]
            # Not negative, and at most half of the call.
            seconds = min(max(far - near, 0.0) / (HELD[1] - HELD[0]), near / (2 * HELD[0]))
            position[call.model][call.tokens] = seconds / call.rows
    empty: dict[_Model, dict[tuple[int, int], float]] = {"target": {}, "draft": {}, "backbone": {}}
    for call, seconds in least.items():
        if call.held == HELD[0]:
            held = call.rows * call.held * line(position[call.model], call.tokens)
            empty[call.model][call.rows, call.tokens] = seconds - min(held, seconds / 2)
    one, many = (empty["backbone"].get((1, tokens), 0.0) for tokens in (1, 1 + READ))
    return Costs(
        verify=empty["target"],
        step={rows: seconds for (rows, _), seconds in empty["draft"].items()} or {1: 0.0},
        verify_held=position["target"],
        step_held=position["draft"][1],
        read=max(many - one, 0.0) / READ,
    )


class Seeds:
    """The costs of one target with the current draft. timed: costs with `draft`, from `measure`."""

    def __init__(self, timed: Costs, draft: nn.Module | None) -> None:
        self.costs = timed
        self.timed, self._draft = timed, draft
        self._ratios = {} if draft is None else {_shapes(draft): 1.0}
        """The cost of a step of drafts with these weights, as a multiple of the one that was timed."""

    def switch(self, draft: nn.Module) -> Costs:
        """The costs with another version of the draft. If the shapes of its weights differ, as with an adapter next to
        quantised weights, one of its steps is timed against one of the current draft."""
        if self._draft is None:
            return self.costs
        shapes = _shapes(draft)
        if shapes not in self._ratios:
            try:
                ratio = step_ratios({"old": self._draft, "new": draft}, seconds=SWITCH_SECONDS)["new"]
            except Exception:
                # A broken draft is detected and reported when it drafts.
                log.warning("could not time a step of the new draft; assuming the cost of the old one", exc_info=True)
                return self.costs
            self._ratios[shapes] = ratio * self._ratios[_shapes(self._draft)]
        self._draft = draft
        self.costs = self.timed.scaled(self._ratios[shapes])
        return self.costs


def step_ratios(drafts: Mapping[str, nn.Module], *, seconds: float | None = None) -> dict[str, float]:
    """The cost of a draft step over one row with each of these drafts, as a multiple of that with the first. seconds: total
    time for short steps; None: SHORT_SECONDS.

    Drafts whose weights have the same names, shapes and precisions cost the same and get exactly equal ratios. Only others are
    timed.
    """
    shapes = {name: _shapes(draft) for name, draft in drafts.items()}
    first = {shape: name for name, shape in reversed(shapes.items())}
    if len(first) == 1:
        return dict.fromkeys(drafts, 1.0)
    runs = {
        name: partial(_draft_step(drafts[name], draft_calls(drafts[name]).replayed(drafts[name]), 1, USUALLY_HELD), 1)
        for name in first.values()
    }
    least = _least(runs, SHORT_SECONDS if seconds is None else seconds)
    base = least[first[next(iter(shapes.values()))]]
    return {name: least[first[shape]] / base for name, shape in shapes.items()}


_Name = TypeVar("_Name")


def _least(runs: Mapping[_Name, Callable[..., None]], seconds: float, queued: int | None = None) -> dict[_Name, float]:
    """The minimum seconds per call of each run, which makes `queued` calls (None: the usual number). The runs alternate, so
    that a slow moment of the machine affects at most one sweep."""
    # Where calls are traced, the last of these is replayed.
    for run in runs.values():
        for _ in range(FIRST_CALLS if current().replay else 1):
            run(queued=1)
    least, sweeps, total = dict.fromkeys(runs, float("inf")), 0, 0.0
    while total < seconds or (sweeps < SWEEPS and total < ENOUGH_SECONDS):
        sweeps += 1
        for name, run in runs.items():
            started_at = time.perf_counter()
            run(queued=queued)
            taken = time.perf_counter() - started_at
            least[name] = min(least[name], taken / (queued or _queued()))
            total += taken
    return least


def _queued() -> int:
    """Calls launched before waiting for the last: slightly more than the pending rounds of a decoder."""
    return 4 if current().launch_ahead else 1


def _shapes(model: nn.Module) -> Shapes:
    arrays = named_arrays(model.parameters())
    return tuple(sorted((name, tuple(array.shape), str(array.dtype)) for name, array in arrays))


def _draft_step(draft: nn.Module, calls: DraftCalls, rows: int, held: int) -> Callable[..., None]:
    """Calls of the draft, whose head, if it is cut, gets extra ids."""
    run, head = _caller(calls.logits, RowCache(draft, rows), held), cut_head(draft)
    if head is None:
        return run
    own = mx.array(np.tile(np.arange(EXTRA_IDS, dtype=np.int32) % len(head.in_vocabulary), (rows, 1)))

    def call(tokens: int, queued: int | None = None) -> None:
        with extra_ids_allowed(head, own):
            run(tokens, queued)

    return call


def _caller(model: Callable[[mx.array, RowCache], mx.array], cache: RowCache, held: int) -> Callable[..., None]:
    """Makes `queued` calls (None: the usual number) over a number of tokens per row, and waits. Rows hold `held` positions,
    every other one fewer by one, because batches rarely have equal lengths."""
    rows = len(cache.lengths.host)
    lengths = [held - row % 2 for row in range(rows)]

    def launched(tokens: int) -> mx.array:
        out = mx.argmax(model(mx.array(np.ones((rows, tokens), dtype=np.int32)), cache), axis=-1)
        device.launch(out, cache.arrays())
        cache.rewind(lengths)
        return out

    def call(tokens: int, queued: int | None = None) -> None:
        device.wait([launched(tokens) for _ in range(queued or _queued())])

    # The contents of the cache do not affect the cost, so zeros are sufficient.
    call(1, queued=1)
    return call
