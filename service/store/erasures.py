"""Erasures under way: what every process that shares the database has to forget before the rows go."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Connection, delete, insert, select

from service.core import Selection
from service.store.database import Database
from service.store.tables import erasures


class Erasures:
    """The erasures of a database that are not over. Writes wait until they are committed."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def ask(self, selection: Selection) -> int:
        """Ask all processes to forget these texts; the number of the erasure, larger than any before."""

        def work(connection: Connection) -> int:
            made = connection.execute(insert(erasures).values(selection=_to_json(selection))).inserted_primary_key
            assert made is not None
            return made[0]

        return self._db.write(work).result()

    def asked(self, after: int = 0) -> Sequence[tuple[int, Selection]]:
        """Those with higher numbers that are not over, in order."""
        query = select(erasures).where(erasures.c.id > after).order_by(erasures.c.id)
        with self._db.read() as connection:
            return [(row.id, _from_json(row.selection)) for row in connection.execute(query)]

    def end(self, number: int) -> None:
        """It is over: what it selected is not named any more either."""
        this = delete(erasures).where(erasures.c.id == number)
        self._db.write(lambda connection: connection.execute(this).rowcount, scrub=True).result()


def _to_json(selection: Selection) -> str:
    return json.dumps(
        {
            "ids": None if selection.ids is None else sorted(selection.ids),
            "client": selection.client,
            "domain": selection.domain,
            "before": None if selection.before is None else selection.before.isoformat(),
            "everything": selection.everything,
        }
    )


def _from_json(text: str) -> Selection:
    said = json.loads(text)
    return Selection(
        ids=None if said["ids"] is None else frozenset(said["ids"]),
        client=said["client"],
        domain=said["domain"],
        before=None if said["before"] is None else datetime.fromisoformat(said["before"]),
        everything=said["everything"],
    )
