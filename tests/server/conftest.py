from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.databases import Databases, lent


@pytest.fixture
def databases(request: pytest.FixtureRequest) -> Iterator[Databases]:
    yield from lent(request)
