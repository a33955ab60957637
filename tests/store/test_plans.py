"""Query plans of the queries that must stay fast on a full log."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, event, text

from service.core import Trigger
from service.store.database import Database
from service.store.log.generations import Generations
from service.store.log.training_texts import TrainingTexts, untrained_generations
from service.store.registry.runs import Runs
from service.store.tables import generations
from tests.support.databases import POSTGRES, SQLITE, run_sql
from tests.support.store_rows import WHO, case, generation


def plan(database: Database, query: Any) -> str:
    with database.read() as connection:
        statement = query.compile(connection, compile_kwargs={"literal_binds": True})
        return "\n".join(row.detail for row in connection.execute(text(f"EXPLAIN QUERY PLAN {statement}")))


@SQLITE
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
    assert [g.id for g in TrainingTexts(database).claimed(run.id)] == [made[4].id, made[3].id]
    assert TrainingTexts(database).claimed(run.id) == [made[4], made[3]]


@SQLITE
def test_the_newest_are_read_from_the_end_without_sorting(database: Database) -> None:
    store = Generations(database)
    with asked() as found:
        store.names_after(WHO, 0, 200)
        assert store.outputs(WHO, 1000, 200) == []
    wanted = [statement for statement, _ in found if "FROM generations" in statement and "LIMIT" in statement]
    assert len(wanted) == 2
    with database.read() as connection:
        for statement in wanted:
            parameters = (1,) * statement.count("?")
            steps = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            assert not [row.detail for row in steps if "B-TREE" in row.detail or "ix_" in row.detail]


@contextmanager
def asked() -> Generator[list[tuple[str, Any]]]:
    """The statements that are run meanwhile, and their parameters."""
    found: list[tuple[str, Any]] = []

    @event.listens_for(Engine, "before_cursor_execute")
    def hear(connection: Any, cursor: Any, statement: str, parameters: Any, *rest: object) -> None:
        found.append((statement, parameters))

    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", hear)


def full(database: Database) -> None:
    """20,000 texts, of which a run has had the newest 400."""
    Generations(database).add([generation()]).result()
    names = [column.name for column in generations.columns if column.name not in {"seq", "id", "text_key"}]
    run_sql(
        database.url,
        f"INSERT INTO generations (id, text_key, {', '.join(names)})"
        f" SELECT 'n' || i, 'k' || i, {', '.join(names)} FROM generations, generate_series(1, 20000) AS i",
        "INSERT INTO failure_cases (seq, position, drafted, target, p, q, margin, tie)"
        " SELECT seq, 1, 2, 3, 0.5, 0.5, 1.0, false FROM generations WHERE seq > 1",
    )
    assert Runs(database).claim(trigger=Trigger.CASES, who=WHO, parent=0, limit=400) is not None
    run_sql(database.url, "ANALYZE")


@POSTGRES
def test_a_full_log_in_postgresql_is_read_by_its_indexes_and_in_order(database: Database) -> None:
    full(database)
    with database.read() as connection:
        statement = untrained_generations(WHO, 400).compile(connection, compile_kwargs={"literal_binds": True})
        steps = [row[0] for row in connection.execute(text(f"EXPLAIN {statement}"))]
        seqs = connection.execute(untrained_generations(WHO, 400)).scalars().all()
    assert not [step for step in steps if "Sort Key: generations" in step or "Seq Scan on generations" in step], steps
    assert len(seqs) == 400 and seqs[0] < 20_001 - 400 + 1
    store = Generations(database)
    with asked() as found:
        store.names_after(WHO, 0, 200)
        store.by_ids(["n7", "n8"])
        store.add([generation(output=[1, 2])]).result()
        Runs(database).unfinished()
    wanted = [each for each in found if each[0].startswith("SELECT") and "FROM " in each[0]]
    assert sum("generations" in statement for statement, _ in wanted) >= 4
    with database.read() as connection:
        for statement, parameters in wanted:
            steps = [row[0] for row in connection.exec_driver_sql(f"EXPLAIN {statement}", parameters)]
            large = [step for step in steps if re.search("Seq Scan on (generations|failure_cases)", step)]
            assert not large, (statement, steps)
            # One that has the newest of all at its end need not sort.
            assert "WHERE" in statement or not [step for step in steps if "Sort" in step], (statement, steps)
