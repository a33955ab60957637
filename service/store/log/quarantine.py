"""Quarantined texts: what an adapter that was rolled back had learnt from, and texts that crash runs."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, or_, select, update

from service.core import NotFound, RunState
from service.store.database import Database
from service.store.log.run_texts import Role
from service.store.tables import adapters, failure_cases, generations, run_texts, training_runs


@dataclass(frozen=True, slots=True)
class QuarantinedTexts:
    """Quarantined generations, and their failure cases. run: whose adapter was rolled back; None: runs crash on them."""

    run: int | None
    adapter: int | None
    cases: int
    generations: int


class Quarantine:
    """The quarantined generations of a database: what they are, and how runs get them back."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def all(self) -> list[QuarantinedTexts]:
        """Newest run first, texts that crash runs last."""
        known = training_runs.c.state != RunState.CRASHED
        query = (
            select(
                training_runs.c.id,
                func.max(adapters.c.id),
                func.count(failure_cases.c.id.distinct()),
                func.count(generations.c.seq.distinct()),
            )
            .join_from(
                generations, training_runs, (training_runs.c.id == generations.c.quarantined_run) & known, isouter=True
            )
            .join(adapters, adapters.c.run == training_runs.c.id, isouter=True)
            .join(failure_cases, failure_cases.c.seq == generations.c.seq, isouter=True)
            .where(generations.c.quarantined_run.is_not(None))
            .group_by(training_runs.c.id)
            .order_by(training_runs.c.id.is_(None), training_runs.c.id.desc())
        )
        with self._db.read() as connection:
            return [QuarantinedTexts(*row) for row in connection.execute(query)]

    def release(self, run_id: int | None = None) -> int:
        """Make them free for runs again: those that one run quarantined, or all. Returns how many failure cases they hold.
        Raises NotFound for a run that is not there."""

        def work(connection: Connection) -> int:
            aside = generations.c.quarantined_run.is_not(None)
            if run_id is not None:
                query = select(training_runs.c.id).where(training_runs.c.id == run_id)
                if connection.execute(query).scalar() is None:
                    raise NotFound(f"no training run {run_id}")
                aside = generations.c.quarantined_run == run_id
            seqs = select(generations.c.seq).where(aside)
            count = select(func.count()).select_from(failure_cases).where(failure_cases.c.seq.in_(seqs))
            cases = connection.execute(count).scalar_one()
            # In a run that crashed, whatever they were to it: its crash is explained.
            crashed = select(training_runs.c.id).where(training_runs.c.state == RunState.CRASHED)
            as_new = or_(run_texts.c.role == Role.NEW, run_texts.c.run.in_(crashed))
            had = update(run_texts).where(run_texts.c.seq.in_(seqs), as_new)
            connection.execute(had.values(role=Role.RELEASED.value))
            connection.execute(update(generations).where(aside).values(quarantined_run=None))
            return cases

        return self._db.write(work).result()
