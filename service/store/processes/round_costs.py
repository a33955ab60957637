"""What rounds of a pair cost, by kind of machine: servers measure it, gates go by it, wherever they run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta

from sqlalchemy import ColumnElement, Connection, and_, delete, insert, select

from service.core import Provenance, RoundCosts
from service.store.database import Database
from service.store.tables import round_costs
from service.store.times import time_of

RECENT = timedelta(days=1)
"""Costs that were not confirmed for so long say nothing of what serves now."""


class MeasuredCosts:
    """The round costs of a database. Writes wait until they are committed."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def record(self, who: Provenance, machine: str, costs: RoundCosts) -> None:
        """What rounds cost on a kind of machine now."""

        def work(connection: Connection) -> None:
            connection.execute(delete(round_costs).where(_of(who), round_costs.c.machine == machine))
            connection.execute(
                insert(round_costs).values(
                    target=who.target,
                    tokenizer=who.tokenizer,
                    draft=who.draft,
                    machine=machine,
                    seconds=json.dumps(costs.seconds),
                    more=json.dumps(costs.more),
                    measured_at=time_of(connection),
                )
            )

        self._db.write(work).result()

    def recent(self, who: Provenance) -> Mapping[str, RoundCosts]:
        """By kind of machine, those that were recorded within RECENT, the newest first."""
        with self._db.read() as connection:
            since = time_of(connection) - RECENT
            query = select(round_costs).where(_of(who), round_costs.c.measured_at > since)
            rows = connection.execute(query.order_by(round_costs.c.measured_at.desc())).all()
        return {row.machine: RoundCosts(tuple(json.loads(row.seconds)), tuple(json.loads(row.more))) for row in rows}


def _of(who: Provenance) -> ColumnElement[bool]:
    return and_(
        round_costs.c.target == who.target, round_costs.c.tokenizer == who.tokenizer, round_costs.c.draft == who.draft
    )
