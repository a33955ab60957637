"""How drafts did over time: a bounded sample of the log, in stretches of equal length, by adapter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from sqlalchemy import Connection, Row, and_, bindparam, func, select

from service.core import DepthCounts, Provenance, Round, Source, TrafficPoint
from service.store.log.queries import same_pair
from service.store.log.rows import rounds_of
from service.store.tables import generations
from service.store.times import utc

STRETCHES = 60
"""Into which the time is divided."""
EDGE = 10
"""Generations that are read at either end of a stretch: a switch of adapters inside it shows, and a long log costs no more."""
DEPTHS = 4
"""Adapters whose acceptance by depth is shown: the newest of those that drafted."""

_BETWEEN = and_(generations.c.seq >= bindparam("low"), generations.c.seq < bindparam("high"))
_NEAREST: Any = select(generations.c.seq, generations.c.created_at).where(_BETWEEN).order_by(generations.c.seq).limit(1)
"""Made once: a search asks it some hundred times."""


@dataclass(slots=True)
class _Counts:
    generations: int = 0
    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class _Depths:
    """By place in the draft."""

    drafted: list[int] = field(default_factory=list[int])
    accepted: list[int] = field(default_factory=list[int])

    def add(self, made: Round) -> None:
        longer = made.drafted - len(self.drafted)
        self.drafted += [0] * longer
        self.accepted += [0] * longer
        for place in range(made.drafted):
            self.drafted[place] += 1
            self.accepted[place] += place < made.accepted


def read_traffic(
    connection: Connection, who: Provenance, since: datetime
) -> tuple[tuple[TrafficPoint, ...], tuple[DepthCounts, ...]]:
    """Of what was recorded since then: points in order of time, and acceptance by depth of the newest adapters."""
    seqs = connection.execute(select(func.min(generations.c.seq), func.max(generations.c.seq))).one()
    if seqs[0] is None:
        return (), ()
    first, end = seqs[0], seqs[1] + 1
    (low,) = _seqs_at(connection, first, end, [since])
    oldest, newest = _nearest(connection, low, end), _nearest(connection, end - 1, end)
    if oldest is None or newest is None:
        return (), ()
    # From the first row to the last: an hour of traffic is more than one point, whatever time was asked for.
    start = utc(oldest.created_at)
    step = (utc(newest.created_at) - start) / STRETCHES
    edges = [low, *_seqs_at(connection, low, end, [start + step * i for i in range(1, STRETCHES)]), end]
    points: list[TrafficPoint] = []
    depths: dict[int, _Depths] = defaultdict(_Depths)
    for low, high in pairwise(edges):
        points += _points(connection, who, low, high, depths)
    shown = sorted(depths, reverse=True)[:DEPTHS]
    return tuple(points), tuple(
        DepthCounts(adapter, tuple(depths[adapter].drafted), tuple(depths[adapter].accepted)) for adapter in shown
    )


def _points(
    connection: Connection, who: Provenance, low: int, high: int, depths: dict[int, _Depths]
) -> list[TrafficPoint]:
    counts: dict[int, _Counts] = defaultdict(_Counts)
    for row in _sample(connection, low, high) if low < high else ():
        rounds = rounds_of(row.rounds) if same_pair(row, who) else ()
        for adapter in {made.adapter for made in rounds}:
            counts[adapter].generations += 1
            counts[adapter].seconds += utc(row.created_at).timestamp()
        for made in rounds:
            one = counts[made.adapter]
            one.tokens += made.emitted
            one.rounds += 1
            if made.source is Source.DRAFT and made.drafted:
                one.drafted += made.drafted
                one.accepted += made.accepted
                depths[made.adapter].add(made)
    made = [
        TrafficPoint(
            datetime.fromtimestamp(one.seconds / one.generations, UTC),
            adapter,
            one.generations,
            one.tokens,
            one.rounds,
            one.drafted,
            one.accepted,
        )
        for adapter, one in counts.items()
    ]
    return sorted(made, key=lambda point: point.at)


def _sample(connection: Connection, low: int, high: int) -> list[Row[Any]]:
    """The first and the last EDGE generations with low <= seq < high."""
    made = generations.c
    columns = (made.seq, made.created_at, made.rounds, made.target, made.tokenizer, made.draft)
    query: Any = select(*columns).where(_BETWEEN).limit(EDGE)
    between = {"low": low, "high": high}
    ends = [connection.execute(query.order_by(order), between) for order in (made.seq, made.seq.desc())]
    return list({row.seq: row for end in ends for row in end}.values())


def _seqs_at(connection: Connection, low: int, high: int, moments: Sequence[datetime]) -> list[int]:
    """For each moment, in ascending order, the first generation from `low` on (seq) that was recorded then or later; `high`
    where there is none below it. By bisection: times have no index, and rows are recorded in their order but for moments."""
    if not moments or low >= high:
        return [high] * len(moments)
    middle = (low + high) // 2
    row = _nearest(connection, middle, high)
    if row is None:
        return _seqs_at(connection, low, middle, moments)
    at = utc(row.created_at)
    before = [moment for moment in moments if moment <= at]
    after = moments[len(before) :]
    return [*_seqs_at(connection, low, middle, before), *_seqs_at(connection, row.seq + 1, high, after)]


def _nearest(connection: Connection, low: int, high: int) -> Row[Any] | None:
    """The first generation with low <= seq < high."""
    return connection.execute(_NEAREST, {"low": low, "high": high}).one_or_none()
