"""A database that is locked, slow or full while a real model decodes: answers come as fast, and recording goes on by itself."""

from __future__ import annotations

import itertools
import resource
import sqlite3
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from service.evaluation.server_process import LocalServer
from tests.support.scraped import scraped
from tests.support.tiny_server import generate

PHASE_SECONDS = 6.0
TURNS = 5
ROWS = 2
FILE_BYTES = 64 * 1024
"""The largest file that may be written where the disk is full: the log is smaller, the database's files are larger."""


@contextmanager
def locked(server: LocalServer) -> Generator[None]:
    """By another process's transaction that does not end."""
    with closing(sqlite3.connect(server.folder / "redraft.db", isolation_level=None, timeout=60.0)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


@contextmanager
def slow(server: LocalServer) -> Generator[None]:
    """Free a tenth of the time."""
    over = threading.Event()

    def hold() -> None:
        while not over.wait(0.05):
            with locked(server):
                over.wait(0.45)

    with ThreadPoolExecutor(1) as other:
        held = other.submit(hold)
        yield
        over.set()
        held.result()


@contextmanager
def full(server: LocalServer) -> Generator[None]:
    """Every write behind the first of a file fails."""
    assert server._process is not None and server.log.stat().st_size < FILE_BYTES
    process = psutil.Process(server._process.pid)
    before = process.rlimit(resource.RLIMIT_FSIZE)
    process.rlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, before[1]))
    yield
    process.rlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def well(server: LocalServer) -> Generator[None]:
    yield


CONDITIONS = {"well": well, "locked": locked, "slow": slow, "full": full}


def stored(server: LocalServer) -> int:
    with closing(sqlite3.connect(f"file:{server.folder / 'redraft.db'}?mode=ro", uri=True)) as database:
        return database.execute("SELECT count(*) FROM generations").fetchone()[0]


@pytest.mark.bench
@pytest.mark.promise(14)
def test_decoding_keeps_its_speed_whatever_the_database_does(tmp_path: Path, figure: Callable[[str], None]) -> None:
    """The bundled pair. Conditions take turns, so that a machine whose speed changes changes it for all."""
    settings: dict[str, dict[str, object]] = {
        "training": {"enabled": False},
        "server": {"log_level": "warning"},
        "engine": {"max_rows": ROWS},
    }
    server = LocalServer(tmp_path / "state", settings, tmp_path / "home")
    numbers = itertools.count()
    spent = {name: [0, 0.0] for name in CONDITIONS}

    def ask(end: float) -> tuple[int, float]:
        tokens, seconds = 0, 0.0
        while time.monotonic() < end:
            timings = generate(server, f"Tell me a story of {next(numbers)} animals.", max_tokens=64)["timings"]
            tokens, seconds = tokens + timings["predicted_n"], seconds + timings["predicted_ms"] / 1000
        return tokens, seconds

    server.start()
    try:
        ask(time.monotonic() + PHASE_SECONDS)
        for _ in range(TURNS):
            for name, condition in CONDITIONS.items():
                with condition(server), ThreadPoolExecutor(ROWS) as clients:
                    for tokens, seconds in clients.map(ask, [time.monotonic() + PHASE_SECONDS] * ROWS):
                        spent[name][0] += tokens
                        spent[name][1] += seconds
        dropped = scraped(server.request("GET", "/metrics").text)["redraft:recorder_dropped_total"]
        before, end = stored(server), time.monotonic() + 60
        while stored(server) == before:
            assert time.monotonic() < end, "nothing is recorded any more"
            ask(time.monotonic() + 1.0)
        assert server.request("GET", "/health/ready").status_code == 200
    finally:
        assert server.stop() == 0
    rates = {name: tokens / seconds for name, (tokens, seconds) in spent.items()}
    figure(
        f"{rates['well']:.1f} tokens a second and row; "
        + ", ".join(f"{name}: {rates[name] / rates['well']:.3f} of it" for name in CONDITIONS if name != "well")
        + f"; {dropped:.0f} of {next(numbers)} generations not recorded"
    )
    for name in CONDITIONS:
        assert rates[name] >= 0.95 * rates["well"], name
