"""Queries of logged generations that several classes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import ColumnElement, Row, and_, select

from service.core import FailureCase, Generation, Provenance, Selection
from service.store.database import Database
from service.store.log.rows import generation_of
from service.store.log.run_texts import PAGE
from service.store.log.sampler import Text, text
from service.store.tables import failure_cases, generation_targets, generations, grammars

TEXT = tuple(generations.c[name] for name in ("id", "prompt", "output", "client", "api_key", "first_user"))
"""What `text_of` reads of a row."""
_CASE = tuple(failure_cases.c[field.name] for field in fields(FailureCase))


def load(database: Database, *where: ColumnElement[bool], limit: int | None = None) -> list[Generation]:
    """Whole generations with their failure cases, newest first, at most `limit` of them."""
    query = (
        select(
            generations,
            generation_targets.c.top,
            generation_targets.c.blob,
            grammars.c.text.label("grammar_text"),
            grammars.c.opening,
            grammars.c.closing,
        )
        .join_from(generations, generation_targets, generation_targets.c.seq == generations.c.seq, isouter=True)
        .join(grammars, grammars.c.hash == generations.c.grammar, isouter=True)
        .where(*where)
        .order_by(generations.c.seq.desc())
        .limit(limit)
    )
    with database.read() as connection:
        rows = connection.execute(query).all()
        cases: dict[int, list[FailureCase]] = {row.seq: [] for row in rows}
        seqs = list(cases)
        for start in range(0, len(seqs), PAGE):
            query = select(failure_cases.c.seq, *_CASE).where(failure_cases.c.seq.in_(seqs[start : start + PAGE]))
            query = query.order_by(failure_cases.c.seq, failure_cases.c.position)
            for seq, *values in connection.execute(query).all():
                cases[seq].append(FailureCase(*values))
    return [generation_of(row, cases[row.seq]) for row in rows]


def text_of(row: Row[Any]) -> Text:
    """What the sampler needs to know of a row with the columns TEXT."""
    client = row.api_key or row.client
    return text(row.id, prompt=row.prompt, output=row.output, client=client, first_user=row.first_user)


def newest(
    database: Database, limit: int, *columns: ColumnElement[Any], where: Sequence[ColumnElement[bool]] = ()
) -> Sequence[Row[Any]]:
    """Columns of the newest `limit` generations of any pair, newest first, with target, tokenizer and draft for `same_target`
    and `same_pair`."""
    # The pair is compared outside: asked for one pair's newest, SQLite sorts all that this pair ever made, and asked for those
    # after a moment it reads the whole log to find that there are few.
    pair = (generations.c.target, generations.c.tokenizer, generations.c.draft)
    query = select(*columns, *pair).where(*where).order_by(generations.c.seq.desc()).limit(limit)
    with database.read() as connection:
        return connection.execute(query).all()


def newest_of_pair(
    database: Database,
    who: Provenance,
    limit: int,
    *columns: ColumnElement[Any],
    after: int,
) -> list[Row[Any]]:
    """The same of the newest `limit` generations of one pair that have an answer and were recorded after one (seq)."""
    found, below = list[Row[Any]](), None
    while len(found) < limit:
        where = [generations.c.seq > after, *([generations.c.seq < below] if below is not None else [])]
        size = limit if below is None else max(limit, PAGE)
        rows = newest(database, size, generations.c.seq, generations.c.output_tokens, *columns, where=where)
        found += [row for row in rows if same_pair(row, who) and row.output_tokens > 0]
        if len(rows) < size:
            break
        below = rows[-1].seq
    return found[:limit]


def selected(selection: Selection) -> list[ColumnElement[bool]]:
    """Conditions of a generation; none for everything."""
    found: list[ColumnElement[bool]] = []
    if selection.ids is not None:
        found.append(generations.c.id.in_(selection.ids))
    if selection.api_key is not None:
        found.append(generations.c.api_key == selection.api_key)
    if selection.client is not None:
        found.append(generations.c.client == selection.client)
    if selection.domain is not None:
        found.append(generations.c.domain == selection.domain)
    if selection.before is not None:
        found.append(generations.c.created_at < selection.before)
    return found


def of_target(who: Provenance) -> ColumnElement[bool]:
    """Of this target and tokenizer: whatever draft it was made with, a generation is a sample of the target."""
    return and_(generations.c.target == who.target, generations.c.tokenizer == who.tokenizer)


def same_target(row: Row[Any], who: Provenance) -> bool:
    """Whether a row is a sample of this target."""
    return (row.target, row.tokenizer) == (who.target, who.tokenizer)


def same_pair(row: Row[Any], who: Provenance) -> bool:
    """Whether this very pair made a row."""
    return same_target(row, who) and row.draft == who.draft
