"""Commands and the token of a server without keys: who gets it, and where `serve` shows it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from service.cli.operate import call
from service.store.access.local_token import make_token, read_token
from tests.support.terminal import CTRL_C, at_a_terminal
from tests.support.tiny_server import tiny_server, write_pair

LINK = re.compile(r"the page, with recorded texts: (http://127\.0\.0\.1:\d+)/#token=(rd-[\w-]{43})")


@contextmanager
def listener(host: str) -> Generator[tuple[int, list[str | None]]]:
    """A port at which something answers, and the Authorization headers that it gets."""
    got: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            got.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer((host, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, got
        server.shutdown()


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("REDRAFT_API_KEY", raising=False)
    return make_token(tmp_path)


def test_the_token_is_for_servers_on_this_machine(tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with listener("0.0.0.0") as (port, got):
        for host in ("127.0.0.1", "localhost", "127.0.0.2"):
            call(f"http://{host}:{port}/", "GET", "/cases", home=tmp_path)
        assert got == [f"Bearer {token}"] * 3
        got.clear()
        # Another address than a loopback one, and a command that names no home folder.
        call(f"http://0.0.0.0:{port}", "GET", "/cases", home=tmp_path)
        call(f"http://127.0.0.1:{port}", "GET", "/cases")
        assert got == [None, None]
        got.clear()
        monkeypatch.setenv("REDRAFT_API_KEY", "rd-a-key-of-the-environment")
        call(f"http://127.0.0.1:{port}", "GET", "/cases", home=tmp_path)
        assert got == ["Bearer rd-a-key-of-the-environment"]


def test_no_proxy_sees_it(tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with listener("127.0.0.1") as (port, got), listener("127.0.0.1") as (proxy, seen):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        call(f"http://127.0.0.1:{port}", "GET", "/cases", home=tmp_path)
        assert (got, seen) == ([f"Bearer {token}"], [])
        call("http://server.example", "GET", "/cases", home=tmp_path)
        assert seen == [None], "other servers are reached as the environment says"


@pytest.mark.nightly
def test_serve_shows_the_link_at_a_terminal_alone(tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    server = tiny_server(tmp_path, pair)
    arguments = ["-m", "service.cli", "serve", "--config", str(server.config)]
    status, shown = at_a_terminal(arguments, {}, prompt="#token=", keys=CTRL_C)
    token = read_token(tmp_path / "home")
    found = LINK.search(shown.replace("\r", ""))
    assert found is not None and found.groups() == (server.url, token), shown
    assert status == 0, shown
    # Its output goes into a file here.
    server.start()
    try:
        assert f"redraft serves at {server.url}" in server.log.read_text()
        assert httpx.get(f"{server.url}/cases").status_code == 403
        owned = {"authorization": f"Bearer {token}"}
        assert httpx.get(f"{server.url}/cases", headers=owned).status_code == 200, "the same after a new start"
        server.request("POST", "/session", {"key": token})
        # The server has the database, so the command asks it to erase.
        command = [
            sys.executable,
            "-m",
            "service.cli",
            "data",
            "erase",
            "--everything",
            "--yes",
            "--config",
            str(server.config),
        ]
        done = subprocess.run([*command, "--url", server.url], capture_output=True, text=True, timeout=120, check=True)
        assert done.stdout == "0 generations deleted\n"
    finally:
        server.stop()
    assert token is not None and token not in server.log.read_text() and token not in done.stderr
    # With a key there is no link.
    command = [sys.executable, "-m", "service.cli", "keys", "create", "me", "--config", str(server.config)]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    status, shown = at_a_terminal(arguments, {}, prompt="redraft serves at", keys=CTRL_C)
    assert status == 0 and "#token" not in shown, shown
