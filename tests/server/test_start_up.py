"""Start-up: HTTP answers 503 with the stage while the models load, and a signal ends the server in order at any moment."""

import os
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.evaluation.server_process import LocalServer
from service.store.database import upgrade
from tests.support.scraped import scraped
from tests.support.tiny_server import tiny_server, write_pair

PATIENCE = 60.0
STAGES = ["fetching", "loading", "checking", "timing"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


def launch(server: LocalServer) -> subprocess.Popen[bytes]:
    """Starts the server process without waiting until it is ready. Its umask is the default."""
    with server.log.open("ab") as log:
        return subprocess.Popen(server._command, stdout=log, stderr=log, umask=0o022)


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    """One client for all tests, because creating one is slow."""
    with httpx.Client(trust_env=False, timeout=PATIENCE) as client:
        yield client


def listening(client: httpx.Client, server: LocalServer, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        assert process.poll() is None, server.tail()
        try:
            assert client.get(f"{server.url}/health/live").json() == {"status": "alive"}
            return
        except httpx.ConnectError:
            time.sleep(0.02)
    raise AssertionError("it never listened")


@pytest.fixture
def stuck(tmp_path: Path, pair: tuple[Path, Path]) -> Iterator[tuple[LocalServer, subprocess.Popen[bytes]]]:
    """A server that never finishes loading: the target's weights are a pipe that nobody writes to."""
    folder = tmp_path / "target"
    folder.mkdir()
    for file in pair[0].iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    os.mkfifo(folder / "model.safetensors")
    server = tiny_server(tmp_path, (folder, pair[1]))
    process = launch(server)
    try:
        yield server, process
    finally:
        process.kill()
        process.wait(PATIENCE)


def test_every_route_answers_while_the_models_load_and_a_signal_ends_it(
    stuck: tuple[LocalServer, subprocess.Popen[bytes]], client: httpx.Client
) -> None:
    server, process = stuck
    listening(client, server, process)
    deadline = time.monotonic() + PATIENCE
    while "loading" not in (ready := client.get(f"{server.url}/health/ready")).text:
        assert time.monotonic() < deadline, ready.text
        time.sleep(0.02)
    error = {
        "code": "unavailable",
        "message": "the server is starting: loading",
        "param": None,
        "type": "overloaded_error",
    }
    for method, path in [
        ("GET", "/health/ready"),
        ("POST", "/generate"),
        ("POST", "/train"),
        ("GET", "/adapters"),
        ("POST", "/adapters/rollback"),
        ("GET", "/openapi.json"),
        ("GET", "/nothing-here"),
    ]:
        refused = client.request(method, f"{server.url}{path}", json={} if method == "POST" else None)
        assert (refused.status_code, refused.json()) == (503, {"error": error}), path
        assert int(refused.headers["retry-after"]) > 0
    answer = client.get(f"{server.url}/metrics")
    assert answer.status_code == 200
    assert scraped(answer.text)['redraft:requests_refused_total{code="unavailable"}'] == 1
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        for path in ("/metrics", "/train"):
            assert client.post(f"{server.url}{path}", headers=headers).status_code == 403
    # Probes and load balancers call it by any name.
    assert client.get(f"{server.url}/health/live", headers={"Host": "evil.example"}).status_code == 200
    # The loading thread cannot be stopped, but the process still ends in order.
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0, server.tail()
    log = server.log.read_text()
    assert "redraft serves at" not in log
    assert "Traceback" not in log


def test_loading_stages_are_in_order_and_the_log_is_announced_and_private(
    tmp_path: Path, pair: tuple[Path, Path], client: httpx.Client
) -> None:
    # Timing takes longest, even with few calls to time.
    engine = {"adaptive": True, "max_rows": 1, "num_draft_tokens": 2, "num_lookup_tokens": 0}
    server = tiny_server(tmp_path, pair, engine=engine)
    home, database = tmp_path / "home", server.folder / "redraft.db"
    # A file with the permissions that an older release gave it.
    upgrade(f"sqlite:///{database}")
    (server.folder / "adapters").mkdir(mode=0o755)
    (home / "targets").mkdir(parents=True, mode=0o755)
    (home / "training.log").touch(mode=0o644)
    database.chmod(0o644)
    process = launch(server)
    try:
        listening(client, server, process)
        stages: list[str] = []
        deadline = time.monotonic() + PATIENCE
        while True:
            announced = "redraft serves at" in server.log.read_text()
            ready = client.get(f"{server.url}/health/ready")
            if ready.status_code == 200:
                break
            assert not announced
            stages.append(ready.json()["error"]["message"].removeprefix("the server is starting: "))
            assert time.monotonic() < deadline, stages
            time.sleep(0.01)
        assert stages[-1] == "timing"
        assert sorted(stages, key=STAGES.index) == stages
        assert client.post(f"{server.url}/generate", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        # The write-ahead log exists while the database is open.
        for path in (database, database.with_name("redraft.db-wal"), database.with_name("redraft.db-shm")):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        for path in (server.folder / "adapters", home / "targets"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
        assert stat.S_IMODE((home / "training.log").stat().st_mode) == 0o600
        # The same for files that it and its children write later.
        if (status := Path(f"/proc/{process.pid}/status")).is_file():
            assert "Umask:\t0077" in status.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0, server.tail()
    finally:
        process.kill()
        process.wait(PATIENCE)
    log = server.log.read_text()
    assert f"redraft serves at {server.url}" in log
    assert f"home: {home}" in log
    assert f"recorded for training: prompts, answers and their tokens' probabilities, in {database}" in log
    assert "to record nothing: store.record = false with training.enabled = false" in log
