"""The page in a real Chromium, driven by Playwright from an environment of its own (browser.py): one test for each check."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from service.core import (
    Access,
    AdapterRecord,
    AdapterState,
    DepthCounts,
    Disagreement,
    History,
    Judgement,
    Progress,
    RunState,
    TrafficPoint,
    Verdict,
)
from service.store.access.key_ring import KeyRing
from service.store.access.keys import Keys
from service.store.access.local_token import make_token
from service.store.database import Database, upgrade
from tests.support.browser import CHROMIUM, PAGE, SECONDS, make_environment
from tests.support.echo_engine import EchoEngine, EchoServer, make_run
from tests.support.store_rows import url_of
from tests.support.tiny_server import generate, in_process_server, prompts, register_adapters, write_pair

SCRIPT = PAGE / "browser.py"
CHECKS = re.findall(r"^@check\ndef (\w+)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">\u202egnp.exe\u0007"
"""As in browser.py, which no test can import: it runs without this project."""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt install chromium)"),
]


def hostile_server(ring: KeyRing) -> EchoServer:
    """Answers with its prompt, a token each 10 ms; its rows hold hostile texts, and figures for every chart."""
    server = EchoServer(engine=EchoEngine(pause=0.01), keeper=ring)
    now = datetime.now(UTC)
    points = [
        TrafficPoint(now - timedelta(minutes=60 - i), i // 20, 20, 300 + i, 200, 400, 200 + 3 * i) for i in range(60)
    ]
    lost = Verdict(False, HOSTILE, 40, 900, -0.1, -0.2, 0.01, {HOSTILE: (-0.1, -0.2, 0.0)})
    won = replace(lost, promoted=True, gain=0.2, low90=0.1, high90=0.3)
    server.overview.known = History(
        now - timedelta(hours=24),
        now,
        tuple(points),
        tuple(DepthCounts(i, (90, 80, 70), (60 + i, 40, 20)) for i in (2, 1, 0)),
        (
            AdapterRecord(3, 2, 9, AdapterState.REJECTED, now, Judgement(now, lost), None),
            AdapterRecord(2, 1, 8, AdapterState.ACTIVE, now, Judgement(now - timedelta(minutes=20), won), None),
            AdapterRecord(1, 0, 7, AdapterState.ROLLED_BACK, now, Judgement(now, won), Judgement(now, lost)),
        ),
    )
    text = tuple(map(ord, HOSTILE))
    server.overview.cases = [Disagreement("g", 3, HOSTILE, HOSTILE, 2, text, 0x202E, ord("\n"), 0.01, 0.97, now)]
    run = make_run(9, RunState.FAILED, Progress(3, 12, 0.5, 1.0, 900.0, 2.0))
    server.overview.run = replace(run, error=HOSTILE, finished_at=now)
    return server


@contextmanager
def keyless(folder: Path) -> Generator[tuple[str, str]]:
    """The address of a server with hostile texts that has no key, and its token."""
    url = url_of(folder / "none.db")
    upgrade(url)
    database = Database(url)
    ring, token = KeyRing(Keys(database)), make_token(folder)
    ring.accept_token(token)
    with hostile_server(ring).served() as address:
        yield address, token
    database.close()


@contextmanager
def locked(folder: Path) -> Generator[tuple[str, str]]:
    """The address of a server that asks for a key, and an operator's."""
    url = url_of(folder / "keys.db")
    upgrade(url)
    database = Database(url)
    keys = Keys(database)
    key = keys.create("me", Access.OPERATOR)
    with EchoServer(keeper=KeyRing(keys)).served() as address:
        yield address, key
    database.close()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each check came to: "" where it passed."""
    folder = tmp_path_factory.mktemp("page")
    python = make_environment(folder / "environment")
    pair = write_pair(folder)
    real = in_process_server(folder, pair)
    register_adapters(real, pair, 2)
    real.start()
    try:
        for line in prompts(5):
            generate(real, line.prompt)
        with keyless(folder) as (echo, token), locked(folder) as (closed, key):
            tokens = [real.owned["authorization"].removeprefix("Bearer "), token]
            script = [str(python), str(SCRIPT), str(CHROMIUM), real.url, echo, closed, key, *tokens]
            done = subprocess.run(script, capture_output=True, text=True, timeout=SECONDS, check=False)
    finally:
        real.stop()
    print(done.stdout, done.stderr, sep="\n")
    failed = dict(re.findall(r"^failed (\w+): (.*)", done.stdout, re.MULTILINE))
    passed = dict.fromkeys(re.findall(r"^ok (\w+)", done.stdout, re.MULTILINE), "")
    return passed | failed


@pytest.mark.parametrize("name", CHECKS)
def test_page(results: dict[str, str], name: str) -> None:
    assert results.get(name, "it was not reached") == ""
