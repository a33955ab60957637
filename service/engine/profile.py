"""What a target call and a draft step cost here, by the number of rows and what they hold: timed when an engine starts, and
again, ever more seldom, while it has nothing else to do."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Literal, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from service.core import Sampling
from service.engine.adapters import bare
from service.engine.confidence import STOPS, Steps, Trust
from service.engine.costs import USUALLY_HELD, Costs, line
from service.engine.drafters.head import make_drafter
from service.engine.kv.cache import RowCache
from service.engine.sampling import SamplingBatch, SharedNoise
from service.engine.strategy import current
from service.engine.target import Target
from service.models.heads import cut_head

log = logging.getLogger(__name__)

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
PASSES = 2
"""Times that an engine goes through all calls when it starts: what slows the machine for a second or two has passed by then."""
TURNS, SPENT = 2, 0.15
"""A pass times calls that are compared with one another in turn, so that they have had the same moments: at least so often, and
for so many seconds in all."""
SPENT_SWITCHING = 0.05
"""Seconds for timing a step of the old and of the new draft at a switch, while requests wait."""
SPENT_ASKING, ASKINGS = 0.6, 256
"""Seconds of a pass for asking, a small difference of two times; and how many such differences are remembered."""
REST = 600.0
"""Seconds until an idle engine goes through them again; then twice as many, and so on."""


_Of = Literal["target", "draft", "backbone"]


class _Call(NamedTuple):
    """Of the target, of the draft, or of the draft without its head."""

    of: _Of
    rows: int
    held: int
    tokens: int


def sizes(rows: int) -> list[int]:
    """1, 2, 4 ... up to `rows`, and `rows` itself."""
    return sorted({*(2**i for i in range(rows.bit_length())), rows})


def measure(target: nn.Module, draft: nn.Module | None, *, rows: Sequence[int], most: int) -> Costs:
    """Costs for batches of these sizes and up to `most` proposed tokens."""
    return Profile(target, draft, rows=rows, most=most).measure()


class Profile:
    """Times of calls for batches of these sizes and up to `most` proposed tokens. The least of all times of a call counts,
    after one that compiles: whatever else runs beside can only add. rest: see REST."""

    def __init__(
        self, target: nn.Module, draft: nn.Module | None, *, rows: Sequence[int], most: int, rest: float = REST
    ) -> None:
        self.draft = draft
        """The draft whose calls are timed; see `switch`."""
        self._target = Target.of(target, draft)
        self._rows = rows
        self._every = [1, *(n + 1 for n in current().allowed(most))]
        # Of many rows the ends and the middle are timed; lines between them do for the others.
        self._lengths = sorted({*self._every[:2], self._every[len(self._every) // 2], self._every[-1]})
        self._telling = max(size for size in rows if size <= TELLING or size == min(rows))
        self._least: dict[_Call, float] = {}
        self._asked: dict[int, deque[float]] = {}
        self._parts: list[Callable[[], Generator[None]]] = [partial(self._verify, size) for size in rows]
        if draft is not None:
            self._parts += [partial(self._step, size) for size in rows]
            if current().ask_confidence:
                self._parts += [partial(self._ask, size) for size in sorted({min(rows), max(rows)})]
            self._parts.append(self._read)
        self._at = 0
        self._rest, self._due = rest, time.monotonic() + rest
        self._passing: Generator[None] | None = None
        self._news = False
        """Whether a call was timed since someone asked."""
        self._estimated = set[_Call]()
        """Calls of which no time was taken since the draft was switched."""

    def measure(self) -> Costs:
        """Time every call PASSES times and return the costs. Blocks until that is done."""
        for _ in range(PASSES):
            for _ in self._pass():
                pass
        return self.costs()

    def switch(self, draft: nn.Module) -> None:
        """Time another version of the draft from now on. One whose weights are of the same shapes costs the same. For another
        one, such as a quantised draft and an adapter folded into it, a step of both is timed at once, the old times count in
        that proportion, and all calls are timed again as soon as there is nothing else to do."""
        if self.draft is None:
            return
        try:
            ratio = step_ratios({"old": self.draft, "new": draft}, spent=SPENT_SWITCHING)["new"]
        except Exception:
            # Whatever is wrong with a draft shows, and is reported, where it drafts.
            log.warning("a step of the new draft could not be timed: the old one's times stand", exc_info=True)
            ratio = 1.0
        self.draft = draft
        if ratio != 1.0:
            self.settle()
            self._asked.clear()
            self._estimated = {call for call in self._least if call.of != "target"}
            self._least |= {call: self._least[call] * ratio for call in self._estimated}
            self._due = time.monotonic()

    def again(self) -> bool:
        """Time one more call, where that is due. False: nothing is to be done for now."""
        if self._passing is None and time.monotonic() < self._due:
            return False
        self._passing, self._news = self._passing or self._pass(), True
        try:
            for _ in self._passing:
                return True
        except Exception:
            # The next request meets the same models, and who sent it is told.
            log.warning("costs could not be measured again", exc_info=True)
        self._passing = None
        self._rest *= 2
        self._due = time.monotonic() + self._rest
        return False

    def settle(self) -> Costs | None:
        """Let go of what the calls need, for there is work; the next one begins with those that are left. What it costs now,
        None where nothing was timed since."""
        if self._passing is not None:
            self._passing.close()
            self._passing = None
        news, self._news = self._news, False
        return self.costs() if news else None

    def costs(self) -> Costs:
        """When everything was timed at least once."""
        held = {n: self._per_position("target", n) for n in self._lengths}
        step_held, read = 0.0, 0.0
        if self.draft is not None:
            step_held = self._per_position("draft", 1)
            read = max(self._time("backbone", 1, 1 + READ) - self._time("backbone", 1, 1), 0.0) / READ
        return Costs(
            verify={
                (size, n): self._time("target", size, n) - size * HELD[0] * line(held, n)
                for size in self._rows
                for n in self._tokens(size)
            },
            step={size: self._time("draft", size, 1) - size * HELD[0] * step_held for size in self._rows}
            if self.draft is not None
            else {1: 0.0},
            verify_held=held,
            step_held=step_held,
            read=read,
            asked={size: max(median(told), 0.0) / 2 for size, told in self._asked.items()},
        )

    def _time(self, of: _Of, rows: int, tokens: int) -> float:
        return self._least[_Call(of, rows, HELD[0], tokens)]

    def _per_position(self, of: _Of, tokens: int) -> float:
        """Seconds for each position of each row more. Never less than nothing, nor so much that nothing is left for the rest
        of the call."""
        few, many = (self._least[_Call(of, self._telling, held, tokens)] for held in HELD)
        return min(max(many - few, 0.0) / (HELD[1] - HELD[0]), few / (2 * HELD[0])) / self._telling

    def _tokens(self, rows: int) -> Sequence[int]:
        """Of each row, in the calls that are timed."""
        return self._every if rows <= FEW else self._lengths

    # ------------------------------------------------------------------------------------------- a pass, a call at a time

    def _pass(self) -> Generator[None]:
        """All parts, from the one on that was not ended."""
        for _ in self._parts:
            yield from self._parts[self._at]()
            self._at = (self._at + 1) % len(self._parts)

    def _verify(self, rows: int) -> Generator[None]:
        runs: dict[_Call, Callable[[], None]] = {}
        for held in self._held(rows):
            call = _caller(self._target, self._target.cache(rows), held)
            tokens = self._tokens(rows) if held == HELD[0] else self._lengths
            runs |= {_Call("target", rows, held, n): partial(call, n) for n in tokens}
        yield from self._timed(runs)

    def _step(self, rows: int) -> Generator[None]:
        """With tokens of the rows' own where the head is cut."""
        assert self.draft is not None
        draft, head = self.draft, cut_head(self.draft)
        if head is not None:
            head.allow_extra_ids(mx.array(np.tile(np.arange(OWN, dtype=np.int32) % len(head.in_vocabulary), (rows, 1))))
        try:
            calls = {held: _caller(_alone(draft), RowCache(draft, rows), held) for held in self._held(rows)}
            yield from self._timed({_Call("draft", rows, held, 1): partial(call, 1) for held, call in calls.items()})
        finally:
            if head is not None:
                head.allow_extra_ids(None)

    def _read(self) -> Generator[None]:
        assert self.draft is not None
        call = _caller(_alone(self.draft), RowCache(self.draft, 1), HELD[0], head=False)
        yield from self._timed({_Call("backbone", 1, HELD[0], n): partial(call, n) for n in (1, 1 + READ)})

    def _ask(self, rows: int) -> Generator[None]:
        """What it takes to hear once how sure a draft is, beside steps that nobody waits for."""
        assert self.draft is not None
        vocabulary = int(self.draft(mx.ones((1, 1), dtype=mx.int32)).shape[-1])
        batch = SamplingBatch.of([Sampling()] * rows, vocabulary)
        # The target's hidden states cost nothing to have here: whatever stands for them costs the same to read.
        drafter = make_drafter(bare(self.draft), vocabulary, self._target.cache(rows))
        drafter.cache = RowCache(self.draft, rows)
        tokens, noise, key = [[1] * (HELD[0] + 1)] * rows, SharedNoise(batch, [0] * rows, vocabulary), mx.random.key(0)

        def propose(trusts: Sequence[Trust]) -> None:
            drafter.cache.rewind([HELD[0]] * rows)
            proposal = drafter.propose(tokens, Steps(STOPS[1] + 1, trusts), batch, noise, key)
            mx.eval([] if proposal is None else proposal.tokens, drafter.cache.arrays())

        self.draft(mx.ones((rows, 1), dtype=mx.int32), cache=drafter.cache.layers)
        told, untold = list[float](), list[float]()
        turns = {partial(propose, [Trust()] * rows): told, partial(propose, []): untold}
        yield from _in_turn({run: times.append for run, times in turns.items()}, SPENT_ASKING)
        self._asked.setdefault(rows, deque(maxlen=ASKINGS)).extend(a - b for a, b in zip(told, untold, strict=True))

    def _held(self, rows: int) -> Sequence[int]:
        return HELD if rows == self._telling else HELD[:1]

    def _timed(self, runs: Mapping[_Call, Callable[[], None]]) -> Generator[None]:
        def keep(call: _Call, seconds: float) -> None:
            known = seconds if call in self._estimated else self._least.get(call, seconds)
            self._estimated.discard(call)
            self._least[call] = min(seconds, known)

        return _in_turn({run: partial(keep, call) for call, run in runs.items()}, SPENT)


def step_ratios(drafts: Mapping[str, nn.Module], *, spent: float = SPENT) -> dict[str, float]:
    """What a draft step over one row costs with each of these drafts, as a multiple of what it costs with the first. spent:
    seconds to measure for, at least.

    Drafts whose weights agree in names, shapes and precisions cost the same, and no chance of timing tells them apart; only
    others are timed, in turn.
    """
    shapes = {name: _shapes(draft) for name, draft in drafts.items()}
    first = {shape: name for name, shape in reversed(shapes.items())}
    if len(first) == 1:
        return dict.fromkeys(drafts, 1.0)
    least = dict.fromkeys(first.values(), float("inf"))

    def keep(name: str, seconds: float) -> None:
        least[name] = min(least[name], seconds)

    runs = {name: _caller(_alone(drafts[name]), RowCache(drafts[name], 1), USUALLY_HELD) for name in least}
    for _ in _in_turn({partial(run, 1): partial(keep, name) for name, run in runs.items()}, spent):
        pass
    base = least[first[next(iter(shapes.values()))]]
    return {name: least[first[shape]] / base for name, shape in shapes.items()}


def _shapes(model: nn.Module) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    arrays = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    return tuple(sorted((name, tuple(array.shape), str(array.dtype)) for name, array in arrays))


def _alone(draft: nn.Module) -> Callable[[mx.array, RowCache], mx.array]:
    return lambda tokens, cache: draft(tokens, cache=cache.layers)


def _caller(
    model: Callable[[mx.array, RowCache], mx.array], cache: RowCache, held: int, *, head: bool = True
) -> Callable[[int], None]:
    """Calls over so many tokens of each row, all of which hold so many. head: with what comes of it, not only keys and
    values."""
    rows = len(cache.lengths.host)

    def call(tokens: int) -> None:
        logits = model(mx.array(np.ones((rows, tokens), dtype=np.int32)), cache)
        mx.eval(mx.argmax(logits, axis=-1) if head else [], cache.arrays())
        cache.rewind([held] * rows)

    # What is held need not have been read to cost what it costs: zeros do.
    call(1)
    return call


def _in_turn(runs: Mapping[Callable[[], None], Callable[[float], None]], spent: float) -> Generator[None]:
    """Run each and tell its seconds, in turn, after one of each that compiles: TURNS times, and until they have taken `spent`
    seconds."""
    for run in runs:
        run()
        yield
    turns, total = 0, 0.0
    while turns < TURNS or total < spent:
        turns += 1
        for run, tell in runs.items():
            begun = time.perf_counter()
            run()
            seconds = time.perf_counter() - begun
            tell(seconds)
            total += seconds
            yield
