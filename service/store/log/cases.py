"""Failure cases: those that undrafted texts get later, and the list of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update

from service.core import AcceptRule, Disagreement, FailureCase, Generation, Provenance, Source
from service.store.database import Database
from service.store.log.queries import same_pair
from service.store.log.rows import case_of, ids_of, rounds_of
from service.store.log.run_texts import completed_run_texts
from service.store.tables import failure_cases, generations, run_texts
from service.store.times import utc

NEWEST = 2000
"""Failure cases of which the worst are shown."""
ALIKE = 10
"""Cases that are read for each that is shown: templated traffic has the same one again and again."""
CONTEXT = 48
"""Tokens before a case that are shown with it."""


def undrafted(made: Generation) -> bool:
    """Whether the draft proposed fewer than half of the tokens, and its cases can be worked out from the text: it is greedy or
    seeded, and the target's probabilities were recorded."""
    proposed = sum(r.emitted for r in made.rounds if r.drafted and r.source is Source.DRAFT)
    settled = made.prompt.sampling.rule is AcceptRule.MATCH and made.targets is not None
    return settled and 2 * proposed < len(made.output)


def add_cases(connection: Connection, seq: int, cases: Sequence[FailureCase]) -> int:
    """Add the cases of an undrafted text, which are known from now on; a position that has a case keeps its own. Returns how
    many were new."""
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
            completed_run_texts()
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

    def worst(self, who: Provenance, limit: int) -> list[Disagreement]:
        """See core.Overview.disagreements. Near-ties are left out."""
        newest = select(failure_cases).order_by(failure_cases.c.id.desc()).limit(NEWEST).subquery()
        named = ("id", "domain", "client", "created_at", "prompt", "output", "rounds", "tokenizer", "draft")
        query = (
            select(
                *(newest.c[name] for name in ("position", "drafted", "p", "q")),
                newest.c.target.label("correct"),
                *(generations.c[name] for name in (*named, "target")),
            )
            .join_from(newest, generations, generations.c.seq == newest.c.seq)
            .where(newest.c.tie.is_(False))
            .order_by((newest.c.q - newest.c.p).desc(), newest.c.id.desc())
            .limit(ALIKE * limit)
        )
        worst: dict[tuple[int, int], Disagreement] = {}
        with self._db.read() as connection:
            for row in connection.execute(query):
                # The pair is compared outside, as in queries.newest.
                if same_pair(row, who) and len(worst) < limit:
                    worst.setdefault((row.drafted, row.correct), _disagreement(row))
        return list(worst.values())


def _disagreement(row: Row[Any]) -> Disagreement:
    at = row.position
    inside = [made for made in rounds_of(row.rounds) if made.start <= at < made.start + made.emitted]
    drafting = [made.adapter for made in inside if made.drafted and made.source is Source.DRAFT]
    return Disagreement(
        generation=row.id,
        position=at,
        domain=row.domain,
        client=row.client,
        adapter=drafting[0] if drafting else None,
        context=(*ids_of(row.prompt), *ids_of(row.output)[:at])[-CONTEXT:],
        drafted=row.drafted,
        target=row.correct,
        p=row.p,
        q=row.q,
        created_at=utc(row.created_at),
    )
