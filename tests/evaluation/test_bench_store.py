"""The benchmark of a full log at toy size: a real database and a real server on it."""

from pathlib import Path

import pytest

from service.core import RedraftError
from service.evaluation.bench.store import CHOOSING, run_store
from service.settings import Settings, sqlite_url
from service.store.database import Database, integrity
from service.store.log.generations import Generations
from tests.support.published import check_published


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["SQLite", "PostgreSQL"])
def test_store_times_what_a_run_reads(
    settings: Settings, models: tuple[Path, Path], tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    keep = tmp_path / "log"
    url = request.getfixturevalue("postgres_databases").bare(tmp_path) if kind == "PostgreSQL" else None
    report = run_store(settings, models, cases=1_000, turns=1, scrapes=3, streams=2, keep=keep, url=url)
    found = report.plain
    assert found["settings"]["cases"] == 1_000 and found["settings"]["generations"] == 40
    assert found["settings"]["database"] == kind and found["settings"]["database_bytes"] > 100_000
    assert found["arms"].keys() == {"choose", "record", "idle", "2 streams"}
    assert set(CHOOSING) < found["steps"].keys()
    assert 0 < found["arms"]["choose"]["seconds"]["median"] < 1.0
    assert all(found["arms"][name]["p99_seconds"] > 0 for name in ("idle", "2 streams"))
    check_published(report, tmp_path)
    # The run of every turn was cancelled, so all cases are open again.
    database = Database(url or sqlite_url(keep / "redraft.db"))
    try:
        assert integrity(database) == "ok"
        stats = Generations(database).stats()
        assert stats.cases >= 1_000 and stats.trained == 0 and stats.quarantined == 0
    finally:
        database.close()
    with pytest.raises(RedraftError, match="already"):
        run_store(settings, models, cases=25, keep=keep, url=url)
