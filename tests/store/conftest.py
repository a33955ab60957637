from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.store.database import Database
from tests.support.databases import Databases, lent


@pytest.fixture(params=["sqlite", "postgres"])
def databases(request: pytest.FixtureRequest) -> Iterator[Databases]:
    yield from lent(request)


@pytest.fixture
def url(databases: Databases, tmp_path: Path) -> str:
    return databases.empty(tmp_path)


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    opened = Database(url)
    yield opened
    opened.close()
