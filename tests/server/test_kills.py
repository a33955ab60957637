"""kill -9 at random moments, of the server and of the training child: what was acknowledged is there, and it serves again."""

import os
import random
import signal
import sqlite3
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from service.core import AdapterState, RunState
from service.evaluation.server import LocalServer
from service.store.adapters import Adapters
from service.store.database import Database, integrity
from service.store.runs import Runs
from tests.support.tiny_server import prompts, say, tiny_server, write_pair

SETTLED_SECONDS = 1.0
"""An answer that a client has had for so long is in the database, whatever happens next."""


def children(pid: int) -> set[int]:
    """Process ids of the direct children."""
    return {child.pid for child in psutil.Process(pid).children()}


def process_id(server: LocalServer) -> int:
    assert server._process is not None
    return server._process.pid


def check_rows(server: LocalServer, stored: set[str]) -> None:
    """The database of a dead server: whole, legal, and with every generation named in `stored`."""
    database = Database(f"sqlite:///{server.folder / 'redraft.db'}")
    try:
        assert integrity(database) == "ok"
        assert not stored - generation_ids(server)
        adapters = Adapters(database).all()
        assert sum(ref.state is AdapterState.ACTIVE for ref in adapters) <= 1
        for ref in adapters:
            if ref.state in {AdapterState.ACTIVE, AdapterState.RETIRED}:
                assert (ref.folder / "adapters.safetensors").is_file()
        assert sum(not run.state.over for run in Runs(database).latest(100)) <= 1
    finally:
        database.close()


def generation_ids(server: LocalServer) -> set[str]:
    """Ids of the generations that are committed, read as another process reads them."""
    with sqlite3.connect(f"file:{server.folder / 'redraft.db'}?mode=ro", uri=True) as connection:
        return {row[0] for row in connection.execute("SELECT id FROM generations")}


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.nightly)])
def test_the_server_is_killed_at_random_moments(tmp_path: Path, kills: int) -> None:
    pair = write_pair(tmp_path)
    training = {"enabled": True, "min_cases": 20, "min_tokens": 100, "cooldown_seconds": 0.0, "epochs": 40}
    server = tiny_server(tmp_path, pair, training=training)
    rng = random.Random(0)
    answered: list[tuple[float, str]] = []
    settled, orphans, asked = set[str](), set[int](), set[str]()
    for turn in range(kills):
        server.start()
        end = time.monotonic() + SETTLED_SECONDS + rng.uniform(0.2, 2.5)
        for line in prompts(10_000, seed=turn):
            if line.prompt in asked:
                continue  # equal texts are one row, which keeps the first one's id
            asked.add(line.prompt)
            answered.append((time.monotonic(), say(server, line.prompt)["id"]))
            # The first kill comes while a run trains, so that there is a child to be left behind.
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
    assert orphans and settled
    _, left = psutil.wait_procs([psutil.Process(pid) for pid in orphans if psutil.pid_exists(pid)], timeout=60)
    assert not left, "a child outlived its server"
    server.start()
    try:
        assert say(server, "still there")["finish_reason"] in {"stop", "length"}
        active = server.get("/adapters")["active"]
    finally:
        assert server.stop() == 0
    check_rows(server, settled)
    database = Database(f"sqlite:///{server.folder / 'redraft.db'}")
    try:
        assert all(run.state.over for run in Runs(database).latest(100))
        known = {ref.id for ref in Adapters(database).all() if ref.state is AdapterState.ACTIVE}
        assert known == ({active} if active else set())
    finally:
        database.close()


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.nightly)])
def test_the_training_child_is_killed_at_random_moments(tmp_path: Path, kills: int) -> None:
    pair = write_pair(tmp_path)
    server = tiny_server(tmp_path, pair, training={"epochs": 200})
    rng = random.Random(1)
    server.start()
    try:
        for line in prompts(12, seed=5):
            say(server, line.prompt)
        states: list[str] = []
        for turn in range(kills):
            # Cases under three crashes are put aside: every turn needs new ones.
            for line in prompts(6, seed=100 + turn):
                say(server, line.prompt)
            time.sleep(0.5)
            before = children(process_id(server))
            run = server.post("/train")
            end = time.monotonic() + rng.uniform(0.0, 2.0)
            # The first kill meets a child for certain.
            while time.monotonic() < end or (not turn and not children(process_id(server)) - before):
                assert say(server, "meanwhile")["tokens"], "serving goes on while a run trains"
                assert time.monotonic() < end + 60, "no child was started"
            for pid in children(process_id(server)) - before:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            end = time.monotonic() + 60
            while (state := server.get(f"/train/{run['id']}"))["state"] not in {
                "promoted",
                "rejected",
                "failed",
                "crashed",
            }:
                assert time.monotonic() < end, f"run {run['id']} hangs in {state['state']}"
                time.sleep(0.1)
            states.append(state["state"])
            assert say(server, "and after")["tokens"]
        assert states[0] == RunState.CRASHED
        ready = httpx.get(f"{server.url}/health/ready", timeout=10.0)
        assert ready.status_code == 200
    finally:
        assert server.stop() == 0
    check_rows(server, set())
