"""What past runs of a pair read and how they ended, as rows tell it: which texts crash runs, and how large runs have been."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, select

from service.core import Provenance, RunState, Trigger
from service.store.database import Database
from service.store.log.run_texts import Role
from service.store.registry.crash_search import PastRun, Search, search
from service.store.tables import generations, run_texts, training_runs
from service.store.times import utc

RUNS = 64
"""Number of past runs of a pair that are examined."""
_READ = (Role.NEW, Role.WINDOW, Role.REPLAY, Role.RELEASED)
"""Roles of texts that a run's child reads from the log. It learns from none of the SEED texts themselves."""


DAY = timedelta(hours=24)
TYPICAL = 8
"""Number of newest judged runs that determine the typical duration."""


@dataclass(frozen=True, slots=True)
class RunTimes:
    """seconds: of a pair's runs on logged texts that began in the last 24 hours, scoring and pauses included. typical: median
    of the newest runs with a verdict; None: there are none."""

    seconds: float = 0.0
    typical: float | None = None


def run_times(database: Database, who: Provenance, now: datetime) -> RunTimes:
    """How long runs of this pair took. now: the database's time."""
    runs = training_runs.c
    query = select(runs.state, runs.created_at, runs.finished_at, runs.config)
    query = query.where(*of_pair(who), runs.trigger != Trigger.PRACTICE.value).order_by(runs.id.desc())
    with database.read() as connection:
        day = connection.execute(query.where(runs.created_at > (now - DAY).astimezone(UTC))).all()
        judged = [state.value for state in RunState if state.judged]
        typical = connection.execute(query.where(runs.state.in_(judged)).limit(TYPICAL)).all()
    # A run that was lost with its server ends when the next server starts.
    seconds = sum(seconds_of(row, now, json.loads(row.config).get("timeout_seconds", math.inf)) for row in day)
    return RunTimes(seconds, median(seconds_of(row, now, math.inf) for row in typical) if typical else None)


def seconds_of(run: Row[*tuple[Any, ...]], now: datetime, limit: float) -> float:
    """How long a run took, or has taken so far. limit: of one that ended without a verdict, in seconds."""
    end = now if run.finished_at is None else utc(run.finished_at)
    seconds = max((end - utc(run.created_at)).total_seconds(), 0.0)
    return min(seconds, limit) if RunState(run.state).gives_texts_back else seconds


def of_pair(who: Provenance) -> tuple[ColumnElement[bool], ...]:
    """Whether a run trains for this pair."""
    return (
        training_runs.c.target == who.target,
        training_runs.c.tokenizer == who.tokenizer,
        training_runs.c.draft == who.draft,
    )


def crash_search(connection: Connection, who: Provenance) -> Search:
    """The search for a text that crashes the runs of this pair; `search` says how it goes on."""
    ended = _newest_ended(connection, who)
    first = next((row.id for row in ended if row.state == RunState.CRASHED), None)
    if first is None:
        return Search()
    query = select(run_texts.c.run, run_texts.c.seq, run_texts.c.role, generations.c.quarantined_run)
    query = query.join_from(run_texts, generations, generations.c.seq == run_texts.c.seq)
    query = query.where(run_texts.c.run >= first, run_texts.c.run.in_([row.id for row in ended]))
    texts: dict[int, set[int]] = {}
    explained = set[int]()
    for row in connection.execute(query.where(run_texts.c.role.in_(_READ))):
        texts.setdefault(row.run, set()).add(row.seq)
        if row.quarantined_run is not None or row.role == Role.RELEASED:
            explained.add(row.run)
    return search(
        [
            PastRun(RunState(row.state), frozenset(texts.get(row.id, ())))
            for row in ended
            if row.state != RunState.CRASHED or row.id not in explained
        ]
    )


def sizes(connection: Connection, who: Provenance) -> list[tuple[RunState, int]]:
    """How the newest RUNS of this pair that learnt from logged texts ended, and how many texts each had, replayed ones not
    counted; oldest first."""
    ended = _newest_ended(connection, who)
    had = run_texts.c.role.in_((Role.NEW, Role.RELEASED, Role.WINDOW))
    count = select(run_texts.c.run, func.count()).where(had, run_texts.c.run.in_([row.id for row in ended]))
    counts = {row[0]: int(row[1]) for row in connection.execute(count.group_by(run_texts.c.run))}
    return [(RunState(row.state), counts[row.id]) for row in ended if row.id in counts]


def _newest_ended(connection: Connection, who: Provenance) -> Sequence[Row[Any, Any]]:
    """Id and state of the newest RUNS that are over and were no practice, oldest first."""
    query = select(training_runs.c.id, training_runs.c.state).where(
        *of_pair(who),
        training_runs.c.trigger != Trigger.PRACTICE.value,
        training_runs.c.state.in_([state.value for state in RunState if state.over]),
    )
    return connection.execute(query.order_by(training_runs.c.id.desc()).limit(RUNS)).all()[::-1]
