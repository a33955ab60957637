"""kill -9 of the server and of the training child at random moments: acknowledged data survives, and the server restarts."""

import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from service.core import AdapterState, RunState
from service.evaluation.server_process import LocalServer
from service.store.database import Database, integrity
from service.store.registry.adapters import Adapters
from service.store.registry.runs import Runs
from tests.support.tiny_server import generate, in_process_server, prompts, tiny_server, write_pair

SETTLED_SECONDS = 1.0
"""Seconds after which an answer that a client has received must survive a kill."""
KILLS = 10
"""Kills of each kind in the nightly tests."""


def children(pid: int) -> set[int]:
    """Process ids of the direct children."""
    return {child.pid for child in psutil.Process(pid).children()}


def process_id(server: LocalServer) -> int:
    assert server._process is not None
    return server._process.pid


def check_rows(server: LocalServer, stored: set[str]) -> None:
    """Check the database of a dead server: intact, consistent, and with every generation in `stored`."""
    database = Database(f"sqlite:///{server.folder / 'redraft.db'}")
    try:
        assert integrity(database) == "ok"
        assert not stored - generation_ids(server)
        adapters = Adapters(database, server.folder / "adapters").all()
        assert sum(ref.state is AdapterState.ACTIVE for ref in adapters) <= 1
        for ref in adapters:
            if ref.state in {AdapterState.ACTIVE, AdapterState.RETIRED}:
                assert (ref.folder / "adapters.safetensors").is_file()
        assert sum(not run.state.over for run in Runs(database).latest(100)) <= 1
    finally:
        database.close()


def generation_ids(server: LocalServer) -> set[str]:
    """Ids of the committed generations, read over a second connection."""
    with sqlite3.connect(f"file:{server.folder / 'redraft.db'}?mode=ro", uri=True) as connection:
        return {row[0] for row in connection.execute("SELECT id FROM generations")}


def over(server: LocalServer, run: int) -> RunState:
    """Wait for the run to end; returns its state."""
    end = time.monotonic() + 60
    while not (state := RunState(server.get(f"/train/{run}")["state"])).over:
        assert time.monotonic() < end, f"run {run} hangs in {state}"
        time.sleep(0.1)
    return state


def train(server: LocalServer, seed: int) -> tuple[int, set[int]]:
    """Start a run on new cases, because cases of three crashes are quarantined. Returns its number and the other children."""
    known = len(generation_ids(server))
    lines = list(prompts(6, seed))
    for line in lines:
        generate(server, line.prompt)
    end = time.monotonic() + 60
    while len(generation_ids(server)) < known + len(lines):
        assert time.monotonic() < end, "an answer was not recorded"
        time.sleep(0.05)
    before = children(process_id(server))
    return server.post("/train")["id"], before


def meanwhile(server: LocalServer, before: set[int], seconds: float, child: bool) -> set[int]:
    """Serve for some time; with `child`, at least until the run has a process. Returns the run's processes."""
    end = time.monotonic() + seconds
    while time.monotonic() < end or (child and not children(process_id(server)) - before):
        assert generate(server, "meanwhile")["tokens"], "serving goes on while a run trains"
        assert time.monotonic() < end + 60, "no child was started"
    return children(process_id(server)) - before


def ended(pids: set[int]) -> None:
    """Check that orphaned children end."""
    processes: list[psutil.Process] = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, left = psutil.wait_procs(processes, timeout=60)
    assert not left, "a child outlived its server"


def check_restart(server: LocalServer, settled: set[str]) -> None:
    """Restart after a kill; the server serves and its rows are consistent."""
    server.start()
    try:
        assert generate(server, "still there")["finish_reason"] in {"stop", "length"}
        active = server.get("/adapters")["active"]
    finally:
        assert server.stop() == 0
    check_rows(server, settled)
    database = Database(f"sqlite:///{server.folder / 'redraft.db'}")
    try:
        assert all(run.state.over for run in Runs(database).latest(100))
        known = {
            ref.id for ref in Adapters(database, server.folder / "adapters").all() if ref.state is AdapterState.ACTIVE
        }
        assert known == ({active} if active else set())
    finally:
        database.close()


@pytest.mark.nightly
def test_the_training_child_is_killed_and_then_the_server(tmp_path: Path) -> None:
    """Each is killed once, at a random moment of a run."""
    pair = write_pair(tmp_path)
    server = tiny_server(tmp_path, pair, training={"epochs": 200})
    rng = random.Random(1)
    server.start()
    try:
        run, before = train(server, 0)
        for pid in meanwhile(server, before, rng.uniform(0.0, 1.0), child=True):
            os.kill(pid, signal.SIGKILL)
        assert over(server, run) is RunState.OUT_OF_MEMORY
        assert generate(server, "and after")["tokens"]
        assert server.request("GET", "/health/ready").status_code == 200

        run, before = train(server, 1)
        answered: list[tuple[float, str]] = []
        # Equal texts are stored once, under the first id.
        texts = iter(dict.fromkeys(f"later {line.prompt}" for line in prompts(10_000, 2)))
        end = time.monotonic() + SETTLED_SECONDS + rng.uniform(0.2, 1.0)
        while time.monotonic() < end or not children(process_id(server)) - before:
            name = generate(server, next(texts))["id"]
            answered.append((time.monotonic(), name))
            assert time.monotonic() < end + 60, "no child was started"
        orphans, committed, killed = children(process_id(server)), generation_ids(server), time.monotonic()
        os.kill(process_id(server), signal.SIGKILL)
    finally:
        server.stop()
    settled = committed | {name for at, name in answered if at < killed - SETTLED_SECONDS}
    assert orphans and settled
    check_rows(server, settled)
    ended(orphans)
    check_restart(in_process_server(tmp_path, pair), settled)


@pytest.mark.nightly
@pytest.mark.promise(12)
def test_the_server_is_killed_at_random_moments(tmp_path: Path, figure: Callable[[str], None]) -> None:
    pair = write_pair(tmp_path)
    training = {"enabled": True, "min_cases": 20, "min_tokens": 100, "epochs": 40}
    training |= {"cooldown_seconds": 0.0, "idle_seconds": 0.0}
    server = tiny_server(tmp_path, pair, training=training)
    rng = random.Random(0)
    settled, orphans, asked = set[str](), set[int](), set[str]()
    try:
        for turn in range(KILLS):
            server.start()
            # Answers given just before an earlier kill may be lost.
            answered: list[tuple[float, str]] = []
            end = time.monotonic() + SETTLED_SECONDS + rng.uniform(0.2, 2.5)
            for line in prompts(10_000, seed=turn):
                if line.prompt in asked:
                    continue  # equal texts are one row, which keeps the first one's id
                asked.add(line.prompt)
                name = generate(server, line.prompt)["id"]
                answered.append((time.monotonic(), name))
                # The first kill comes during a run, so that a child is orphaned.
                if time.monotonic() > end and (turn or children(process_id(server))):
                    break
                assert time.monotonic() < end + 60, "no run was started"
            orphans |= children(process_id(server))
            committed = generation_ids(server)
            killed = time.monotonic()
            os.kill(process_id(server), signal.SIGKILL)
            server.stop()
            settled |= committed | {name for at, name in answered if at < killed - SETTLED_SECONDS}
            check_rows(server, settled)
    finally:
        server.stop()
    assert orphans and settled
    ended(orphans)
    check_restart(server, settled)
    figure(f"{KILLS} kills of a server, {len(settled)} answers that were stored, all there")


@pytest.mark.nightly
@pytest.mark.promise(19)
def test_the_training_child_is_killed_at_random_moments(tmp_path: Path) -> None:
    server = tiny_server(tmp_path, write_pair(tmp_path), training={"epochs": 200})
    rng = random.Random(1)
    server.start()
    try:
        states: list[RunState] = []
        for turn in range(KILLS):
            run, before = train(server, 100 + turn)
            # The first kill always finds a child.
            for pid in meanwhile(server, before, rng.uniform(0.0, 2.0), child=not turn):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            states.append(over(server, run))
            assert generate(server, "and after")["tokens"]
        assert states[0] is RunState.OUT_OF_MEMORY
        assert server.request("GET", "/health/ready").status_code == 200
    finally:
        assert server.stop() == 0
    check_rows(server, set())
