"""What training runs learn from: the texts that none has had yet, those of a run, and the window before them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, case, func, or_, select

from service.core import Generation, Provenance
from service.store.database import Database
from service.store.log.generations import TRAIN
from service.store.log.queries import TEXT, load, newest, of_target, same_target, text_of
from service.store.log.run_texts import PAGE, Role, claimed_by_run, texts_of
from service.store.log.sampler import Text, capped
from service.store.tables import generations, run_texts

READ_PER_TEXT = 4
"""Generations that are read for each that the window wants: some are held out, quarantined, or the run's own."""
CLIENT_SHARE = 0.1
"""Of the texts that practice begins like, what one client may have at most, where there are ten."""
RATED = 500
"""Newest texts with failure cases that say how many cases a token has."""


@dataclass(frozen=True, slots=True)
class UntrainedCounts:
    """Texts that no run of the draft has had. cases, tokens, generations: near-ties not counted, output tokens and number of
    the texts that have such cases. undrafted: output tokens of texts whose cases are not known yet. rate: cases per output
    token of the newest texts that have any; None: there are none."""

    cases: int
    tokens: int
    generations: int
    undrafted: int = 0
    rate: float | None = None

    @property
    def expected_cases(self) -> float:
        """With those that undrafted texts will have at `rate`: as many as it takes where no rate is known."""
        if not self.undrafted:
            return self.cases
        return math.inf if self.rate is None else self.cases + self.rate * self.undrafted

    @property
    def expected_tokens(self) -> int:
        """Output tokens, those of undrafted texts included."""
        return self.tokens + self.undrafted


class TrainingTexts:
    """Which texts of a database training runs learn from. Read only: a run claims them in store.registry.runs."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def untrained(self, who: Provenance) -> UntrainedCounts:
        """What the next run of this pair could be claimed for: texts outside the held-out set that no run of this draft has
        had, with failure cases or undrafted."""
        with self._db.read() as connection:
            counts = _counts(connection, _untrained(who))
            if not counts.undrafted:
                return counts
            rated = (
                select(generations.c.cases, generations.c.output_tokens)
                .where(of_target(who), generations.c.split == TRAIN, generations.c.cases > 0)
                .order_by(generations.c.seq.desc())
                .limit(RATED)
                .subquery()
            )
            cases, tokens = connection.execute(select(func.sum(rated.c.cases), func.sum(rated.c.output_tokens))).one()
        return replace(counts, rate=int(cases) / int(tokens) if tokens else None)

    def claimed(self, run_id: int) -> list[Generation]:
        """What a run was claimed for, newest first."""
        return load(self._db, texts_of(run_id, Role.NEW))

    def claimed_again(self, run_id: int) -> list[Generation]:
        """The texts of a run's window, newest first. While its child has not named its own, those that it was claimed for
        although other runs had learnt them: they are suspected of crashing runs."""
        return load(self._db, texts_of(run_id, Role.WINDOW))

    def claimed_names(self, run_id: int) -> list[tuple[str, str | None]]:
        """(id, domain) of what a run was claimed for, newest first."""
        query = select(generations.c.id, generations.c.domain).where(texts_of(run_id, Role.NEW))
        with self._db.read() as connection:
            return [(row.id, row.domain) for row in connection.execute(query.order_by(generations.c.seq.desc()))]

    def seeds(self, who: Provenance, limit: int) -> list[str]:
        """Ids of texts of this target and tokenizer whose prompts practice may begin like: none is held out or quarantined,
        each has a user's message, and no client has more than CLIENT_SHARE of them, no template more than half
        (`sampler.capped`). At most `limit`, newest first: of as many of the newest as give so many."""
        columns = (*TEXT, generations.c.split, generations.c.output_tokens, generations.c.quarantined_run)
        fit = [
            text_of(row)
            for row in newest(self._db, READ_PER_TEXT * limit, *columns)
            if _learnable(row) and same_target(row, who) and row.first_user.strip()
        ]

        def seeds(count: int) -> list[Text]:
            return capped(fit[:count], client_share=CLIENT_SHARE)

        # Cut to the limit afterwards, whoever has sent the newest would have more than these shares of what stays.
        counts = range(len(fit) + 1)
        return [one.id for one in seeds(bisect_right(counts, limit, key=lambda count: len(seeds(count))) - 1)]

    def seeds_of(self, run_id: int) -> list[Generation]:
        """The texts of the log that a run's practice began like, and that are still there, newest first."""
        return load(self._db, texts_of(run_id, Role.SEED))

    def named(self, names: Sequence[str]) -> list[Text]:
        """Those of these generations that are in the log and not quarantined, in no order."""
        pages = [names[start : start + PAGE] for start in range(0, len(names), PAGE)]
        with self._db.read() as connection:
            return [
                text_of(row)
                for page in pages
                for row in connection.execute(
                    select(*TEXT).where(generations.c.id.in_(page), generations.c.quarantined_run.is_(None))
                )
            ]

    def window(self, who: Provenance, run_id: int, limit: int) -> list[Generation]:
        """The newest `limit` texts of this target and tokenizer that are not the run's own, none of them held out or
        quarantined. Newest first."""
        if limit <= 0:
            return []
        columns = (generations.c.seq, generations.c.split, generations.c.output_tokens, generations.c.quarantined_run)
        rows = newest(self._db, READ_PER_TEXT * limit, *columns)
        fit = [row for row in rows if _learnable(row)]
        with self._db.read() as connection:
            query = select(run_texts.c.seq).where(run_texts.c.run == run_id, run_texts.c.role == Role.NEW)
            own = set(connection.execute(query).scalars())
        seqs = [r.seq for r in fit if same_target(r, who) and r.seq not in own][:limit]
        return load(self._db, generations.c.seq.in_(seqs))


def _learnable(row: Row[Any]) -> bool:
    """Whether it is neither held out nor quarantined, and has an answer."""
    return row.split == TRAIN and row.output_tokens > 0 and row.quarantined_run is None


def untrained_generations(who: Provenance, limit: int, avoid: Collection[int] = ()) -> Select[Any]:
    """Query: seq of the newest `limit` generations that a run of this pair may be claimed for. avoid: but for these."""
    query = select(generations.c.seq).where(_untrained(who), generations.c.seq.not_in(avoid))
    return query.order_by(generations.c.seq.desc()).limit(limit)


def untrained_among(connection: Connection, who: Provenance, seqs: Sequence[int]) -> set[int]:
    """Those of these generations that a run of this pair may be claimed for."""
    pages = [seqs[start : start + PAGE] for start in range(0, len(seqs), PAGE)]
    query = select(generations.c.seq).where(_untrained(who))
    return {seq for page in pages for seq in connection.execute(query.where(generations.c.seq.in_(page))).scalars()}


def _untrained(who: Provenance) -> ColumnElement[bool]:
    return and_(
        of_target(who),
        generations.c.split == TRAIN,
        or_(generations.c.cases > 0, generations.c.cases.is_(None)),
        generations.c.quarantined_run.is_(None),
        ~claimed_by_run(who.draft),
    )


def _counts(connection: Connection, *where: ColumnElement[bool]) -> UntrainedCounts:
    cases, tokens = generations.c.cases, generations.c.output_tokens
    query: Any = select(
        func.coalesce(func.sum(cases), 0),
        func.coalesce(func.sum(case((cases > 0, tokens), else_=0)), 0),
        func.coalesce(func.sum(case((cases > 0, 1), else_=0)), 0),
        func.coalesce(func.sum(case((cases.is_(None), tokens), else_=0)), 0),
    )
    return UntrainedCounts(*map(int, connection.execute(query.select_from(generations).where(*where)).one()))
