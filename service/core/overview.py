"""Bounded extracts of one pair's log and adapter registry, for the page that the server shows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from service.core.training import AdapterState, Verdict


@dataclass(frozen=True, slots=True)
class TrafficPoint:
    """One adapter's results in one time interval. at: mean time of the generations counted. tokens, rounds: of all generations,
    from any source; drafted, accepted: tokens of the draft model only."""

    at: datetime
    adapter: int
    generations: int
    tokens: int
    rounds: int
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class DepthCounts:
    """Drafted tokens of one adapter by position in the draft, first position first, and how many of them were accepted."""

    adapter: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and when it was recorded."""

    at: datetime
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """An adapter version with its verdicts. gate: promoted or rejected. watch: confirmed or rolled back."""

    id: int
    parent: int
    run: int | None
    state: AdapterState
    created_at: datetime
    gate: Judgement | None
    watch: Judgement | None


@dataclass(frozen=True, slots=True)
class History:
    """What was recorded in an interval, in order of time. adapters: the newest, newest first, whenever they were created."""

    start: datetime
    end: datetime
    points: tuple[TrafficPoint, ...]
    depths: tuple[DepthCounts, ...]
    adapters: tuple[AdapterRecord, ...]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A failure case with the tokens before it. adapter: the version that drafted; None: not known, because the case was
    computed later. p, q: probability of `drafted` under target and draft. tie: they differ only by numerical noise. case: its
    id."""

    generation: str
    position: int
    domain: str | None
    client: str | None
    adapter: int | None
    context: tuple[int, ...]
    drafted: int
    target: int
    p: float
    q: float
    created_at: datetime
    tie: bool = False
    case: int = 0
