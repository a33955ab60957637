"""Answers of the routes that the page reads."""

from __future__ import annotations

from datetime import datetime

from service.api.schemas import Finite, ResponseModel, VerdictAnswer
from service.core import AdapterState


class TrafficPointAnswer(ResponseModel):
    """One adapter in one period, from a sample of its generations. at: their mean time."""

    at: datetime
    adapter: int
    generations: int
    tokens: int
    rounds: int
    drafted: int
    accepted: int


class DepthAnswer(ResponseModel):
    """One adapter's drafted tokens by position in the proposal, and how many of them were accepted."""

    adapter: int
    drafted: list[int]
    accepted: list[int]


class JudgementAnswer(ResponseModel):
    """A verdict and the time it was recorded."""

    at: datetime
    verdict: VerdictAnswer


class AdapterRecordAnswer(ResponseModel):
    """An adapter version. gate: the verdict that promoted or rejected it. watch: the one that confirmed or rolled it back."""

    id: int
    parent: int
    run: int | None
    state: AdapterState
    created_at: datetime
    gate: JudgementAnswer | None
    watch: JudgementAnswer | None


class HistoryAnswer(ResponseModel):
    """start, end: the requested period. points: in order of time. depths: of the newest adapters that drafted in the
    period. adapters: the newest ones, newest first, regardless of the period."""

    start: datetime
    end: datetime
    points: list[TrafficPointAnswer]
    depths: list[DepthAnswer]
    adapters: list[AdapterRecordAnswer]


class CaseAnswer(ResponseModel):
    """A failure case as text. id: of the answer; position: the token's index in it. context: the text before it. p, q:
    probability of the drafted token under target and draft. adapter: null if unknown."""

    id: str
    position: int
    domain: str | None
    client: str | None
    adapter: int | None
    context: str
    drafted: str
    target: str
    p: Finite
    q: Finite
    created_at: datetime
    case: int
    """The case's id, for `before`."""
    tie: bool
    """The two differ only by numerical noise; only among the newest."""


class CasesAnswer(ResponseModel):
    """The worst first, or the newest."""

    cases: list[CaseAnswer]
