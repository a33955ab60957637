from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.databases import Databases, lent
from tests.support.lifecycle_server import Installation


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.nightly)])
def databases(request: pytest.FixtureRequest) -> Iterator[Databases]:
    """Tests marked BOTH run on PostgreSQL every day, all others by night."""
    yield from lent(request)


@pytest.fixture(autouse=True, scope="module")
def leases_outlast_the_tests() -> Iterator[None]:
    """Supervisors join without a heartbeat here; `lapse` ends a lease."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.store.processes.members.LEASE_SECONDS", 3600.0)
        yield


@pytest.fixture
def installation(tmp_path: Path, databases: Databases) -> Installation:
    return Installation(tmp_path, databases.empty(tmp_path))
