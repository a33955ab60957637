"""Set-up of every test process: the fast BLAS, one BLAS thread per worker, and none of the caller's settings."""

import os

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several workers share the cores: BLAS threads that spin while they wait would make all of them slower.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import service  # noqa: F401  # pyright: ignore[reportUnusedImport]  (loads the fast BLAS before anything imports mlx)

# Settings of whoever runs the tests are not the tests'.
for name in [name for name in os.environ if name.startswith("REDRAFT_") and name != "REDRAFT_BLAS"]:
    del os.environ[name]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: tests also wait for processes, sockets and clocks."""
    return (os.cpu_count() or 1) + 1


SLOWEST_FIRST = ("server", "cli", "evaluation", "learning", "models", "engine", "lifecycle")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that all workers end at about the same time."""
    ranks = {name: rank for rank, name in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.path.parent.name, len(ranks)))
