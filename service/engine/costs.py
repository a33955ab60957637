"""The cost of rounds in seconds: a table timed at start-up (`Costs`), corrected by measured rounds (`RoundCosts`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median
from typing import NamedTuple

USUALLY_HELD = 200
"""Positions per row that are assumed when costs are needed without a batch."""
LENGTHS = (1, 3, 7, 15)
"""Upper bounds of the groups of proposal lengths that are corrected together, and the lengths at which a draft may stop: a
target call over one token more fills tiles of four positions."""
_BOUNDS = (0, *LENGTHS)
LEAST_SECONDS = 1e-6
"""Minimum seconds of any round."""
FIRST, ESTABLISHED = 3, 8
"""A kind's correction is the median of its first rounds: available after FIRST rounds, final after ESTABLISHED."""
ONCE = 1.5
"""First rounds that take this factor more than the second fastest are ignored: they included one-time work such as
compilation."""
DRIFT = 0.05
"""Weight of a later round in the corrections."""
STALE = 256
"""Timed rounds after which a kind's correction is first forgotten, if none of them was of this kind."""
SPEEDUP_DECAY = 1 - 1 / 256
"""Factor by which a round's weight in the estimated speed-up decays per round."""


@dataclass(frozen=True, slots=True)
class Load:
    """The batch of a round.

    rows: number of rows. held: positions of the longest row (attention reads every row that far). unread: tokens of all rows
    that the draft must read before it can draft. left: tokens that a row may still emit, on average. prompted: prompt tokens
    per token that may be generated. ragged: rows have different lengths. lags: the draft needs a separate catch-up call before
    it can draft. alone: no round can be launched before a round over this batch was read; drafts_alone: the same only after
    rounds that draft.
    """

    rows: int
    held: int
    unread: int = 0
    prompted: float = 0.0
    ragged: bool = False
    left: float = inf
    lags: bool = False
    alone: bool = False
    drafts_alone: bool = False


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs in seconds, interpolated linearly between and beyond the timed points.

    verify: a target call over empty rows, by (rows, tokens per row). step: a draft step over empty rows, by rows. verify_held:
    extra cost of a target call per position of each row, by tokens. step_held: the same for a draft step. read: one token that
    the draft only reads, among many. alone: extra cost of a target call, by rows, if the previous call must be read first, as
    prompt lookup requires; empty: none.
    """

    verify: Mapping[tuple[int, int], float]
    step: Mapping[int, float]
    verify_held: Mapping[int, float]
    step_held: float
    read: float
    alone: Mapping[int, float] = field(default_factory=dict[int, float])

    def call(self, load: Load, tokens: int) -> float:
        """Seconds of one target call over `tokens` tokens per row."""
        by_rows: dict[int, dict[int, float]] = {}
        for (rows, count), seconds in self.verify.items():
            by_rows.setdefault(rows, {})[count] = seconds
        empty = line({rows: line(points, tokens) for rows, points in by_rows.items()}, load.rows)
        return empty + load.rows * load.held * line(self.verify_held, tokens)

    def draft(self, load: Load) -> float:
        """Seconds of one draft step."""
        return line(self.step, load.rows) + load.rows * load.held * self.step_held

    def round(self, load: Load, drafted: int) -> float:
        """Seconds of a round: `drafted` draft steps and one target call over drafted + 1 tokens per row."""
        return self.call(load, drafted + 1) + (drafted * self.draft(load) if drafted else 0.0)

    def scaled(self, ratio: float) -> Costs:
        """The same target with a draft whose steps cost `ratio` times as much."""
        step = {rows: ratio * seconds for rows, seconds in self.step.items()}
        return replace(self, step=step, step_held=ratio * self.step_held, read=ratio * self.read)


def line(points: Mapping[int, float], at: int) -> float:
    """Linear between the neighbouring points, extrapolated beyond the ends. A single point is a constant."""
    known = sorted(points)
    if len(known) == 1 or at in points:
        return points.get(at, points[known[0]])
    above = min(max(next((i for i, x in enumerate(known) if x > at), len(known)), 1), len(known) - 1)
    low, high = known[above - 1], known[above]
    return points[low] + (points[high] - points[low]) * (at - low) / (high - low)


class Kind(NamedTuple):
    """Rounds whose costs are corrected together. rows: bit length of their number. drafted, proposed: index of the group of
    LENGTHS, where a draft may stop; without a draft, proposed is the number of tokens."""

    rows: int
    drafted: int
    proposed: int
    ragged: bool

    @classmethod
    def of(cls, load: Load, drafted: int, proposed: int) -> Kind:
        """The kind of a round with `drafted` draft steps and proposals of up to `proposed` tokens."""
        rows = load.rows.bit_length()
        if not drafted:
            return cls(rows, 0, proposed, load.ragged)
        return cls(rows, bisect_left(_BOUNDS, drafted), bisect_left(_BOUNDS, proposed), load.ragged)

    @property
    def sort(self) -> tuple[bool, bool]:
        """Whether the round has draft steps, and whether it proposes anything."""
        return self.drafted > 0, self.proposed > 0

    def distance(self, other: Kind) -> tuple[int, int, bool] | None:
        """Distance between two kinds, number of rows first. None if one says nothing about the other: they do different things
        (plain, drafted, looked up), or the bit lengths of their numbers of rows differ by more than one."""
        rows = abs(self.rows - other.rows)
        if rows > 1 or self.sort != other.sort:
            return None
        return rows, abs(self.proposed - other.proposed), self.ragged != other.ragged


@dataclass(slots=True)
class Correction:
    """The measured time of rounds of one kind, as a multiple of the seeds. seen: number of the timed round in which the kind
    last occurred. patience: rounds after which the correction is forgotten. It doubles each time: a few slow rounds must not
    make a kind look expensive for ever, but an expensive kind must not be retried too often."""

    first: list[float] = field(default_factory=list[float])
    factor: float | None = None
    seen: int = 0
    patience: int = STALE


class Speedup:
    """Tokens emitted by recent rounds, per token that plain decoding would have emitted in the same time."""

    def __init__(self) -> None:
        self._emitted = self._plain = 0.0

    def observe(self, emitted: int, plain: float) -> None:
        """Count a round. emitted: its tokens. plain: the tokens of plain rounds that take the same time."""
        self._emitted = SPEEDUP_DECAY * self._emitted + emitted
        self._plain = SPEEDUP_DECAY * self._plain + plain

    @property
    def value(self) -> float:
        """The estimate; 0 before the first round. May be read from any thread."""
        return self._emitted / self._plain if self._plain else 0.0


class RoundCosts:
    """Expected seconds of whole rounds. most: maximum length of a proposal.

    Separately timed calls differ from a whole round, so the cost of each kind of round is set by its first rounds. Later rounds
    correct it relative to a neighbouring round of another kind: whatever slows the whole machine, such as a training run, slows
    both.
    """

    def __init__(self, seeds: Costs, most: int) -> None:
        self._most = most
        self.reseed(seeds)

    def reseed(self, seeds: Costs) -> None:
        """Start again from other seeds."""
        self.seeds = seeds
        self._lines: dict[int, list[tuple[float, float]]] = {}
        self._corrections: dict[Kind, Correction] = {}
        self._nearest: dict[Kind, Correction | None] = {}
        """By requested kind, the nearest one that was timed."""
        self._timed = 0
        self._level = 1.0
        """The median of all corrections, for kinds without one."""
        self._speed = 1.0
        """Recent time of rounds of all kinds, as a multiple of the expected time."""
        self._before: tuple[Correction, float] | None = None
        """The kind of the previous round, and its time as a multiple of the expected time."""

    def seconds(self, load: Load, drafted: int, proposed: int) -> float:
        """Expected seconds of a round with `drafted` draft steps and proposals of up to `proposed` tokens, at the machine's
        usual speed."""
        return self._seed(load, drafted, proposed) * self._factor(Kind.of(load, drafted, proposed))

    def extra(self, load: Load, shorter: int, longer: int) -> float:
        """Extra seconds of a round that drafts `longer` tokens over one that drafts `shorter`. Uses the seeds, because the
        corrections of two kinds differ by as much as a token costs."""
        return (self._seed(load, longer, longer) - self._seed(load, shorter, shorter)) * self._level

    def read(self) -> float:
        """Seconds of one token that the draft only reads."""
        return self.seeds.read * self._level

    def plain_rounds(self, load: Load, seconds: float) -> float:
        """The number of plain rounds that currently take this long."""
        return seconds / (self._speed * self.seconds(load, 0, 0))

    def established(self, load: Load, drafted: int, proposed: int) -> bool:
        """Whether enough rounds of this kind were timed to rely on them."""
        known = self._corrections.get(Kind.of(load, drafted, proposed))
        return known is not None and known.factor is not None

    def observe(self, load: Load, drafted: int, proposed: int, seconds: float | None) -> None:
        """Learn from a whole round. seconds: None if it included other work."""
        if seconds is None:
            self._before = None
            return
        kind = Kind.of(load, drafted, proposed)
        known = self._corrections.setdefault(kind, Correction())
        self._timed += 1
        known.seen = self._timed
        self._forget_stale()
        ratio = seconds / (self._speed * self._seed(load, drafted, proposed))
        if known.factor is None or len(known.first) < ESTABLISHED:
            known.first.append(ratio)
            if len(known.first) >= FIRST:
                known.factor = median(each for each in known.first if each <= ONCE * sorted(known.first)[1])
                self._set_level()
            self._before = None
            return
        surprise = ratio / known.factor
        self._speed *= _clipped(surprise) ** DRIFT
        if self._before is not None and self._before[0] is not known:
            other, its_surprise = self._before
            shift = _clipped(surprise / its_surprise) ** (DRIFT / 2)
            known.factor *= shift
            other.factor = None if other.factor is None else other.factor / shift
        self._before = (known, surprise)

    def _factor(self, kind: Kind) -> float:
        """The correction of a kind: its own, or that of the nearest kind that does the same. Without either, the larger of the
        usual correction and that of plain rounds over as many rows, because what slows those slows this kind too."""
        own, plain = self._timed_factor(kind), self._timed_factor(kind._replace(drafted=0, proposed=0))
        return own if own is not None else self._level if plain is None else max(plain, self._level)

    def _timed_factor(self, kind: Kind) -> float | None:
        if kind not in self._nearest:
            near = [
                (distance, each)
                for other, each in self._corrections.items()
                if each.factor is not None and (distance := kind.distance(other)) is not None
            ]
            self._nearest[kind] = min(near, key=lambda pair: pair[0])[1] if near else None
        nearest = self._nearest[kind]
        return None if nearest is None else nearest.factor

    def _set_level(self) -> None:
        """Update after kinds have become known or were forgotten."""
        self._nearest.clear()
        known = [each.factor for each in self._corrections.values() if each.factor is not None]
        self._level = median(known) if known else 1.0

    def _forget_stale(self) -> None:
        for each in self._corrections.values():
            if each.first and self._timed - each.seen > each.patience:
                each.first, each.factor, each.patience = [], None, 2 * each.patience
                self._set_level()
                self._before = None

    def _seed(self, load: Load, drafted: int, proposed: int) -> float:
        """The time of a round according to the seeds."""
        # Cached, because interpolating for every choice took 0.1 ms, which is significant when a round takes 3 ms.
        lines = self._lines.get(load.rows) or self._interpolated(load.rows)
        empty, held = lines[proposed + 1]
        if drafted:
            empty, held = empty + drafted * lines[0][0], held + drafted * lines[0][1]
        if self.seeds.alone and (load.alone or (proposed and (not drafted or load.drafts_alone))):
            empty += line(self.seeds.alone, load.rows)
        # Seeds of few rows can become negative when extrapolated to many.
        return max(empty + load.held * held, LEAST_SECONDS)

    def _interpolated(self, rows: int) -> list[tuple[float, float]]:
        """Seconds over empty rows, and the increase per position held: of a draft step, then of calls over 1, 2, ... tokens."""
        empty, one = Load(rows, 0), Load(rows, 1)
        sums = [(self.seeds.draft(empty), self.seeds.draft(one))]
        sums += [(self.seeds.call(empty, n), self.seeds.call(one, n)) for n in range(1, self._most + 2)]
        self._lines[rows] = [(least, more - least) for least, more in sums]
        return self._lines[rows]


def _clipped(ratio: float) -> float:
    """Limits the influence of a single round to half or double."""
    return min(max(ratio, 0.5), 2.0)
