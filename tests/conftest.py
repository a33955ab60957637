"""Set-up of every test process: the fast BLAS with one thread a worker, batch scheduling, and none of the caller's settings."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several workers share the cores: BLAS threads that spin while they wait would make all of them slower.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":
        # MLX's CPU back end gives each operation to a thread. Where a thread that wakes up preempts the one that woke it, a
        # call of a tiny model takes 1.15 ms of processor time, otherwise 0.8 ms. Threads and child processes inherit this.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
elif sys.dont_write_bytecode and sys.pycache_prefix is None:
    # PYTHONDONTWRITEBYTECODE, which images of containers set: each worker, server and child would compile all that it imports,
    # which takes as long as the rest of its start. What they compile goes into pytest's folder, where the next run finds it.
    sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    sys.dont_write_bytecode = False
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Must come first: the service loads the fast BLAS before it imports mlx.
from service.engine import profile

if TYPE_CHECKING:
    from tests.support.databases import PostgresDatabases, SqliteFiles

# The environment's settings do not apply to the tests.
for name in [name for name in os.environ if name.startswith("REDRAFT_") and name != "REDRAFT_BLAS"]:
    del os.environ[name]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: tests also wait for processes, sockets and clocks."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(scope="session", autouse=True)
def brief_costs(pytestconfig: pytest.Config) -> Iterator[None]:
    """Shorten the timing of calls, which an adaptive decoder makes before its first round; calls of tiny models take a
    millisecond."""
    with pytest.MonkeyPatch.context() as patch:
        if pytestconfig.getoption("markexpr") != "bench":
            patch.setattr(profile, "SHORT_SECONDS", 0.02)
        yield


# Imported in here: most workers need no database.
@pytest.fixture(scope="session")
def sqlite_files(tmp_path_factory: pytest.TempPathFactory) -> SqliteFiles:
    from tests.support.databases import SqliteFiles

    return SqliteFiles(tmp_path_factory.mktemp("template") / "empty.db")


@pytest.fixture(scope="session")
def postgres_databases() -> Iterator[PostgresDatabases]:
    """A PostgreSQL of this worker's own."""
    from tests.support.databases import PostgresDatabases
    from tests.support.postgres import PostgresServer, missing

    if (reason := missing()) is not None:
        pytest.skip(reason)
    server = PostgresServer()
    try:
        server.start()
        yield PostgresDatabases(server)
    finally:
        server.close()


SLOWEST_FIRST = ("server", "cli", "evaluation", "learning", "models", "engine", "lifecycle")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that all workers end at about the same time."""
    ranks = {name: rank for rank, name in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.path.parent.name, len(ranks)))
    for item in items:
        # Reports bring these from the workers (tests/support/promises.py).
        item.user_properties.extend(("promise", marker.args[0]) for marker in item.iter_markers("promise"))


def pytest_collection_finish() -> None:
    """The modules and tests themselves stay until the end: the garbage collector need not look at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Say what a test measured, for docs/promises.md."""
    return lambda text: record_property("figure", text)
