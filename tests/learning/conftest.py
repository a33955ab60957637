"""Fixtures for the tests of the training child. Each module defines its own logged_pair."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.databases import Databases, lent
from tests.support.training_child import Home, LoggedPair


@pytest.fixture
def databases(request: pytest.FixtureRequest) -> Iterator[Databases]:
    yield from lent(request)


@pytest.fixture
def home(logged_pair: LoggedPair, tmp_path: Path, databases: Databases) -> Iterator[Home]:
    made = Home(logged_pair, tmp_path, databases.empty(tmp_path))
    yield made
    made.database.close()
