"""What processes end with: commands that ask a server, and the server itself when it is asked to end while it answers."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from service.evaluation.server import LocalServer
from tests.support.tiny_server import prompts, say, tiny_server, write_pair


def redraft(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "service.cli", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


# ----------------------------------------------------------------------------------------------------------- commands


def test_train_fails_when_its_run_does(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    server = tiny_server(tmp_path, pair, training={"memory_gb": 1e6})
    server.start()
    try:
        for line in prompts(4):
            say(server, line.prompt)
        done = redraft("train", "--url", server.url)
    finally:
        assert server.stop() == 0
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("redraft: run 1 failed: training takes 1000000.0 GiB of memory and ")
    assert done.stderr.count("\n") == 1


def test_doctor_fails_where_nothing_can_be_served(tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text(f"home = {json.dumps(str(tmp_path / 'home'))}\n[models]\ntarget = 'nothing-here'\n")
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("raise ImportError('libmlx is missing')")
    done = redraft("doctor", "--config", config, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "there is no model nothing-here" in done.stdout
    assert "MLX does not run" in done.stdout
    assert "nothing is wrong" not in done.stdout
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------------------- SIGTERM, streaming


class Stream:
    """One streamed answer, read as far as it was asked for."""

    def __init__(self, events: Iterator[str]) -> None:
        self._events = events
        self.tokens = 0

    def read(self, until: Callable[[dict[str, object]], bool]) -> dict[str, object]:
        """Events up to the first that is as wanted, an error's or the last one's among them."""
        for text in self._events:
            if not text.startswith("data: {"):
                continue
            event = json.loads(text.removeprefix("data: "))
            self.tokens += len(event.get("tokens", []))
            if until(event):
                return event
        raise AssertionError("the stream ended")


@contextmanager
def streaming(server: LocalServer, max_tokens: int) -> Iterator[Stream]:
    asked = {"prompt": "abcdefgh", "max_tokens": max_tokens, "stream": True, "temperature": 1.5, "seed": 3}
    with httpx.stream("POST", f"{server.url}/generate", json=asked, timeout=60.0) as answer:
        assert answer.status_code == 200
        yield Stream(answer.iter_lines())


def terminate(server: LocalServer) -> float:
    assert server._process is not None
    os.kill(server._process.pid, signal.SIGTERM)
    return time.monotonic()


def test_a_running_answer_is_finished_before_the_server_ends(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    """Meanwhile new requests are refused by an answer, not by a closed port."""
    server = tiny_server(tmp_path, pair, server={"drain_seconds": 60.0})
    server.start()
    try:
        with streaming(server, 1500) as stream:
            stream.read(lambda event: True)
            terminate(server)
            late = 200
            while late == 200:  # until the signal has been noticed
                body = {"prompt": "late", "max_tokens": 1}
                late = httpx.post(f"{server.url}/generate", json=body, timeout=60.0).status_code
            end = stream.read(lambda event: "finish_reason" in event or "error" in event)
        assert late == 503
        assert end.get("finish_reason") in {"stop", "length"}, end
    finally:
        assert server.stop() == 0


def test_an_answer_that_takes_too_long_is_ended_with_an_error(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    server = tiny_server(tmp_path, pair, server={"drain_seconds": 0.2})
    server.start()
    try:
        with streaming(server, 2000) as stream:
            stream.read(lambda event: True)
            terminate(server)
            end = stream.read(lambda event: "finish_reason" in event or "error" in event or "code" in event)
        assert "finish_reason" not in end, "2,000 tokens in 0.2 s: ask for more"
    finally:
        assert server.stop() == 0
