"""Fixtures for the tests of the training child. Each module defines its own logged_pair."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.training_child import Home, LoggedPair


@pytest.fixture
def home(logged_pair: LoggedPair, tmp_path: Path) -> Iterator[Home]:
    made = Home(logged_pair, tmp_path)
    yield made
    made.database.close()
