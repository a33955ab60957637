from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

from service.core import Provenance, Round, StoreError
from service.store.database import REVISION, Database, migrations, revision, upgrade
from service.store.generations import Generations
from service.store.tables import metadata
from tests.support.store_rows import WHO, generation, targets, url_of

ROOT = Path(__file__).parent.parent.parent


def configured(url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations()))
    config.set_main_option("sqlalchemy.url", url)
    return config


def schema(path: Path) -> set[tuple[str, str]]:
    connection = sqlite3.connect(path)
    # sqlite_sequence, the counter of AUTOINCREMENT, is never dropped.
    query = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name != 'sqlite_sequence'"
    rows = connection.execute(query).fetchall()
    connection.close()
    # Constraints have no order.
    return {
        (name, " ".join(sorted(" ".join(sql.split()).removesuffix(" )").split(", CONSTRAINT ")))) for name, sql in rows
    }


def test_there_is_one_head_and_one_way_to_it() -> None:
    scripts = ScriptDirectory(str(migrations()))
    assert scripts.get_heads() == [REVISION]
    assert len(scripts.get_bases()) == 1
    assert all(script.doc for script in scripts.walk_revisions())


def test_upgrading_makes_a_database_that_opens(tmp_path: Path) -> None:
    url = url_of(tmp_path / "deep" / "down" / "new.db")
    assert revision(url) is None
    upgrade(url)
    assert revision(url) == REVISION
    database = Database(url)
    assert Generations(database).add([generation()]).result() == 1
    upgrade(url)  # with everything open, and nothing to do
    assert Generations(database).stats().generations == 1
    database.close()


def test_migrations_and_tables_say_the_same(tmp_path: Path) -> None:
    url = url_of(tmp_path / "new.db")
    upgrade(url)
    engine = create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True, "target_metadata": metadata}
        )
        assert compare_metadata(context, metadata) == []
    engine.dispose()


def test_downgrade_and_upgrade_restore_the_schema(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    upgrade(url_of(path))
    before = schema(path)
    command.downgrade(configured(url_of(path)), "base")
    assert {name for name, _ in schema(path)} == {"alembic_version"}
    assert revision(url_of(path)) is None
    upgrade(url_of(path))
    assert schema(path) == before
    Database(url_of(path)).close()


def test_rows_live_through_every_migration(tmp_path: Path) -> None:
    url = url_of(tmp_path / "old.db")
    upgrade(url)
    made = generation(collected=targets(5))
    database = Database(url)
    Generations(database).add([made]).result()
    database.close()
    command.downgrade(configured(url), "0001")
    with pytest.raises(StoreError, match="db upgrade"):
        Database(url)
    upgrade(url)
    database = Database(url)
    assert Generations(database).by_ids([made.id]) == [made]
    assert Generations(database).counts(WHO).cases == 1
    database.close()


TABLES = (
    "generations", "generation_targets", "failure_cases", "replay_buffer", "replay_domains", "training_runs", "adapters",
    "evaluations",
)  # fmt: skip


def dump(path: Path) -> dict[str, list[dict[str, object]]]:
    connection = sqlite3.connect(path)
    connection.row_factory = sqlite3.Row
    found = {
        name: sorted((dict(row) for row in connection.execute(f"SELECT * FROM {name}")), key=repr) for name in TABLES
    }
    connection.close()
    return found


def test_a_full_database_of_the_former_schema_is_migrated_completely(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    url = url_of(path)
    command.upgrade(configured(url), "0003")
    kind = "cluster:00000000000000aa"
    tags = ["code", None, kind, "general", "code"]
    bad = 11  # quarantined, and in the replay buffer all the same: runs crashed over it
    connection = sqlite3.connect(path)
    for seq, tag in enumerate(tags, start=7):
        connection.execute(
            "INSERT INTO generations VALUES (?, ?, ?, ?, 2, '{}', ?, 'ada', 'hi', 'stop', '[[3, 0, 4, 2, 3]]', x'00', x'00',"
            " 't', 'k', 'd', 'hash', 'train', '2026-01-01 00:00:00')",
            (seq, f"g{seq}", b"\1\0\0\0", bytes([seq, 0, 0, 0]), tag),
        )
        connection.execute("INSERT INTO generation_targets VALUES (?, 4, x'0102')", (seq,))
        connection.execute(
            "INSERT INTO failure_cases VALUES (?, ?, 2, 7, 9, 0.1, 0.6, 1.5, 0, NULL, 1, 2, ?)", (seq, seq, seq == bad)
        )
        # A domain named like a kind shared its reservoir.
        connection.execute("INSERT INTO replay_buffer VALUES (?, ?, ?)", (tag or kind, seq, seq))
    connection.execute("INSERT INTO unseen VALUES (7)")
    for name, seen in (("code", 5), (kind, 9), ("general", 1), ("cluster:00000000000000bb", 3), ("empty", 2)):
        connection.execute("INSERT INTO replay_domains VALUES (?, ?)", (name, seen))
    connection.execute(
        "INSERT INTO training_runs VALUES (1, 'promoted', 'cases', 1, NULL, 't', 'k', 'd', 0, 1, 1, '{}', '{}', '[]', 1, NULL,"
        " NULL, '2026-01-01 00:00:00', NULL)"
    )
    connection.execute(
        "INSERT INTO adapters VALUES (1, 'f', 's', 4, 2.0, '[]', 'd', 0, 1, 'active', NULL, '2026-01-01 00:00:00')"
    )
    connection.execute("INSERT INTO evaluations VALUES (1, 1, 'gate', '{}', '2026-01-01 00:00:00')")
    connection.commit()
    connection.close()
    before = dump(path)

    def waiting() -> list[object]:
        with sqlite3.connect(path) as connection:
            return connection.execute("SELECT seq FROM unseen").fetchall()

    upgrade(url)
    after = dump(path)
    keys = {row.pop("text_key") for row in after["generations"]}
    assert len(keys) == len(tags), "every text has its own key"
    assert {row.pop("copies") for row in after["generations"]} == {1}
    assert {row.pop("grammar") for row in after["generations"]} == {None}
    assert {row.pop("erased_texts") for row in after["adapters"]} == {None}
    known = {row["seq"]: row.pop("cases") for row in after["generations"]}
    assert known == {7: None, 8: 1, 9: 1, 10: 1, bad: 1}, "the cases of an undrafted text are not known"
    aside = [(row["seq"], run) for row in after["generations"] if (run := row.pop("quarantined_run")) is not None]
    assert aside == [(bad, 1)]
    before_cases = [(row["claimed_run"], row["trained_run"], row["quarantined"]) for row in before["failure_cases"]]
    for row in before["failure_cases"]:
        for name in ("claimed_run", "trained_run", "quarantined", "crashes"):
            del row[name]
    with sqlite3.connect(path) as connection:
        had = connection.execute("SELECT run, seq, role FROM run_texts ORDER BY seq").fetchall()
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
    database = Database(url)
    copy = replace(generation(tokens=[1], output=[7], who=Provenance("t", "k", "d")), rounds=(Round(3, 0, 4, 2, 3),))
    assert Generations(database).add([copy]).result() == 0
    stats = Generations(database).stats()
    assert (stats.generations, stats.requests) == (5, 6)
    database.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()

    command.downgrade(configured(url), "0003")
    back = dump(path)
    assert waiting() == [(7,)]
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


def test_a_revoked_adapter_does_not_serve_an_earlier_version(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    upgrade(url_of(path))
    with sqlite3.connect(path) as connection:
        connection.execute(
            "INSERT INTO adapters (folder, sha256, rank, scale, keys, draft, parent, state, created_at, erased_texts)"
            " VALUES ('f', 's', 4, 2.0, '[]', 'd', 0, 'revoked', '2026-01-01 00:00:00', 3)"
        )
    connection.close()
    command.downgrade(configured(url_of(path)), "0006")
    assert [row["state"] for row in dump(path)["adapters"]] == ["broken"]


def test_a_newer_database_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    upgrade(url_of(path))
    with sqlite3.connect(path) as other:
        other.execute("UPDATE alembic_version SET version_num = '9999'")
    other.close()
    before = schema(path)
    with pytest.raises(StoreError, match="newer"):
        upgrade(url_of(path))
    assert schema(path) == before
    assert revision(url_of(path)) == "9999"


def test_a_failed_upgrade_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE evaluations (mine)")  # among the last that the first migration makes
    other.close()
    before = schema(path)
    with pytest.raises(StoreError, match="already exists"):
        upgrade(url_of(path))
    assert schema(path) == before
    with sqlite3.connect(path) as other:
        other.execute("DROP TABLE evaluations")
    other.close()
    upgrade(url_of(path))
    Database(url_of(path)).close()


def test_an_upgrade_waits_for_other_writers(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    other.execute("CREATE TABLE theirs (x)")
    timer = threading.Timer(0.5, lambda: other.execute("COMMIT"))
    timer.start()
    upgrade(url_of(path))
    timer.join()
    other.close()
    assert revision(url_of(path)) == REVISION
    assert "theirs" in {name for name, _ in schema(path)}


UPGRADE = "import sys; from service.store.database import upgrade; sys.stdin.read(1); upgrade(sys.argv[1])"


def test_two_processes_may_upgrade_at_once(tmp_path: Path) -> None:
    url = url_of(tmp_path / "new.db")
    command_line = [sys.executable, "-c", UPGRADE, url]
    pair = [subprocess.Popen(command_line, stdin=subprocess.PIPE, cwd=ROOT) for _ in range(2)]
    for child in pair:
        child.communicate(b"!", timeout=30)
    assert [child.returncode for child in pair] == [0, 0]
    Database(url).close()
