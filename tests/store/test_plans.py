"""Query plans of the queries that must stay fast on a full log."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, event, text

from service.core import Trigger
from service.store.database import Database
from service.store.generations import Generations, untrained_generations
from service.store.runs import Runs
from tests.support.store_rows import START, WHO, case, generation


def plan(database: Database, query: Any) -> str:
    with database.read() as connection:
        statement = query.compile(connection, compile_kwargs={"literal_binds": True})
        return "\n".join(row.detail for row in connection.execute(text(f"EXPLAIN QUERY PLAN {statement}")))


def test_the_newest_that_no_run_has_had_are_found_in_order_from_the_index_alone(database: Database) -> None:
    found = plan(database, untrained_generations(WHO, 800))
    assert "SEARCH generations USING COVERING INDEX ix_generations_open" in found
    assert "TEMP B-TREE" not in found, "everything open is sorted, however few are wanted"


def test_a_run_takes_the_newest_and_all_their_cases(database: Database) -> None:
    store = Generations(database)
    made = [generation(cases=[case(0), case(1), case(2, tie=True)]) for _ in range(5)]
    store.add([*made, generation(cases=[case(0, tie=True)]), generation(cases=[])]).result()
    run = Runs(database).claim(trigger=Trigger.CASES, who=WHO, parent=0, limit=2)
    assert run is not None and run.cases == 6
    assert [g.id for g in store.claimed(run.id)] == [made[4].id, made[3].id]
    assert store.claimed(run.id) == [made[4], made[3]]


def test_the_newest_are_read_from_the_end_without_sorting(database: Database) -> None:
    store, asked = Generations(database), list[str]()

    @event.listens_for(Engine, "before_cursor_execute")
    def hear(connection: Any, cursor: Any, statement: str, *rest: object) -> None:
        asked.append(statement)

    try:
        store.names_after(WHO, START, 200)
        store.drafting(WHO, 500, above=7, below=9)
    finally:
        event.remove(Engine, "before_cursor_execute", hear)
    wanted = [statement for statement in asked if "FROM generations" in statement]
    assert len(wanted) == 2
    with database.read() as connection:
        for statement in wanted:
            parameters = (1,) * statement.count("?")
            found = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            assert not [row.detail for row in found if "B-TREE" in row.detail or "ix_" in row.detail]
