"""Data for the server's page from the rows of its pair."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import select

from service.core import AdapterRecord, AdapterState, Disagreement, History, Judgement, Provenance, TrainingRun
from service.store.database import Database
from service.store.log.disagreements import newest_cases, worst_cases
from service.store.log.traffic import read_traffic
from service.store.registry.adapters import EvaluationKind, trained_for
from service.store.registry.runs import Runs
from service.store.registry.verdicts import from_json
from service.store.tables import adapters, evaluations
from service.store.times import time_of, utc

ADAPTERS = 50
"""The newest, which are shown."""


class PairOverview:
    """core.Overview of the pair that this process serves."""

    def __init__(self, database: Database, who: Provenance) -> None:
        self._db = database
        self._who = who
        self._runs = Runs(database)

    def history(self, hours: int) -> History:
        """See core.Overview."""
        with self._db.read() as connection:
            end = time_of(connection)
            start = end - timedelta(hours=hours)
            points, depths = read_traffic(connection, self._who, start)
        return History(start, end, points, depths, self._adapters())

    def disagreements(self, limit: int) -> list[Disagreement]:
        """See core.Overview."""
        with self._db.read() as connection:
            return worst_cases(connection, self._who, limit)

    def newest_cases(self, limit: int, before: int | None = None) -> list[Disagreement]:
        """See core.Overview. Of 2,000 of the database."""
        with self._db.read() as connection:
            return newest_cases(connection, self._who, limit, before)

    def newest_run(self) -> TrainingRun | None:
        """See core.Overview."""
        return next(iter(self._runs.newest(self._who)), None)

    def _adapters(self) -> tuple[AdapterRecord, ...]:
        known = select(adapters).where(*trained_for(self._who.target, self._who.draft))
        known = known.order_by(adapters.c.id.desc()).limit(ADAPTERS)
        deciding = (EvaluationKind.GATE.value, EvaluationKind.WATCH.value)
        with self._db.read() as connection:
            rows = connection.execute(known).all()
            of_these = (evaluations.c.adapter.in_([row.id for row in rows]), evaluations.c.kind.in_(deciding))
            verdicts = {
                (row.adapter, row.kind): Judgement(utc(row.created_at), from_json(row.verdict))
                for row in connection.execute(select(evaluations).where(*of_these).order_by(evaluations.c.id))
            }
        return tuple(
            AdapterRecord(
                row.id,
                row.parent,
                row.run,
                AdapterState(row.state),
                utc(row.created_at),
                verdicts.get((row.id, EvaluationKind.GATE)),
                verdicts.get((row.id, EvaluationKind.WATCH)),
            )
            for row in rows
        )
