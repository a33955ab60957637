from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import MetaData, Table, create_engine, insert, select, text
from sqlalchemy.pool import NullPool

from service.core import Provenance, Round, RunState, StoreError
from service.store.database import REVISION, Database, migrations, revision, upgrade
from service.store.log.generations import Generations
from service.store.log.training_texts import TrainingTexts
from service.store.registry.adapters import Adapters
from service.store.registry.runs import Runs
from service.store.tables import metadata
from tests.support.databases import POSTGRES, SQLITE, Databases, run_sql
from tests.support.store_rows import ADAPTERS, WHO, generation, targets, url_of

ROOT = Path(__file__).parent.parent.parent
NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)
ON_POSTGRES = """
    SELECT conrelid::regclass || ' ' || conname, pg_get_constraintdef(oid) FROM pg_constraint
        WHERE connamespace = 'public'::regnamespace
    UNION ALL SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'
    UNION ALL SELECT table_name || ' ' || column_name,
        concat_ws(' ', data_type, character_maximum_length, is_nullable, column_default)
        FROM information_schema.columns WHERE table_schema = 'public'
"""
# sqlite_sequence, the counter of AUTOINCREMENT, is never dropped.
ON_SQLITE = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name != 'sqlite_sequence'"


def configured(url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations()))
    config.set_main_option("sqlalchemy.url", url)
    return config


def ask(url: str, question: Any) -> Sequence[Any]:
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        return connection.execute(question).all()


def schema(url: str) -> set[tuple[str, ...]]:
    """Name and DDL of everything. Constraints have no order."""
    sqlite = url.startswith("sqlite")
    return {
        (name, *sorted(re.sub(r"\s+", " ", sql).removesuffix(" )").replace('"', "").split(", CONSTRAINT ")))
        for name, sql in ask(url, text(ON_SQLITE if sqlite else ON_POSTGRES))
        if not name.startswith("alembic_version") or sqlite
    }


@pytest.fixture
def bare(databases: Databases, tmp_path: Path) -> str:
    return databases.bare(tmp_path)


def test_there_is_one_head_and_one_way_to_it() -> None:
    scripts = ScriptDirectory(str(migrations()))
    assert scripts.get_heads() == [REVISION]
    assert len(scripts.get_bases()) == 1
    assert all(script.doc for script in scripts.walk_revisions())


def test_upgrading_makes_a_database_that_opens(bare: str) -> None:
    assert revision(bare) is None
    upgrade(bare)
    assert revision(bare) == REVISION
    database = Database(bare)
    assert Generations(database).add([generation()]).result() == 1
    upgrade(bare)  # with everything open, and nothing to do
    assert Generations(database).stats().generations == 1
    database.close()


def test_upgrading_makes_the_folders_of_a_file(tmp_path: Path) -> None:
    url = url_of(tmp_path / "deep" / "down" / "new.db")
    upgrade(url)
    assert revision(url) == REVISION


def test_migrations_and_tables_say_the_same(bare: str) -> None:
    upgrade(bare)
    engine = create_engine(bare)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True, "target_metadata": metadata}
        )
        assert compare_metadata(context, metadata) == []
    engine.dispose()


def test_tables_and_migrations_make_the_same_partial_indexes(bare: str) -> None:
    """Which the comparison of both leaves out."""
    upgrade(bare)
    names = {"uq_training_runs_open", "uq_adapters_active"}
    made = {each for each in schema(bare) if each[0] in names}
    assert len(made) == 2
    run_sql(bare, *(f"DROP INDEX {name}" for name in names))
    engine = create_engine(bare, poolclass=NullPool)
    for table in metadata.sorted_tables:
        for index in table.indexes:
            if index.name in names:
                index.create(engine)
    assert {each for each in schema(bare) if each[0] in names} == made


def test_downgrade_and_upgrade_restore_the_schema(bare: str) -> None:
    upgrade(bare)
    before = schema(bare)
    command.downgrade(configured(bare), "base")
    assert {name for name, *_ in schema(bare)} <= {"alembic_version"}
    assert revision(bare) is None
    upgrade(bare)
    assert schema(bare) == before
    Database(bare).close()


@POSTGRES
@pytest.mark.promise(18)
def test_every_revision_up_and_down_restores_the_schema(bare: str) -> None:
    """SQLite's batch mode changes order and names of columns and keys that it copies."""
    names = [script.revision for script in ScriptDirectory(str(migrations())).walk_revisions()][::-1]
    seen: list[set[tuple[str, ...]]] = []
    for name in names:
        command.upgrade(configured(bare), name)
        seen.append(schema(bare))
    for name, before in reversed(list(zip(names[:-1], seen[:-1], strict=True))):
        command.downgrade(configured(bare), name)
        assert schema(bare) == before, name


@pytest.mark.promise(18)
def test_rows_live_through_every_migration(bare: str) -> None:
    upgrade(bare)
    made = generation(collected=targets(5))
    database = Database(bare)
    Generations(database).add([made]).result()
    database.close()
    command.downgrade(configured(bare), "0001")
    with pytest.raises(StoreError, match="db upgrade"):
        Database(bare)
    upgrade(bare)
    database = Database(bare)
    assert Generations(database).by_ids([made.id]) == [made]
    assert TrainingTexts(database).untrained(WHO).cases == 1
    database.close()


TABLES = (
    "generations", "generation_targets", "failure_cases", "replay_buffer", "replay_domains", "training_runs",
    "adapters", "evaluations",
)  # fmt: skip


def put(url: str, table: str, *rows: Mapping[str, object]) -> None:
    """Insert into a table as it is now. Columns that a row leaves out get what any value does for."""
    engine = create_engine(url, poolclass=NullPool)
    found = Table(table, MetaData(), autoload_with=engine)
    with engine.begin() as connection:
        connection.execute(insert(found), [{**FILL.get(table, {}), **row} for row in rows])


FILL: dict[str, dict[str, object]] = {
    "generations": {
        "output_tokens": 2, "sampling": "{}", "client": "ada", "first_user": "hi", "finish": "stop",
        "rounds": "[[3, 0, 4, 2, 3]]",
        "logprobs": b"\0", "sampled_logprobs": b"\0", "target": "t", "tokenizer": "k", "draft": "d", "prompt_hash": "hash",
        "split": "train", "created_at": NEW_YEAR,
    },
    "training_runs": {
        "state": "promoted", "trigger": "cases", "fencing": 1, "target": "t", "tokenizer": "k", "draft": "d", "parent": 0,
        "cases": 1, "generations": 1, "config": "{}", "progress": "{}", "loss_curve": "[]", "created_at": NEW_YEAR,
    },
    "adapters": {
        "sha256": "s", "rank": 4, "scale": 2.0, "keys": "[]", "draft": "d", "parent": 0, "state": "active",
        "created_at": NEW_YEAR,
    },
}  # fmt: skip


def dump(url: str) -> dict[str, list[dict[str, Any]]]:
    engine, found = create_engine(url, poolclass=NullPool), MetaData()
    with engine.connect() as connection:
        found.reflect(connection, only=TABLES)
        return {
            name: sorted((dict(row._mapping) for row in connection.execute(select(found.tables[name]))), key=repr)
            for name in TABLES
        }


def test_an_upgrade_leaves_no_texts_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where SQLite is compiled without overwriting what it deletes."""

    def connected(*positional: Any, **named: Any) -> sqlite3.Connection:
        connection = sqlite3.connect(*positional, **named)
        connection.execute("PRAGMA secure_delete=OFF")
        return connection

    file = tmp_path / "log.db"
    url = url_of(file)
    command.upgrade(configured(url), "0003")
    secret = b"what nobody else may read"
    put(url, "generations", {"seq": 1, "id": "g1", "prompt": b"\1\0\0\0", "output": secret})
    assert file.read_bytes().count(secret) == 1
    monkeypatch.setattr("sqlite3.dbapi2.connect", connected)
    upgrade(url)
    assert file.read_bytes().count(secret) == 1, (
        "in the table alone, and not in pages of the one that it was copied from"
    )
    assert list(tmp_path.iterdir()) == [file]


def test_a_full_database_of_the_former_schema_is_migrated_completely(bare: str) -> None:
    command.upgrade(configured(bare), "0003")
    kind = "cluster:00000000000000aa"
    tags = ["code", None, kind, "general", "code"]
    bad = 11  # quarantined, and in the replay buffer all the same: runs crashed over it
    put(bare, "training_runs", {"id": 1, "adapter": 1})
    seqs = dict(enumerate(tags, start=7))
    put(
        bare,
        "generations",
        *(
            {"seq": seq, "id": f"g{seq}", "prompt": b"\1\0\0\0", "output": bytes([seq, 0, 0, 0]), "domain": tag}
            for seq, tag in seqs.items()
        ),
    )
    put(bare, "generation_targets", *({"seq": seq, "top": 4, "blob": b"\1\2"} for seq in seqs))
    case = {"position": 2, "drafted": 7, "target": 9, "p": 0.1, "q": 0.6, "margin": 1.5, "tie": False}
    case |= {"trained_run": 1, "crashes": 2}
    put(bare, "failure_cases", *(case | {"id": seq, "seq": seq, "quarantined": seq == bad} for seq in seqs))
    # A domain named like a kind shared its reservoir.
    put(bare, "replay_buffer", *({"domain": tag or kind, "slot": seq, "seq": seq} for seq, tag in seqs.items()))
    put(bare, "unseen", {"seq": 7})
    offered = {"code": 5, kind: 9, "general": 1, "cluster:00000000000000bb": 3, "empty": 2}
    put(bare, "replay_domains", *({"domain": name, "seen": seen} for name, seen in offered.items()))
    put(bare, "adapters", {"id": 1, "folder": "f", "run": 1})
    put(bare, "evaluations", {"id": 1, "adapter": 1, "kind": "gate", "verdict": "{}", "created_at": NEW_YEAR})
    before = dump(bare)

    upgrade(bare)
    after = dump(bare)
    keys = {row.pop("text_key") for row in after["generations"]}
    assert len(keys) == len(tags), "every text has its own key"
    assert {row.pop("copies") for row in after["generations"]} == {1}
    assert {row.pop("grammar") for row in after["generations"]} == {None}
    assert {row.pop("api_key") for row in after["generations"]} == {None}
    assert {row.pop("erased_texts") for row in after["adapters"]} == {None}
    assert [row.pop("target") for row in after["adapters"]] == [row["target"] for row in before["training_runs"]]
    for row in (*after["adapters"], *after["training_runs"]):
        del row["log_end"]
    assert {row.pop("owner") for row in after["training_runs"]} == {None}
    known = {row["seq"]: row.pop("cases") for row in after["generations"]}
    assert known == {7: None, 8: 1, 9: 1, 10: 1, bad: 1}, "the cases of an undrafted text are not known"
    aside = [(row["seq"], run) for row in after["generations"] if (run := row.pop("quarantined_run")) is not None]
    assert aside == [(bad, 1)]
    before_cases = [(row["claimed_run"], row["trained_run"], row["quarantined"]) for row in before["failure_cases"]]
    for row in before["failure_cases"]:
        for name in ("claimed_run", "trained_run", "quarantined", "crashes"):
            del row[name]
    had = ask(bare, text("SELECT run, seq, role FROM run_texts ORDER BY seq"))
    assert had == [(1, seq, "new") for seq in range(7, 12)]
    held = {(row["domain"], row["kind"], row["slot"], row["seq"]) for row in after.pop("replay_buffer")}
    assert held == {("code", "", 7, 7), ("", kind, 8, 8), (kind, "", 9, 9), ("general", "", 10, 10)}
    seen = {(row["domain"], row["kind"]): row["seen"] for row in after.pop("replay_domains")}
    assert seen == {
        ("code", ""): 5, ("", kind): 9, (kind, ""): 9, ("general", ""): 1, ("", "cluster:00000000000000bb"): 3,
        ("empty", ""): 2,
    }  # fmt: skip
    assert after == {name: rows for name, rows in before.items() if not name.startswith("replay")}

    # Migrated rows have the key that new rows get, so that a copy of an old text is counted in its row.
    database = Database(bare)
    one = generation(id="copy", tokens=[1], output=[7], who=Provenance("t", "k", "d"))
    copy = replace(one, rounds=(Round(3, 0, 4, 2, 3),))
    assert Generations(database).add([copy]).result() == 0
    stats = Generations(database).stats()
    assert (stats.generations, stats.requests) == (5, 6)
    database.close()
    if bare.startswith("sqlite"):
        assert ask(bare, text("PRAGMA foreign_key_check")) == []

    command.downgrade(configured(bare), "0003")
    back = dump(bare)
    assert ask(bare, text("SELECT seq FROM unseen")) == [(7,)]
    assert [
        (row["claimed_run"], row["trained_run"], row["quarantined"]) for row in back["failure_cases"]
    ] == before_cases
    for row in back["failure_cases"]:
        for name in ("claimed_run", "trained_run", "quarantined", "crashes"):
            del row[name]
    assert {name: rows for name, rows in back.items() if not name.startswith("replay")} == {
        name: rows for name, rows in before.items() if not name.startswith("replay")
    }
    assert len(back["replay_buffer"]) == 4
    assert len(back["replay_domains"]) == 5


def test_going_back_one_adapter_serves_a_draft_whatever_the_target(bare: str) -> None:
    upgrade(bare)
    pairs = [("t", "d"), ("u", "d"), ("t", "e")]
    made = (
        {"id": i, "folder": f"f{i}", "target": target, "draft": draft} for i, (target, draft) in enumerate(pairs, 1)
    )
    put(bare, "adapters", *({**row, "state": "active", "run": None} for row in made))
    command.downgrade(configured(bare), "0013")
    states = ask(bare, text("SELECT id, state FROM adapters ORDER BY id"))
    assert states == [(1, "retired"), (2, "active"), (3, "active")]


def test_of_two_open_runs_and_two_active_adapters_the_newer_one_stays(bare: str) -> None:
    command.upgrade(configured(bare), "0006")
    seqs = {"seq": 1, "id": "g", "prompt": b"\1\0\0\0", "output": b"\1\0\0\0", "text_key": "x", "copies": 1, "cases": 1}
    put(bare, "generations", seqs)
    states = ["promoted", "training", "claimed", "scoring", "claimed", "crashed"]
    drafts = ["d", "d", "d", "d", "e", "d"]
    made = [
        {"id": i, "state": state, "draft": draft}
        for i, (state, draft) in enumerate(zip(states, drafts, strict=True), 1)
    ]
    put(bare, "training_runs", *made)
    put(bare, "run_texts", *({"run": run["id"], "seq": 1, "role": "new"} for run in made))
    actives = zip(["active", "active", "retired", "active"], "ddde", strict=True)
    put(
        bare,
        "adapters",
        *({"id": i, "folder": f"f{i}", "state": state, "draft": draft} for i, (state, draft) in enumerate(actives, 1)),
    )
    upgrade(bare)
    database = Database(bare)
    runs = {run.id: run for run in Runs(database).latest(9)}
    assert [runs[i].state.value for i in range(1, 7)] == [
        "promoted", "crashed", "crashed", "scoring", "claimed", "crashed"
    ]  # fmt: skip
    assert runs[2].finished_at is not None and "another run" in str(runs[2].error)
    assert [Runs(database).texts(i) for i in range(1, 7)] == [1, 0, 0, 1, 1, 0], "crashes of other code suspect no text"
    assert [ref.state.value for ref in Adapters(database, ADAPTERS).all()] == ["active", "retired", "active", "retired"]
    current = Runs(database).current(Provenance("t", "k", "d"))
    assert current is not None and current.state is RunState.SCORING
    database.close()


def test_places_in_the_log_are_found_by_when_its_texts_were_made(bare: str) -> None:
    command.upgrade(configured(bare), "0010")
    made = {"prompt": b"1234", "output": b"1234", "text_key": "k", "copies": 1}
    hours = [NEW_YEAR + timedelta(hours=i) for i in range(6)]
    put(
        bare,
        "generations",
        *({"seq": i, "id": f"g{i}", **made, "created_at": hours[i]} for i in range(1, 6)),
    )
    triggers = ((1, "drift", 2), (2, "cases", 3))
    put(
        bare,
        "training_runs",
        *({"id": i, "trigger": trigger, "state": "failed", "created_at": hours[at]} for i, trigger, at in triggers),
    )
    states = ((1, "active", "d"), (2, "retired", "d"), (3, "active", "never judged"))
    put(bare, "adapters", *({"id": i, "folder": f"f{i}", "state": state, "draft": d} for i, state, d in states))
    gates = ((1, 1, "gate", 4), (2, 2, "gate", 2), (3, 1, "watch", 5))
    put(
        bare,
        "evaluations",
        *(
            {"id": i, "adapter": adapter, "kind": kind, "verdict": "{}", "created_at": hours[at]}
            for i, adapter, kind, at in gates
        ),
    )
    run_sql(
        bare,
        "UPDATE server_lease SET token = 'they', host = 'h', machine = 'm', pid = 7, renewed_at = CURRENT_TIMESTAMP",
    )
    upgrade(bare)
    assert ask(bare, text("SELECT id, log_end FROM training_runs ORDER BY id")) == [(1, 2), (2, None)]
    assert ask(bare, text("SELECT id, log_end FROM adapters ORDER BY id")) == [(1, 4), (2, None), (3, None)]
    assert ask(bare, text("SELECT token, role, pid FROM members")) == [("they", "server", 7)], "it may still be at work"


def test_a_revoked_adapter_does_not_serve_an_earlier_version(bare: str) -> None:
    upgrade(bare)
    put(bare, "adapters", {"id": 1, "folder": "f", "state": "revoked", "erased_texts": 3})
    command.downgrade(configured(bare), "0006")
    assert [row["state"] for row in dump(bare)["adapters"]] == ["broken"]


@pytest.mark.promise(18)
def test_a_newer_database_is_not_touched(bare: str) -> None:
    upgrade(bare)
    run_sql(bare, "UPDATE alembic_version SET version_num = '9999'")
    before = schema(bare)
    with pytest.raises(StoreError, match="newer"):
        upgrade(bare)
    assert schema(bare) == before
    assert revision(bare) == "9999"


def test_a_failed_upgrade_changes_nothing(bare: str) -> None:
    upgrade_fails = "CREATE TABLE evaluations (mine INTEGER)"  # among the last that the first migration makes
    run_sql(bare, upgrade_fails)
    before = schema(bare)
    with pytest.raises(StoreError, match="already exists"):
        upgrade(bare)
    assert schema(bare) == before
    run_sql(bare, "DROP TABLE evaluations")
    upgrade(bare)
    Database(bare).close()


@SQLITE
def test_an_upgrade_waits_for_other_writers(bare: str, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "redraft.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    other.execute("CREATE TABLE theirs (x)")
    timer = threading.Timer(0.5, lambda: other.execute("COMMIT"))
    timer.start()
    upgrade(bare)
    timer.join()
    other.close()
    assert revision(bare) == REVISION
    assert "theirs" in {name for name, *_ in schema(bare)}


UPGRADE = "import sys; from service.store.database import upgrade; sys.stdin.read(1); upgrade(sys.argv[1])"


@pytest.mark.parametrize("old", [None, pytest.param("0004", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("processes", [2, pytest.param(8, marks=pytest.mark.nightly)])
def test_processes_may_upgrade_at_once(bare: str, old: str | None, processes: int) -> None:
    if old is not None:
        command.upgrade(configured(bare), old)
    command_line = [sys.executable, "-c", UPGRADE, bare]
    children = [subprocess.Popen(command_line, stdin=subprocess.PIPE, cwd=ROOT) for _ in range(processes)]
    for child in children:
        assert child.stdin is not None
        child.stdin.write(b"!")
        child.stdin.flush()
    for child in children:
        child.communicate(timeout=60)
    assert [child.returncode for child in children] == [0] * processes
    Database(bare).close()
