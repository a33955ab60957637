"""What past runs of a pair read and how they ended, as rows tell it: which texts crash runs, and how large runs have been."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, select

from service.core import Provenance, RunState, Trigger
from service.store.log.run_texts import Role
from service.store.registry.crash_search import PastRun, Search, search
from service.store.tables import generations, run_texts, training_runs

RUNS = 64
"""Past runs of a pair that are looked at."""
_READ = (Role.NEW, Role.WINDOW, Role.REPLAY, Role.RELEASED)
"""Roles of texts that a run's child reads from the log. It learns from none of the SEED texts themselves."""


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
