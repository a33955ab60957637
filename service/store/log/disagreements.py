"""The failure cases in which draft and target disagreed most, and the newest ones, with the text before them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, FromClause, Row, Select, select

from service.core import Disagreement, Provenance, Source
from service.store.log.queries import same_pair
from service.store.log.rows import ids_of, rounds_of
from service.store.tables import failure_cases, generations
from service.store.times import utc

NEWEST = 2000
"""Number of newest failure cases among which the worst are searched."""
ALIKE = 10
"""Cases read per case shown: templated traffic repeats the same ones."""
CONTEXT = 48
"""Number of tokens shown before a case."""


def worst_cases(connection: Connection, who: Provenance, limit: int) -> list[Disagreement]:
    """See core.Overview.disagreements. Near-ties are left out."""
    newest = select(failure_cases).order_by(failure_cases.c.id.desc()).limit(NEWEST).subquery()
    query = (
        _cases(newest)
        .where(newest.c.tie.is_(False))
        .order_by((newest.c.q - newest.c.p).desc(), newest.c.id.desc())
        .limit(ALIKE * limit)
    )
    worst: dict[tuple[int, int], Disagreement] = {}
    for row in connection.execute(query):
        # The pair is compared outside, as in queries.newest.
        if same_pair(row, who) and len(worst) < limit:
            worst.setdefault((row.drafted, row.correct), _disagreement(row))
    return list(worst.values())


def newest_cases(connection: Connection, who: Provenance, limit: int, before: int | None) -> list[Disagreement]:
    """See core.Overview.newest_cases. Of the newest NEWEST, of any pair."""
    earlier = [] if before is None else [failure_cases.c.id < before]
    newest = select(failure_cases.c.id, failure_cases.c.seq).where(*earlier).order_by(failure_cases.c.id.desc())
    newest = newest.limit(NEWEST).subquery()
    pair = (generations.c[name] for name in ("tokenizer", "target", "draft"))
    query = select(newest.c.id, *pair).join_from(newest, generations, generations.c.seq == newest.c.seq)
    # Without prompts and answers, which are read of those that are shown.
    mine = [row.id for row in connection.execute(query.order_by(newest.c.id.desc())) if same_pair(row, who)]
    these = _cases(failure_cases).where(failure_cases.c.id.in_(mine[:limit]))
    return [_disagreement(row) for row in connection.execute(these.order_by(failure_cases.c.id.desc()))]


def _cases(cases: FromClause) -> Select[Any]:
    """Failure cases as `_disagreement` and `same_pair` read them."""
    named = ("id", "domain", "client", "created_at", "prompt", "output", "rounds", "tokenizer", "draft", "target")
    return select(
        *(cases.c[name] for name in ("position", "drafted", "p", "q", "tie")),
        cases.c.target.label("correct"),
        cases.c.id.label("case"),
        *(generations.c[name] for name in named),
    ).join_from(cases, generations, generations.c.seq == cases.c.seq)


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
        tie=row.tie,
        case=row.case,
    )
