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

START_SECONDS = 600.0
"""A process that ends is noticed at once; one that loads a large model on a busy machine takes its time."""


class ServerProcess:
    """A child that answers HTTP on a free port of this machine. command: port -> command line. ready: path that answers 200
    once it serves. Its output goes to server.log in `folder`."""

    def __init__(self, folder: Path, command: Callable[[int], Sequence[str]], ready: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / "server.log"
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = command(self.port)
        self._ready = ready
        self._process: subprocess.Popen[bytes] | None = None
        # One client for all calls: making one takes longer than most calls. No proxy stands before this machine itself.
        self._client: httpx.Client | None = None

    def start(self) -> None:
        """Returns when it is ready. Raises Unavailable with the end of its log when it does not become so."""
        self._client = client = httpx.Client(base_url=self.url, trust_env=False, timeout=60.0)
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
                if client.get(self._ready, timeout=2.0).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        self.stop()
        raise Unavailable(f"the server did not start: {self.tail()}")

    def stop(self) -> int | None:
        """Ask it to end, wait, and return its exit status (None: it was never started)."""
        if self._client is not None:
            self._client.close()
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

    def request(self, method: str, path: str, body: object = None, *, timeout: float = 60.0) -> httpx.Response:
        """One call, whatever its status. Raises Unavailable when the process does not answer."""
        assert self._client is not None, "not started"
        try:
            return self._client.request(method, path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise Unavailable(f"the server does not answer ({error!r}); the end of its log: {self.tail()}") from error

    def tail(self, lines: int = 5) -> str:
        """The last lines of its log, in one line."""
        return " | ".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


class LocalServer(ServerProcess):
    """`redraft serve` with its state (database, adapters, log) in `folder`. url: of a database elsewhere."""

    def __init__(
        self, folder: Path, settings: Mapping[str, Mapping[str, object]], home: Path, url: str | None = None
    ) -> None:
        self.config = folder / "server.toml"
        super().__init__(
            folder,
            lambda port: python_command("-m", "service.cli", "serve", "--config", str(self.config)),
            "/health/ready",
        )
        tree: dict[str, dict[str, object]] = {section: dict(values) for section, values in settings.items()}
        tree.setdefault("server", {}).update(host="127.0.0.1", port=self.port)
        url = url or sqlite_url(folder / "redraft.db")
        tree.setdefault("store", {}).update(url=url, adapters=str(folder / "adapters"))
        lines = [f"home = {json.dumps(str(home))}"]
        for section, values in tree.items():
            # TOML has no word for None, which is what a setting is that is left out.
            given = {name: value for name, value in values.items() if value is not None}
            lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in given.items())]
        # The URL may hold a password.
        self.config.touch(mode=0o600)
        self.config.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`. Raises Unavailable for any status but success."""
        return _content(self.request("GET", path))

    def find(self, path: str) -> dict[str, Any] | None:
        """The same, None where there is nothing (404)."""
        answer = self.request("GET", path)
        return None if answer.status_code == 404 else _content(answer)

    def post(self, path: str, body: object = None) -> dict[str, Any]:
        """The JSON object that answers a POST. Raises Unavailable for any status but success."""
        return _content(self.request("POST", path, body, timeout=600.0))


def _content(answer: httpx.Response) -> dict[str, Any]:
    if answer.is_error:
        raise Unavailable(f"{answer.request.url.path} answered {answer.status_code}: {answer.text[:300]}")
    return answer.json()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
