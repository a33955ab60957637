"""Failure cases, newest first, and their tokens in context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Select, func, insert, select, update

from service.core import FailureCase, Generation, NotFound, Source
from service.store.database import Database
from service.store.log.rows import case_of, ids_of
from service.store.log.run_texts import judged_run_texts
from service.store.tables import failure_cases, generations, run_texts
from service.store.times import utc


def undrafted(made: Generation) -> bool:
    """Whether the draft proposed fewer than half of the tokens, so that its errors are unknown, although the target's
    probabilities were recorded and the text can be trained on."""
    proposed = sum(r.emitted for r in made.rounds if r.drafted and r.source is Source.DRAFT)
    return made.targets is not None and 2 * proposed < len(made.output)


def add_cases(connection: Connection, seq: int, cases: Sequence[FailureCase]) -> int:
    """Adds the cases of a drafted copy to a text that was recorded undrafted; existing cases are kept. Returns the
    number of new ones."""
    query = select(failure_cases.c.position, failure_cases.c.tie).where(failure_cases.c.seq == seq)
    known = {row.position: row.tie for row in connection.execute(query)}
    new = [case for case in cases if case.position not in known]
    if new:
        connection.execute(insert(failure_cases), [{"seq": seq, **asdict(case)} for case in new])
    untied = sum(not tie for tie in (*known.values(), *(case.tie for case in new)))
    connection.execute(update(generations).where(generations.c.seq == seq).values(cases=untied))
    return len(new)


@dataclass(frozen=True, slots=True)
class CaseRow:
    """trained_run: the newest run that learnt from its text as new. created_at: the generation's time."""

    id: int
    generation: str
    domain: str | None
    case: FailureCase
    trained_run: int | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class CaseContext:
    """Tokens around a failure case. before: of prompt and answer, up to the case. after: of the answer, following the
    target's token. tokenizer: fingerprint of their tokenizer."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    tokenizer: str


class Cases:
    """The failure cases of a database, read only."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def newest(self, limit: int, offset: int = 0) -> list[CaseRow]:
        """Newest first, without the first `offset`."""
        return self._rows(self._query().order_by(failure_cases.c.id.desc()).limit(limit).offset(offset))

    def get(self, case_id: int) -> CaseRow:
        """The failure case with this id. Raises NotFound."""
        found = self._rows(self._query().where(failure_cases.c.id == case_id))
        if not found:
            raise NotFound(f"no failure case {case_id}")
        return found[0]

    def context(self, case_id: int, before: int, after: int) -> CaseContext:
        """Up to so many tokens before a failure case and after it. Raises NotFound."""
        columns = (generations.c.prompt, generations.c.output, generations.c.tokenizer, failure_cases.c.position)
        query = (
            select(*columns)
            .join_from(failure_cases, generations, generations.c.seq == failure_cases.c.seq)
            .where(failure_cases.c.id == case_id)
        )
        with self._db.read() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            raise NotFound(f"no failure case {case_id}")
        prompt, output = ids_of(row.prompt), ids_of(row.output)
        text, at = (*prompt, *output), len(prompt) + row.position
        return CaseContext(text[max(at - before, 0) : at], text[at + 1 : at + 1 + after], row.tokenizer)

    @staticmethod
    def _query() -> Select[Any]:
        run = (
            judged_run_texts()
            .with_only_columns(func.max(run_texts.c.run))
            .where(run_texts.c.seq == failure_cases.c.seq)
            .correlate(failure_cases)
            .scalar_subquery()
        )
        return select(
            failure_cases,
            generations.c.id.label("generation"),
            generations.c.domain,
            generations.c.created_at,
            run.label("trained_run"),
        ).join_from(failure_cases, generations, generations.c.seq == failure_cases.c.seq)

    def _rows(self, query: Select[Any]) -> list[CaseRow]:
        with self._db.read() as connection:
            return [
                CaseRow(row.id, row.generation, row.domain, case_of(row), row.trained_run, utc(row.created_at))
                for row in connection.execute(query)
            ]
