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
            made = connection.execute(
                insert(erasures).values(selection=json.dumps(selection.given()))
            ).inserted_primary_key
            assert made is not None
            return made[0]

        return self._db.write(work).result()

    def asked(self) -> Sequence[tuple[int, Selection]]:
        """In the order of their numbers."""
        with self._db.read() as connection:
            rows = connection.execute(select(erasures).order_by(erasures.c.id)).all()
        return [(row.id, _from_json(row.selection)) for row in rows]

    def end(self, number: int) -> None:
        """It is over: what it selected is not named any more either."""
        this = delete(erasures).where(erasures.c.id == number)
        self._db.write(lambda connection: connection.execute(this).rowcount, scrub=True, by_member=False).result()


def _from_json(text: str) -> Selection:
    given = json.loads(text)
    before = given.get("before")
    return Selection(
        ids=frozenset(given["ids"]) if "ids" in given else None,
        api_key=given.get("api_key"),
        client=given.get("client"),
        domain=given.get("domain"),
        before=datetime.fromisoformat(before) if before is not None else None,
        everything=given["everything"],
    )
