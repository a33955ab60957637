"""Where tests have their databases: SQLite's files, or a private PostgreSQL. The fixture `databases` hands them out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.pool import NullPool

from service.store.database import upgrade
from service.store.tables import metadata
from tests.support.postgres import PostgresServer
from tests.support.store_rows import url_of

SQLITE = pytest.mark.parametrize("databases", ["sqlite"], indirect=True)
"""For tests of what only SQLite has."""
POSTGRES = pytest.mark.parametrize("databases", ["postgres"], indirect=True)
BY_NIGHT = pytest.mark.parametrize(
    "databases", ["sqlite", pytest.param("postgres", marks=pytest.mark.nightly)], indirect=True
)
"""For what takes long on PostgreSQL and is hardly SQL."""
BOTH = pytest.mark.parametrize("databases", ["sqlite", "postgres"], indirect=True)
"""For tests that run on PostgreSQL every day, where others do by night."""


def lent(request: pytest.FixtureRequest) -> Iterator[Databases]:
    """Body of a fixture whose parameter says which; SQLite without one."""
    kind = getattr(request, "param", "sqlite")
    found: Databases = request.getfixturevalue("postgres_databases" if kind == "postgres" else "sqlite_files")
    yield found
    found.clear()


class Databases(Protocol):
    """kind: "sqlite" or "postgres"."""

    kind: str

    def empty(self, folder: Path) -> str:
        """URL of a database at the newest revision, without rows. folder: where SQLite's file goes (redraft.db)."""
        ...

    def bare(self, folder: Path) -> str:
        """URL of one without tables, or that is not there yet."""
        ...

    def give_back(self, url: str) -> None:
        """It is not needed any more."""
        ...

    def clear(self) -> None:
        """None of them is."""
        ...


def run_sql(url: str, *statements: str) -> None:
    """Run statements in one transaction, while others may have the database open."""
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


class SqliteFiles:
    """template: becomes a migrated database, which is copied because migrating again is slower."""

    kind = "sqlite"

    def __init__(self, template: Path) -> None:
        upgrade(url_of(template))
        self._template = template

    def empty(self, folder: Path) -> str:
        shutil.copy(self._template, folder / "redraft.db")
        return self.bare(folder)

    def bare(self, folder: Path) -> str:
        return url_of(folder / "redraft.db")

    def give_back(self, url: str) -> None:
        """Its folder goes with the test."""

    def clear(self) -> None:
        """Their folders go with the test."""


class PostgresDatabases:
    """Databases of a server. Those at the newest revision are emptied and used again, which takes a hundredth of what making
    one takes."""

    kind = "postgres"

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self._free: list[str] = []
        self._bare = set[str]()
        self._lent: list[str] = []

    def empty(self, folder: Path) -> str:
        url = self._free.pop() if self._free else self._made()
        self._lent.append(url)
        return url

    def bare(self, folder: Path) -> str:
        url = self.server.create()
        self._bare.add(url)
        self._lent.append(url)
        return url

    def give_back(self, url: str) -> None:
        self._lent.remove(url)
        if url in self._bare:
            self.server.drop(url)
        else:
            self._emptied(url)
            self._free.append(url)

    def clear(self) -> None:
        for url in list(self._lent):
            self.give_back(url)

    def _made(self) -> str:
        url = self.server.create()
        upgrade(url)
        return url

    def _emptied(self, url: str) -> None:
        name = make_url(url).database or ""
        # A test that failed may have left a transaction open, for which this would wait.
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        end_others = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"
        tables = [table.name for table in reversed(metadata.sorted_tables)]
        statements = (
            *(f"DELETE FROM {table}" for table in tables),
            "SELECT setval(oid, 1, false) FROM pg_class WHERE relkind = 'S'",
        )
        self.server.execute(end_others, ";".join(statements), database=name)
