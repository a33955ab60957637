"""A real server in a process of its own, for measurements: settings in, URL out."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from service.core import Unavailable, python_command
from service.settings import sqlite_url

START_SECONDS = 180.0


class ServerProcess:
    """A child that answers HTTP on a free port of this machine. `command`: port -> its words. ready: path that answers 200
    when it can serve. What it says is in server.log in `folder`."""

    def __init__(self, folder: Path, command: Callable[[int], Sequence[str]], ready: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / "server.log"
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = command(self.port)
        self._ready = ready
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it is ready. Raises Unavailable with the end of its log when it does not become so."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                # Nothing from the caller's environment may override its configuration; the BLAS is no setting.
                env={
                    n: value for n, value in os.environ.items() if n == "REDRAFT_BLAS" or not n.startswith("REDRAFT_")
                },
            )
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}{self._ready}", timeout=2.0).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        self.stop()
        raise Unavailable(f"the server did not start: {self.tail()}")

    def stop(self) -> int | None:
        """Ask it to end, wait, and return its exit status."""
        if self._process is None:
            return None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        return self._process.returncode

    def tail(self, lines: int = 5) -> str:
        return " | ".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


class LocalServer(ServerProcess):
    """`redraft serve` with its state (database, adapters, log) in `folder`."""

    def __init__(self, folder: Path, settings: Mapping[str, Mapping[str, object]], home: Path) -> None:
        self.config = folder / "server.toml"
        super().__init__(
            folder,
            lambda port: python_command("-m", "service.cli", "serve", "--config", str(self.config)),
            "/health/ready",
        )
        tree: dict[str, dict[str, object]] = {section: dict(values) for section, values in settings.items()}
        tree.setdefault("server", {}).update(host="127.0.0.1", port=self.port)
        tree.setdefault("store", {}).update(url=sqlite_url(folder / "redraft.db"), adapters=str(folder / "adapters"))
        lines = [f"home = {json.dumps(str(home))}"]
        for section, values in tree.items():
            lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
        self.config.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def get(self, path: str) -> dict[str, Any]:
        return _answer(httpx.get(f"{self.url}{path}", timeout=60.0))

    def post(self, path: str, body: object = None) -> dict[str, Any]:
        return _answer(httpx.post(f"{self.url}{path}", json=body, timeout=600.0))


def _answer(answer: httpx.Response) -> dict[str, Any]:
    if answer.is_error:
        raise Unavailable(f"{answer.request.url.path} answered {answer.status_code}: {answer.text[:300]}")
    return answer.json()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
