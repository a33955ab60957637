"""A server in a child process, for measurements."""

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

from service.core import BadRequest, Unavailable, python_command
from service.settings import EngineSettings, sqlite_url

DATABASE = "redraft.db"
START_SECONDS = 600.0
"""How long a server may take to become ready. A process that ends earlier is noticed at once."""


class ServerProcess:
    """A child process that answers HTTP on a free port of this machine.

    command: port -> command line. ready: path that answers 200 once it serves. Its output goes to server.log in `folder`.
    """

    def __init__(self, folder: Path, command: Callable[[int], Sequence[str]], ready: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / "server.log"
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = command(self.port)
        self._ready = ready
        self._process: subprocess.Popen[bytes] | None = None
        # One client for all calls: making one takes longer than most calls.
        self._client: httpx.Client | None = None

    def start(self) -> None:
        """Start the process and wait until it is ready. Raises Unavailable with the end of its log when that takes more than
        START_SECONDS or the process ends."""
        # No proxy: the server is on this machine.
        self._client = client = httpx.Client(base_url=self.url, trust_env=False, timeout=60.0)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                # REDRAFT_* variables would override its configuration file; the BLAS is not a setting.
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
        """Send SIGTERM, wait (SIGKILL after a minute), and return the exit status; None when it was never started."""
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
        """One call; any status is returned. Raises Unavailable when the process does not answer."""
        assert self._client is not None, "not started"
        try:
            return self._client.request(method, path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise Unavailable(f"the server does not answer ({error!r}); the end of its log: {self.tail()}") from error

    def tail(self, lines: int = 5) -> str:
        """The last lines of its log, in one line."""
        return " | ".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


class LocalServer(ServerProcess):
    """`redraft serve` with its database, adapters and log in `folder`.

    settings: section -> name -> value. home: where models and caches are. url: a database elsewhere.
    """

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
        url = url or sqlite_url(folder / DATABASE)
        tree.setdefault("store", {}).update(url=url, adapters=str(folder / "adapters"))
        # The URL may hold a password.
        self.config.touch(mode=0o600)
        self.config.write_text(_toml(home, tree), encoding="utf-8")

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`. Raises Unavailable for any status but success."""
        return _content(self.request("GET", path))

    def find(self, path: str) -> dict[str, Any] | None:
        """The JSON object at `path`; None for status 404. Raises Unavailable for any other status but success."""
        answer = self.request("GET", path)
        return None if answer.status_code == 404 else _content(answer)

    def post(self, path: str, body: object = None) -> dict[str, Any]:
        """The JSON object that answers a POST. Raises Unavailable for any status but success."""
        return _content(self.request("POST", path, body, timeout=600.0))


def engine_settings(engine: EngineSettings) -> dict[str, object]:
    """The engine's settings for a measurement: the user's own prefix cache is neither read nor filled."""
    return engine.model_dump(exclude={"prefix_cache_dir"})


def require_unused(folder: Path) -> None:
    """Raises BadRequest where a server has left its database already: runs and adapters of before would pass for new ones."""
    if (folder / DATABASE).exists():
        raise BadRequest(f"{folder} has a database already: name a new folder", field="keep")


def _toml(home: Path, tree: Mapping[str, Mapping[str, object]]) -> str:
    lines = [f"home = {json.dumps(str(home))}"]
    for section, values in tree.items():
        # TOML cannot write None; a setting that is left out is None.
        given = {name: value for name, value in values.items() if value is not None}
        lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in given.items())]
    return "\n".join(lines) + "\n"


def _content(answer: httpx.Response) -> dict[str, Any]:
    if answer.is_error:
        raise Unavailable(f"{answer.request.url.path} answered {answer.status_code}: {answer.text[:300]}")
    return answer.json()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
