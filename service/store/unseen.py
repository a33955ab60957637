"""Generations on which no draft was tried: they have no failure cases until these are worked out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import ColumnElement, Connection, ScalarSelect, and_, delete, func, insert, select, tuple_, update

from service.core import AcceptRule, FailureCase, Generation, Provenance, Source
from service.store.database import Database
from service.store.run_texts import had, learnt
from service.store.tables import failure_cases, generations, run_texts, unseen


def untried(made: Generation) -> bool:
    """Whether the draft was tried at fewer than half of its tokens, and what it would have left there can be told: the text
    has one course of rounds whoever drafted it, and the target's word on it was kept."""
    tried = sum(r.emitted for r in made.rounds if r.drafted and r.source is Source.DRAFT)
    one_course = made.prompt.sampling.rule is AcceptRule.MATCH
    return one_course and made.targets is not None and 2 * tried < len(made.output)


class Unseen:
    """The queue of such generations. One leaves it when its cases are supplied, be they none."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def tokens(self, who: Provenance) -> int:
        """Output tokens of those that this very pair made and no run has had."""
        query = select(func.coalesce(func.sum(_of(who, generations.c.output_tokens)), 0)).select_from(unseen)
        with self._db.read() as connection:
            return int(connection.execute(query).scalar_one())

    def names(self, who: Provenance, limit: int) -> list[str]:
        """Ids of the newest `limit` of them, newest first."""
        name = _of(who, generations.c.id)
        query = select(name).select_from(unseen).where(name.is_not(None)).order_by(unseen.c.seq.desc())
        with self._db.read() as connection:
            return list(connection.execute(query.limit(limit)).scalars())

    def supply(self, found: Mapping[str, Sequence[FailureCase]]) -> int:
        """Cases of waiting generations, which then wait no longer. A position that has a case keeps its own. Generations that
        wait no more, or that a run has had meanwhile, are passed over. How many cases were new."""

        def work(connection: Connection) -> int:
            count = 0
            for name, cases in found.items():
                query = select(unseen.c.seq).join_from(unseen, generations, generations.c.seq == unseen.c.seq)
                seq = connection.execute(query.where(generations.c.id == name, _free())).scalar()
                if seq is not None:
                    count += add_cases(connection, seq, cases)
                    connection.execute(delete(unseen).where(unseen.c.seq == seq))
            # What a run has learnt from without this would stay for ever.
            gone = learnt().with_only_columns(run_texts.c.seq)
            connection.execute(delete(unseen).where(unseen.c.seq.in_(gone)))
            return count

        return self._db.write(work).result()


def _of(who: Provenance, what: ColumnElement[Any]) -> ScalarSelect[Any]:
    """A column of a waiting generation, nothing where another pair made it."""
    # Asked for one by one: joined, SQLite would go through all that the pair ever made.
    pair = (generations.c.target, generations.c.tokenizer, generations.c.draft)
    mine = tuple_(*pair) == tuple_(who.target, who.tokenizer, who.draft)
    return select(what).where(generations.c.seq == unseen.c.seq, mine, _free()).correlate(unseen).scalar_subquery()


def _free() -> ColumnElement[bool]:
    """No run has had the text, and it is not put aside: it is not to come back by another door."""
    return and_(generations.c.quarantined_run.is_(None), ~had())


def add_cases(connection: Connection, seq: int, cases: Sequence[FailureCase]) -> int:
    """Cases at positions that have none; how many."""
    query = select(failure_cases.c.position).where(failure_cases.c.seq == seq)
    known = set(connection.execute(query).scalars())
    new = [{"seq": seq, **asdict(case)} for case in cases if case.position not in known]
    if new:
        connection.execute(insert(failure_cases), new)
        untied = sum(not case["tie"] for case in new)
        connection.execute(
            update(generations).where(generations.c.seq == seq).values(cases=generations.c.cases + untied)
        )
    return len(new)
