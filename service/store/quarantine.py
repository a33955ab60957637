"""Failure cases that were put aside: what an adapter that was taken back had learnt from, and what runs crashed over."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, select, update

from service.core import NotFound
from service.store.database import Database
from service.store.tables import adapters, failure_cases, training_runs


@dataclass(frozen=True, slots=True)
class Held:
    """Cases put aside, and the generations they belong to. run: whose adapter was taken back; None: runs crashed over them."""

    run: int | None
    adapter: int | None
    cases: int
    generations: int


class Quarantine:
    """The quarantined failure cases of a database: what they are, and how runs get them back."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def held(self) -> list[Held]:
        """Newest run first, what runs crashed over last."""
        run = failure_cases.c.trained_run
        query = (
            select(
                run,
                func.max(adapters.c.id),
                func.count(failure_cases.c.id.distinct()),
                func.count(failure_cases.c.seq.distinct()),
            )
            .join_from(failure_cases, adapters, adapters.c.run == run, isouter=True)
            .where(failure_cases.c.quarantined.is_(True))
            .group_by(run)
            .order_by(run.is_(None), run.desc())
        )
        with self._db.read() as connection:
            return [Held(*row) for row in connection.execute(query)]

    def release(self, run_id: int | None = None) -> int:
        """Let runs have them again as if none had: those of one run whose adapter was taken back, or all. How many. Raises
        NotFound for a run that is not there."""

        def work(connection: Connection) -> int:
            change = update(failure_cases).where(failure_cases.c.quarantined.is_(True))
            if run_id is not None:
                query = select(training_runs.c.id).where(training_runs.c.id == run_id)
                if connection.execute(query).scalar() is None:
                    raise NotFound(f"no training run {run_id}")
                change = change.where(failure_cases.c.trained_run == run_id)
            free = {"quarantined": False, "trained_run": None, "claimed_run": None, "crashes": 0}
            return connection.execute(change.values(**free)).rowcount

        return self._db.write(work).result()
