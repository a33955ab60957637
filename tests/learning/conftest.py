"""What the child's tests share: each of their modules has a rig of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.training_child import Home, Rig


@pytest.fixture
def home(rig: Rig, tmp_path: Path) -> Iterator[Home]:
    made = Home(rig, tmp_path)
    yield made
    made.database.close()
