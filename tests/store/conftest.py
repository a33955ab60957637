from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.store.database import Database, upgrade
from tests.support.store_rows import copy_of, url_of


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty migrated database, which is copied because migrating again is slower."""
    path = tmp_path_factory.mktemp("template") / "empty.db"
    upgrade(url_of(path))
    return path


@pytest.fixture
def url(template: Path, tmp_path: Path) -> str:
    return copy_of(template, tmp_path / "redraft.db")


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    opened = Database(url)
    yield opened
    opened.close()
