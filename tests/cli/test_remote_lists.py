"""Lists of a server with --url: the same columns and JSON as of this machine's database, which is not opened."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from service.core import Disagreement, RunState
from tests.support.command_line import Redraft, cells, one_sentence
from tests.support.echo_engine import OWNED, TOKEN, EchoServer, make_run
from tests.support.store_rows import LOST


@pytest.fixture(scope="module")
def server() -> EchoServer:
    made = EchoServer()
    made.operator.known_runs += [make_run(number, RunState.REJECTED) for number in range(1, 131)]
    made.operator.known_runs[-1] = replace(made.operator.known_runs[-1], verdict=replace(LOST, gain=float("nan")))
    return made


@pytest.fixture(scope="module")
def url(server: EchoServer) -> Iterator[str]:
    with server.served() as address:
        yield address


@pytest.fixture(autouse=True)
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No database, and none is made."""
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("REDRAFT_API_KEY", TOKEN)
    yield
    assert not (tmp_path / "home").exists()


def plain(redraft: Redraft, *words: object) -> object:
    """The JSON of `--json -`."""
    done = redraft(*words, "--json", "-")
    assert (done.status, done.err) == (0, "")
    return json.loads(done.out)


def test_adapters_of_a_server_are_listed(server: EchoServer, url: str, redraft: Redraft) -> None:
    done = redraft("adapters", "list", "--url", url)
    assert (done.status, done.err) == (0, "")
    expected = [(str(ref.id), ref.state, ref.sha256[:12]) for ref in server.operator.known]
    assert [(row[0], row[1], row[6]) for row in cells(done.out)] == expected and "folder" not in done.out
    listed = httpx.get(f"{url}/adapters").json()["adapters"]
    assert plain(redraft, "adapters", "list", "--url", url) == {"adapters": listed}


def test_runs_of_a_server_are_listed_and_shown(url: str, redraft: Redraft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFT_URL", url)
    for words, expected in (
        (("--limit", 3), [130, 129, 128]),
        (("--limit", 2, "--before", 9), [8, 7]),
        (("--limit", 120), list(range(130, 10, -1))),
        (("--limit", 500), list(range(130, 0, -1))),
    ):
        done = redraft("runs", "list", *words)
        assert (done.status, done.err) == (0, "")
        assert [int(row[0]) for row in cells(done.out)] == expected
    rows = {row[0]: row[1] for row in cells(redraft("runs", "show", 130).out)}
    assert rows["state"] == "rejected" and rows["outcome"] == LOST.reason
    assert rows["predicted gain (90 % interval)"].startswith("? (")
    assert plain(redraft, "runs", "show", 7) == httpx.get(f"{url}/runs/7").json()
    unknown = redraft("runs", "show", 999)
    one_sentence(unknown)
    assert "999" in unknown.err


def test_cases_of_a_server_are_listed(server: EchoServer, url: str, redraft: Redraft) -> None:
    tokens, now = tuple(map(ord, "before\x1b")), datetime(2026, 1, 31, tzinfo=UTC)
    server.overview.cases = [
        Disagreement(
            f"g{i}", i, "sql", None, 3, tokens, ord("x"), ord("y"), float("nan"), 0.5, now, tie=i == 129, case=i + 1
        )
        for i in range(130)
    ]
    for words, expected in (((), range(129, 109, -1)), (("--limit", 999, "--offset", 2), range(127, -1, -1))):
        done = redraft("cases", "list", "--url", url, *words)
        assert (done.status, done.err) == (0, "")
        assert [int(row[3]) for row in cells(done.out)] == list(expected)
    newest = cells(redraft("cases", "list", "--url", url, "--limit", 1).out)
    assert newest == [["130", "g129", "sql", "129", '"before\\x1b"', '"x"', '"y"', "?", "0.500", "tie"]]
    found = plain(redraft, "cases", "list", "--url", url, "--limit", 2)
    asked = httpx.get(f"{url}/cases?order=newest&limit=2", headers=OWNED)
    assert found == asked.json()


def test_what_is_no_such_server_is_one_sentence(redraft: Redraft) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"adapters": [{"id": "one"}], "runs": 3, "cases": [1]}')

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{listening.server_port}"
        for words in (("adapters", "list"), ("runs", "list"), ("runs", "show", 1), ("cases", "list")):
            done = redraft(*words, "--url", address)
            one_sentence(done)
            assert f"what answers at {address} is not `redraft serve`" in done.err
        listening.shutdown()
    done = redraft("runs", "list", "--url", "http://127.0.0.1:1")
    one_sentence(done)
    assert "no server answers" in done.err
