"""kill -9 at random moments, of the server and of the training child: what was acknowledged is there, and it serves again."""

import os
import random
import signal
import time
from pathlib import Path

import httpx

from service.core import AdapterState, RunState
from service.evaluation.server import LocalServer
from service.store.adapters import Adapters
from service.store.database import Database, integrity
from service.store.generations import Generations
from service.store.runs import Runs
from tests.support.tiny_server import prompts, say, tiny_server, write_pair

SERVER_KILLS = 10
CHILD_KILLS = 10


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def process_id(server: LocalServer) -> int:
    assert server._process is not None
    return server._process.pid


def check_rows(server: LocalServer, acknowledged: int) -> None:
    """The database of a dead server: whole, legal, and with everything that was acknowledged."""
    database = Database(f"sqlite:///{server.folder / 'redraft.db'}")
    try:
        assert integrity(database) == "ok"
        assert Generations(database).stats().generations >= acknowledged
        adapters = Adapters(database).all()
        assert sum(ref.state is AdapterState.ACTIVE for ref in adapters) <= 1
        for ref in adapters:
            if ref.state in {AdapterState.ACTIVE, AdapterState.RETIRED}:
                assert (ref.folder / "adapters.safetensors").is_file()
        assert sum(not run.state.over for run in Runs(database).latest(100)) <= 1
    finally:
        database.close()


def stored(server: LocalServer) -> int:
    database = Database(f"sqlite:///{server.folder / 'redraft.db'}", read_only=True)
    try:
        return Generations(database).stats().generations
    finally:
        database.close()


def test_the_server_is_killed_at_random_moments(tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    training = {"enabled": True, "min_cases": 20, "min_tokens": 100, "cooldown_seconds": 0.0, "epochs": 40}
    server = tiny_server(tmp_path, pair, training=training)
    rng = random.Random(0)
    acknowledged, orphans = 0, list[int]()
    for turn in range(SERVER_KILLS):
        server.start()
        end = time.monotonic() + rng.uniform(0.2, 2.5)
        for line in prompts(1000, seed=turn):
            say(server, line.prompt)
            if time.monotonic() > end:
                break
        acknowledged = stored(server)
        orphans += children(process_id(server))
        os.kill(process_id(server), signal.SIGKILL)
        server.stop()
        check_rows(server, acknowledged)
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in orphans) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [pid for pid in orphans if Path(f"/proc/{pid}").exists()], "a child outlived its server"
    server.start()
    try:
        assert say(server, "still there")["finish_reason"] in {"stop", "length"}
        active = server.get("/adapters")["active"]
    finally:
        assert server.stop() == 0
    check_rows(server, acknowledged)
    database = Database(f"sqlite:///{server.folder / 'redraft.db'}")
    try:
        assert all(run.state.over for run in Runs(database).latest(100))
        known = {ref.id for ref in Adapters(database).all() if ref.state is AdapterState.ACTIVE}
        assert known == ({active} if active else set())
    finally:
        database.close()


def test_the_training_child_is_killed_at_random_moments(tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    server = tiny_server(tmp_path, pair, training={"epochs": 200})
    rng = random.Random(1)
    server.start()
    try:
        for line in prompts(12, seed=5):
            say(server, line.prompt)
        states: list[str] = []
        for turn in range(CHILD_KILLS):
            # Cases under three crashes are put aside: every turn needs new ones.
            for line in prompts(6, seed=100 + turn):
                say(server, line.prompt)
            time.sleep(0.5)
            before = set(children(process_id(server)))
            run = server.post("/train")
            end = time.monotonic() + rng.uniform(0.0, 2.0)
            while time.monotonic() < end:
                assert say(server, "meanwhile")["tokens"], "serving goes on while a run trains"
            for pid in set(children(process_id(server))) - before:
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
        assert RunState.CRASHED in states, "at least one kill must have met a running child"
        ready = httpx.get(f"{server.url}/health/ready", timeout=10.0)
        assert ready.status_code == 200
    finally:
        assert server.stop() == 0
    check_rows(server, 1)
