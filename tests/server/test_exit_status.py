"""Exit statuses: of commands that call a server, and of the server when it is stopped while it answers."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from service.engine.decoder import Decoder
from service.engine.rounds import RoundReport
from service.evaluation.server_process import LocalServer
from tests.support.signals import sigint
from tests.support.tiny_server import generate, in_process_server, prompts, tiny_server, write_pair


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


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, pair: tuple[Path, Path]) -> Iterator[LocalServer]:
    root = tmp_path_factory.mktemp("server")
    server = tiny_server(root, pair, training={"memory_gb": 1e-3}, server={"drain_seconds": 60.0})
    with sigint(signal.SIG_DFL):
        server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def served(shared: LocalServer) -> LocalServer:
    """A running server; restarted if an earlier test stopped it."""
    assert shared._process is not None
    if shared._process.poll() is not None:
        with sigint(signal.SIG_DFL):
            shared.start()
    return shared


# ----------------------------------------------------------------------------------------------------------- commands


def test_train_fails_when_its_run_does(served: LocalServer) -> None:
    for line in prompts(4):
        generate(served, line.prompt)
    done = redraft("train", "--url", served.url)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("redraft: run 1 out of memory: 0.0 GiB of memory may be used for training, and ")
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
    """One streamed answer, read step by step."""

    def __init__(self, events: Iterator[str]) -> None:
        self._events = events
        self.tokens = 0

    def read(self, until: Callable[[dict[str, object]], bool]) -> dict[str, object]:
        """Events up to the first that matches, including error events and the last one."""
        for text in self._events:
            if not text.startswith("data: {"):
                continue
            event = json.loads(text.removeprefix("data: "))
            self.tokens += len(event.get("tokens", []))
            if until(event):
                return event
        raise AssertionError("the stream ended")


@contextmanager
def streaming(server: LocalServer, max_tokens: int) -> Generator[Stream]:
    # With this seed the end token comes after 500 tokens.
    asked = {"prompt": "abcdefgh", "max_tokens": max_tokens, "stream": True, "temperature": 1.5, "seed": 11}
    with httpx.stream("POST", f"{server.url}/generate", json=asked, timeout=60.0) as answer:
        assert answer.status_code == 200
        yield Stream(answer.iter_lines())


@pytest.mark.promise(24)
def test_a_running_answer_is_finished_before_the_server_ends(served: LocalServer) -> None:
    """Meanwhile new requests are refused with a response, not with a closed port."""
    assert served._process is not None
    try:
        with streaming(served, 1500) as stream:
            stream.read(lambda event: True)
            served._process.send_signal(signal.SIGTERM)
            late, deadline = 200, time.monotonic() + 60.0
            while late == 200:  # until the signal has been noticed
                assert time.monotonic() < deadline
                late = served.request("POST", "/generate", {"prompt": "late", "max_tokens": 1}).status_code
            end = stream.read(lambda event: "finish_reason" in event or "error" in event)
        assert late == 503
        assert end.get("finish_reason") in {"stop", "length"}, end
        assert served._process.wait(60.0) == 0
    finally:
        served.stop()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)], ids=["SIGTERM", "SIGINT"]
)
@pytest.mark.promise(24)
def test_a_second_signal_ends_the_server_at_once(served: LocalServer, number: signal.Signals) -> None:
    """While eight answers of half a minute's work are under way, which the first signal waits for."""
    assert served._process is not None
    # Never the end token: 2,000 rounds in any case.
    asked = {"prompt": "abcdefgh", "max_tokens": 2000, "n": 8, "stream": True, "logit_bias": {"0": -100}}
    try:
        with httpx.stream("POST", f"{served.url}/v1/completions", json=asked, timeout=60.0) as answer:
            lines = answer.iter_lines()
            next(lines)
            served._process.send_signal(number)
            deadline = time.monotonic() + 60.0
            while served.request("GET", "/health/ready").status_code == 200:
                assert time.monotonic() < deadline
            assert served._process.poll() is None
            sent_at = time.monotonic()
            served._process.send_signal(number)
            assert served._process.wait(10.0) == 128 + number
            assert time.monotonic() - sent_at < 2.0
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
    finally:
        served.stop()


def test_a_server_in_the_background_of_a_script_is_ended_by_sigterm_alone(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    """Such a process is started with SIGINT ignored: Ctrl-C is for what runs in the foreground."""
    server = tiny_server(tmp_path, pair)
    with sigint(signal.SIG_IGN):
        server.start()
    try:
        assert server._process is not None
        server._process.send_signal(signal.SIGINT)
        # A server that had been asked to end would refuse this one.
        for _ in range(10):
            assert server.request("POST", "/generate", {"prompt": "abc", "max_tokens": 4}).status_code == 200
            time.sleep(0.1)
    finally:
        assert server.stop() == 0


def test_an_answer_that_takes_too_long_is_ended_with_an_error(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Decoder.round

    def slow(decoder: Decoder, coming: int = 0) -> RoundReport:
        time.sleep(0.1)
        return decode(decoder, coming)

    monkeypatch.setattr(Decoder, "round", slow)
    server = in_process_server(tmp_path, pair, server={"drain_seconds": 0.2})
    server.start()
    try:
        with streaming(server, 2000) as stream:
            stream.read(lambda event: True)
            server.terminate()
            end = stream.read(lambda event: "finish_reason" in event or "error" in event or "code" in event)
        assert "finish_reason" not in end, "seconds of rounds were left"
    finally:
        assert server.stop() == 0
