"""Which texts a run learns from, and as what: what a draft has had, which texts crash runs, and which adapters learnt a text
follow from these rows."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    delete,
    exists,
    insert,
    select,
    update,
)

from service.core import RunState
from service.store.tables import generations, replay_buffer, run_texts, training_runs

PAGE = 500
"""Values in one IN list."""


class Role(StrEnum):
    """NEW: its failure cases are what the run was claimed for; no other run of the same draft gets it, unless this one ends
    without a verdict. WINDOW: one of the newest before them. REPLAY: out of the replay buffer. RELEASED: it was quarantined
    later, and an operator set it free again. SEED: the target wrote practice text that begins like its prompt."""

    NEW = "new"
    WINDOW = "window"
    REPLAY = "replay"
    RELEASED = "released"
    SEED = "seed"


GIVEN_BACK = tuple(state.value for state in RunState if state.gives_texts_back)
"""States of runs whose texts are free for other runs."""


def claimed_by_run(draft: str | None = None) -> ColumnElement[bool]:
    """Whether a run has, or had, a generation as new and did not give it back. draft: of that draft alone."""
    where = [
        run_texts.c.seq == generations.c.seq,
        run_texts.c.role == Role.NEW,
        training_runs.c.id == run_texts.c.run,
        training_runs.c.state.not_in(GIVEN_BACK),
    ]
    if draft is not None:
        where.append(training_runs.c.draft == draft)
    return exists().where(*where).correlate(generations)


def judged_run_texts() -> Select[Any, Any]:
    """Query: seq and run of what runs that came to a verdict learnt from as new."""
    return (
        select(run_texts.c.seq, run_texts.c.run)
        .join_from(run_texts, training_runs, training_runs.c.id == run_texts.c.run)
        .where(run_texts.c.role == Role.NEW, training_runs.c.state.in_([state for state in RunState if state.judged]))
    )


def texts_of(run_id: int, *roles: Role) -> ColumnElement[bool]:
    """Whether a generation is one of a run's."""
    mine = and_(run_texts.c.run == run_id, run_texts.c.role.in_(roles or tuple(Role)))
    return generations.c.seq.in_(select(run_texts.c.seq).where(mine))


def insert_run_texts(connection: Connection, run_id: int, role: Role, seqs: Sequence[int]) -> None:
    """Record that the run learns from these. One that it has already keeps its role."""
    for start in range(0, len(seqs), PAGE):
        some = seqs[start : start + PAGE]
        query = select(run_texts.c.seq).where(run_texts.c.run == run_id, run_texts.c.seq.in_(some))
        known = set(connection.execute(query).scalars())
        if new := [{"run": run_id, "seq": seq, "role": role.value} for seq in some if seq not in known]:
            connection.execute(insert(run_texts), new)


def quarantine(connection: Connection, run_id: int, *where: ColumnElement[bool]) -> None:
    """Quarantine generations for a run, and take them out of the replay buffer."""
    suspects = select(generations.c.seq).where(*where)
    connection.execute(delete(replay_buffer).where(replay_buffer.c.seq.in_(suspects)))
    connection.execute(update(generations).where(*where).values(quarantined_run=run_id))
