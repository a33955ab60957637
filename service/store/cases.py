"""Failure cases for whoever looks at them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select

from service.core import FailureCase
from service.store.database import Database
from service.store.rows import case_of, utc
from service.store.run_texts import learnt
from service.store.tables import failure_cases, generations, run_texts


@dataclass(frozen=True, slots=True)
class CaseRow:
    """trained_run: the newest run that learnt from its text as new. created_at: the generation's."""

    generation: str
    domain: str | None
    case: FailureCase
    trained_run: int | None
    created_at: datetime


class Cases:
    """The failure cases of a database, read only."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def newest(self, limit: int, offset: int = 0) -> list[CaseRow]:
        """Newest first, without the first `offset`."""
        run = (
            learnt()
            .with_only_columns(func.max(run_texts.c.run))
            .where(run_texts.c.seq == failure_cases.c.seq)
            .correlate(failure_cases)
            .scalar_subquery()
        )
        query = (
            select(
                failure_cases,
                generations.c.id.label("generation"),
                generations.c.domain,
                generations.c.created_at,
                run.label("trained_run"),
            )
            .join_from(failure_cases, generations, generations.c.seq == failure_cases.c.seq)
            .order_by(failure_cases.c.id.desc())
            .limit(limit)
            .offset(offset)
        )
        with self._db.read() as connection:
            return [
                CaseRow(row.generation, row.domain, case_of(row), row.trained_run, utc(row.created_at))
                for row in connection.execute(query)
            ]
