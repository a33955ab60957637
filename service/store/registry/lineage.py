"""Traces texts to the adapters that learnt them, and erases texts accordingly."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, func, select, update

from service.core import AdapterState, Erased, Selection
from service.store.database import Database
from service.store.log.generations import HELD_OUT, remove
from service.store.log.queries import selected
from service.store.registry.adapters import move_adapter, reinstate
from service.store.tables import adapters, generations, run_texts

MAY_SERVE = (AdapterState.ACTIVE, AdapterState.RETIRED, AdapterState.ROLLED_BACK)


class Lineage:
    """Which runs and adapters of a database learnt which texts. Writes wait until they are committed."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def adapters(self, selection: Selection) -> dict[int, int]:
        """The adapters that learnt selected texts, whatever these were to their runs (see Role), and all that were trained on
        top of those: id to the number of such texts. What the log no longer holds is not known."""
        with self._db.read() as connection:
            return {adapter: len(texts) for adapter, texts in _learnt(connection, selected(selection)).items()}

    def runs(self, selection: Selection) -> set[int]:
        """The runs that learn or learnt from selected texts."""
        with self._db.read() as connection:
            return set(_texts_by_run(connection, selected(selection)))

    def held_out(self, selection: Selection) -> bool:
        """Whether one of the selected texts is held out."""
        query = select(generations.c.seq).where(generations.c.split == HELD_OUT, *selected(selection)).limit(1)
        with self._db.read() as connection:
            return connection.execute(query).scalar() is not None

    def erase(self, selection: Selection, *, retire_adapters: bool = False) -> Erased:
        """Delete the selected generations with all that hangs on them, and mark the adapters that learnt them (erased_texts),
        in one transaction.

        retire_adapters: every marked adapter, by an earlier erasure too, becomes REVOKED; where one served, its nearest
        ancestor that may serve takes its place, or the bare draft. Raises StoreError, also where the bytes cannot leave
        SQLite's log because somebody reads it all the time: erasing again cuts it.
        """

        def work(connection: Connection) -> Erased:
            where = selected(selection)
            learnt = _learnt(connection, where)
            for adapter, texts in learnt.items():
                count = func.coalesce(adapters.c.erased_texts, 0) + len(texts)
                connection.execute(update(adapters).where(adapters.c.id == adapter).values(erased_texts=count))
            gone = remove(connection, *where)
            revoked = _revoke(connection) if retire_adapters else []
            return Erased(gone, tuple(sorted(learnt)), tuple(revoked))

        return self._db.write(work, scrub=True).result()


def _texts_by_run(connection: Connection, where: Sequence[ColumnElement[bool]]) -> dict[int, set[int]]:
    """For each run, the texts (seq) among these generations that it learns from."""
    found: dict[int, set[int]] = {}
    query = select(run_texts.c.run, run_texts.c.seq).join_from(
        run_texts, generations, generations.c.seq == run_texts.c.seq
    )
    for run, seq in connection.execute(query.where(*where)):
        found.setdefault(run, set()).add(seq)
    return found


def _learnt(connection: Connection, where: Sequence[ColumnElement[bool]]) -> dict[int, set[int]]:
    """For each adapter, the texts among these generations that it or one of its ancestors learnt from."""
    found: dict[int, set[int]] = {}
    by_run = _texts_by_run(connection, where)
    # A parent is older than the adapters trained on it.
    for row in connection.execute(select(adapters.c.id, adapters.c.parent, adapters.c.run).order_by(adapters.c.id)):
        if texts := by_run.get(row.run, set()) | found.get(row.parent, set()):
            found[row.id] = texts
    return found


def _revoke(connection: Connection) -> list[int]:
    """Every marked adapter that serves or may serve again; ids, ascending."""
    query = select(adapters).where(adapters.c.erased_texts.is_not(None), adapters.c.state.in_(MAY_SERVE))
    marked = connection.execute(query.order_by(adapters.c.id)).all()
    for row in marked:
        move_adapter(connection, row.id, AdapterState.REVOKED)
    for row in marked:
        if row.state == AdapterState.ACTIVE:
            reinstate(connection, row.parent, row.target)
    return [row.id for row in marked]
