"""Past practice of a pair, from its runs' rows."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row, func, select

from service.core import Provenance, RunState, Trigger
from service.store.database import Database
from service.store.registry.run_history import DAY, of_pair, seconds_of
from service.store.tables import generations, training_runs
from service.store.times import utc

MINUTES = "practice_minutes"
"""In a run's recipe, how long it may practise."""
NEWEST = 64
"""Number of practice runs that are examined."""
MOST_NEW = 1000
"""Maximum number of new generations that are counted."""


@dataclass(frozen=True, slots=True)
class Practised:
    """seconds: of the practice runs that began in the last 24 hours, pauses included. refused: the newest practice runs in a
    row that were rejected or failed by themselves. new: generations logged since the newest of these was claimed, MOST_NEW at
    most."""

    seconds: float = 0.0
    refused: int = 0
    new: int = 0


def practised(database: Database, who: Provenance, now: datetime) -> Practised:
    """Past practice of this pair. now: the database's time."""
    runs = training_runs.c
    query = select(runs.state, runs.created_at, runs.finished_at, runs.log_end, runs.config)
    query = query.where(runs.trigger == Trigger.PRACTICE.value, *of_pair(who)).order_by(runs.id.desc()).limit(NEWEST)
    with database.read() as connection:
        rows = connection.execute(query).all()
        seconds = sum(_seconds(row, now) for row in rows if utc(row.created_at) > now - DAY)
        # One that was ended from outside, or lost with its server, says nothing about practice.
        silent = {RunState.ENDED, RunState.LOST}
        decided = [row for row in rows if RunState(row.state).over and RunState(row.state) not in silent]
        refused = next((i for i, row in enumerate(decided) if row.state == RunState.PROMOTED.value), len(decided))
        if not refused:
            return Practised(seconds)
        newer = select(generations.c.seq).where(generations.c.seq > decided[0].log_end).limit(MOST_NEW).subquery()
        new = connection.execute(select(func.count()).select_from(newer)).scalar_one()
    return Practised(seconds, refused, new)


def _seconds(run: Row[*tuple[Any, ...]], now: datetime) -> float:
    """How long a run took. One without a verdict no longer than it might practise: one that was killed with its server ends
    when the next server starts."""
    return seconds_of(run, now, 60 * json.loads(run.config).get(MINUTES, math.inf))
