"""What the log and the registry of adapters say of one pair, in bounded extracts: for the page that the server shows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from service.core.training import AdapterState, Verdict


@dataclass(frozen=True, slots=True)
class TrafficPoint:
    """How one adapter did in one stretch of time. at: mean time of the generations counted. tokens and rounds: of all of them,
    whoever proposed; drafted, accepted: tokens of the draft model alone."""

    at: datetime
    adapter: int
    generations: int
    tokens: int
    rounds: int
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class DepthCounts:
    """Drafted tokens of one adapter by their place in the draft, the first place first, and how many of them were accepted."""

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
    """An adapter version with the verdicts that decided about it. gate: it was promoted or rejected. watch: it was confirmed
    or rolled back."""

    id: int
    parent: int
    run: int | None
    state: AdapterState
    created_at: datetime
    gate: Judgement | None
    watch: Judgement | None


@dataclass(frozen=True, slots=True)
class History:
    """What was recorded between two moments, in order of time. adapters: the newest, newest first, whenever they were made."""

    start: datetime
    end: datetime
    points: tuple[TrafficPoint, ...]
    depths: tuple[DepthCounts, ...]
    adapters: tuple[AdapterRecord, ...]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A failure case with the tokens before it. adapter: the version that drafted; None: that is not known, for the case was
    worked out later. p, q: probability of `drafted` under target and draft. tie: they differ by numerical noise alone.
    case: its id."""

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
