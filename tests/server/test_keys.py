"""Keys at real servers: made and revoked while they run, what they separate, and HTTPS."""

import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import httpx
import pytest
from sqlalchemy import create_engine, text
from typer.testing import CliRunner

from service.cli.root import app
from service.core import BadRequest, Unavailable, python_command
from service.server import Application, run_server
from service.settings import load_settings
from service.store.access.local_token import read_token
from tests.support.tiny_server import InProcessServer, in_process_server, write_pair

PROMPT = "the same long prompt of several blocks, " * 4


def made(server: InProcessServer, name: str, role: str = "client") -> dict[str, str]:
    """The header of a new key."""
    words = ["keys", "create", name, "--role", role, "--config", str(server.config)]
    return {"authorization": f"Bearer {CliRunner().invoke(app, words, catch_exceptions=False).stdout.strip()}"}


@contextmanager
def running(server: InProcessServer) -> Generator[None]:
    server.start()
    try:
        yield
    finally:
        server.stop()


def within(seconds: float, holds: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def listening(server: InProcessServer, headers: dict[str, str]) -> Generator[Thread]:
    """A thread that lives as long as a stream of GET /events does."""
    opened, left = Event(), Event()

    def listen() -> None:
        with (
            httpx.Client(base_url=server.url, timeout=60) as http,
            http.stream("GET", "/events", headers=headers) as answer,
        ):
            assert answer.status_code == 200
            for _ in answer.iter_lines():
                opened.set()
                if left.is_set():
                    return

    thread = Thread(target=listen, daemon=True)
    thread.start()
    assert opened.wait(10.0)
    try:
        yield thread
    finally:
        left.set()


def column(server: InProcessServer, query: str) -> list[object]:
    engine = create_engine(f"sqlite:///{server.folder / 'redraft.db'}")
    with engine.connect() as connection:
        found = list(connection.execute(text(query)).scalars())
    engine.dispose()
    return found


@pytest.mark.nightly
def test_keys_that_are_made_and_revoked_while_a_server_runs(tmp_path: Path) -> None:
    server = in_process_server(tmp_path, write_pair(tmp_path), engine={"num_lookup_tokens": 0, "prefix_cache_mb": 16})
    with running(server), httpx.Client(base_url=server.url, timeout=60) as http:

        def ask(headers: dict[str, str], **more: object) -> httpx.Response:
            return http.post("/generate", json={"prompt": PROMPT, "max_tokens": 4, **more}, headers=headers)

        assert ask({}).status_code == 200
        with listening(server, {}) as listener:
            operator = made(server, "me", "operator")
            within(2.0, lambda: ask({}).status_code == 401)
            within(3.0, lambda: not listener.is_alive())
        ada, bob = made(server, "ada"), made(server, "bob")
        within(2.0, lambda: http.get("/v1/models", headers=bob).status_code == 200)
        # What was cached without a key, or with another, is not used.
        found = [ask(who).json()["timings"]["cache_n"] > 0 for who in (ada, bob, ada, bob)]
        assert found == [False, False, True, True]
        ask(ada, prompt="a text of its own", client="user 7")
        within(10.0, lambda: set(column(server, "SELECT api_key FROM generations")) >= {None, "ada"})
        erased = http.request("DELETE", "/generations", json={"api_key": "ada"}, headers=operator)
        assert erased.status_code == 200 and erased.json()["generations"] >= 1
        assert "ada" not in column(server, "SELECT api_key FROM generations")
        CliRunner().invoke(
            app, ["keys", "revoke", "ada", "--yes", "--config", str(server.config)], catch_exceptions=False
        )
        within(2.0, lambda: ask(ada).status_code == 401)
        assert ask(bob).status_code == 200
        other = made(server, "other", "operator")
        within(2.0, lambda: http.get("/adapters", headers=other).status_code == 200)
        with listening(server, operator) as stays, listening(server, other) as ends:
            CliRunner().invoke(
                app, ["keys", "revoke", "other", "--yes", "--config", str(server.config)], catch_exceptions=False
            )
            within(3.0, lambda: not ends.is_alive())
            assert stays.is_alive()
        listed = (
            CliRunner().invoke(app, ["keys", "list", "--config", str(server.config)], catch_exceptions=False).stdout
        )
        assert "ada" in listed and "operator" in listed
    texts = "".join(path.read_text(errors="replace") for path in server.folder.iterdir() if path.is_file())
    for headers in (operator, ada, bob):
        assert headers["authorization"].removeprefix("Bearer ") not in texts


def test_keys_may_share_what_is_cached(tmp_path: Path) -> None:
    sections = {"engine": {"num_lookup_tokens": 0, "prefix_cache_mb": 16}, "server": {"share_across_keys": True}}
    server = in_process_server(tmp_path, write_pair(tmp_path), **sections)
    headers = [made(server, name) for name in ("ada", "bob")]
    with running(server), httpx.Client(base_url=server.url, timeout=60) as http:
        body = {"prompt": PROMPT, "max_tokens": 4}
        found = [http.post("/generate", json=body, headers=who).json()["timings"]["cache_n"] > 0 for who in headers]
    assert found == [False, True]


@pytest.mark.promise(27)
def test_an_address_that_others_reach_needs_a_key(tmp_path: Path) -> None:
    server = in_process_server(tmp_path, write_pair(tmp_path))
    flags = {"server.host": "0.0.0.0", "server.port": 0}
    with pytest.raises(BadRequest, match="redraft keys create"):
        Application(load_settings(server.config, flags), on_fatal=lambda reason: None)
    made(server, "ada")
    application = Application(load_settings(server.config, flags), on_fatal=lambda reason: None)
    application.stop()


def test_a_server_has_a_token_as_long_as_there_is_no_key(tmp_path: Path) -> None:
    server = in_process_server(tmp_path, write_pair(tmp_path))

    def token(**flags: object) -> str | None:
        settings = load_settings(server.config, {f"server.{name}": value for name, value in flags.items()})
        application = Application(settings, on_fatal=lambda reason: None)
        application.stop()
        return application.token

    assert token(api_key="a-key-of-the-settings") is None
    assert not (tmp_path / "home" / "token").exists()
    first = token()
    assert first is not None and first == token() == read_token(tmp_path / "home")
    made(server, "ada")
    assert token() is None


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_https(tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    server = in_process_server(tmp_path, pair)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2", "-nodes"]
    subprocess.run(
        ["openssl", "req", "-x509", *kind, "-keyout", str(key), "-out", str(cert), *names],
        check=True,
        capture_output=True,
    )
    secret = made(server, "me", "operator")["authorization"].removeprefix("Bearer ")
    words = ["serve", "--config", str(server.config), "--ssl-certfile", str(cert), "--ssl-keyfile", str(key)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("REDRAFT_")}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(python_command("-m", "service.cli", *words), stdout=log, stderr=log, env=env)
    try:
        trust = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=f"https://localhost:{server.port}", verify=trust, trust_env=False) as http:
            end = time.monotonic() + 60.0
            while time.monotonic() < end:
                assert process.poll() is None, (tmp_path / "log").read_text()
                try:
                    if http.get("/health/ready").status_code == 200:
                        break
                except httpx.HTTPError:
                    time.sleep(0.1)
            opened = http.post("/session", json={"key": secret})
            assert opened.status_code == 204 and "Secure" in opened.headers["set-cookie"]
            # The client sends the cookie back, as it is HTTPS.
            assert http.get("/adapters").status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://localhost:{server.port}/health", trust_env=False)
        assert "redraft serves at https://" in (tmp_path / "log").read_text()
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_a_wrong_certificate_is_said(tmp_path: Path) -> None:
    server = in_process_server(tmp_path, write_pair(tmp_path))
    flags = {"server.ssl_certfile": tmp_path / "none.pem", "server.ssl_keyfile": tmp_path / "none.pem"}
    with pytest.raises(Unavailable, match=r"none\.pem"):
        run_server(load_settings(server.config, flags), on_ready=lambda url, token, choose: None)
