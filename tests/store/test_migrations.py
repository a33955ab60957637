from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine
from stored import generation, url_of

from service.core import StoreError
from service.store.database import Database, head, migrations, revision, upgrade
from service.store.generations import Generations
from service.store.tables import metadata


def configured(url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations()))
    config.set_main_option("sqlalchemy.url", url)
    return config


def schema(path: Path) -> set[tuple[str, str]]:
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    connection.close()
    return {(name, " ".join(sql.split())) for name, sql in rows}


def test_there_is_one_head_and_one_way_to_it() -> None:
    scripts = ScriptDirectory(str(migrations()))
    assert scripts.get_heads() == [head()]
    assert len(scripts.get_bases()) == 1
    assert all(script.doc for script in scripts.walk_revisions())


def test_upgrading_makes_a_database_that_opens(tmp_path: Path) -> None:
    url = url_of(tmp_path / "deep" / "down" / "new.db")
    assert revision(url) is None
    upgrade(url)
    assert revision(url) == head()
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


def test_down_and_up_again_is_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    upgrade(url_of(path))
    before = schema(path)
    command.downgrade(configured(url_of(path)), "base")
    assert {name for name, _ in schema(path)} == {"alembic_version"}
    assert revision(url_of(path)) is None
    upgrade(url_of(path))
    assert schema(path) == before
    Database(url_of(path)).close()


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
