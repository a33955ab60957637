"""Look-ups in earlier answers: they survive a restart, belong to a key, and hold nothing that is not stored or was erased."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from sqlalchemy import update
from typer.testing import CliRunner

from service.app import logged_outputs
from service.cli import app
from service.core import Selection
from service.engine.drafters.lookup import NGramIndex
from service.server import Application
from service.store.tables import generations
from tests.support.scraped import scraped
from tests.support.tiny_server import InProcessServer, generate, in_process_server, write_pair
from tests.support.waiting import until

ENGINE = {"adaptive": True, "prefix_cache_mb": 0}
SAMPLED = {"temperature": 1.0, "max_tokens": 60, "chat_template": False}


@contextmanager
def running(server: InProcessServer) -> Generator[InProcessServer]:
    server.start()
    try:
        yield server
    finally:
        assert server.stop() == 0


def application(server: InProcessServer) -> Application:
    found = server._application
    assert found is not None
    return found


def found(server: InProcessServer, answer: list[int], salt: str = "") -> bool:
    """Whether a look-up proposes how this answer went on."""
    engine = application(server).engine_thread._engine
    assert engine is not None and engine.decoder.lookup is not None
    proposal = engine.decoder.lookup.find(answer[:12], NGramIndex(), salt)
    assert proposal is None or proposal.tokens == answer[12:27]
    return proposal is not None


def recorded(server: InProcessServer) -> int:
    return application(server).stores.generations.stats().generations


def test_a_server_that_starts_again_finds_what_it_answered_before(tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    with running(in_process_server(tmp_path, pair, engine=ENGINE)) as first:
        answers = [generate(first, f"question {i}", seed=i, **SAMPLED)["tokens"] for i in range(4)]
        unstored = generate(first, "a secret", seed=9, store=False, **SAMPLED)["tokens"]
        assert min(map(len, (*answers, unstored))) > 27
        assert all(found(first, answer) for answer in answers) and not found(first, unstored)
        until(lambda: recorded(first) == 4)
    with running(in_process_server(tmp_path, pair, engine=ENGINE)) as second:
        assert all(found(second, answer) for answer in answers) and not found(second, unstored)
        # They are used, and verified: the answer is the same.
        assert generate(second, "question 1", seed=1, **SAMPLED)["tokens"] == answers[1]
        used = scraped(second.request("GET", "/metrics").text)['redraft:source_num_draft_tokens_total{source="lookup"}']
        assert used > 20
        second.request("DELETE", "/generations", {"everything": True})
        assert not any(found(second, answer) for answer in answers)
    with running(in_process_server(tmp_path, pair, engine=ENGINE)) as third:
        assert not any(found(third, answer) for answer in answers)


def test_what_is_read_from_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair, store = write_pair(tmp_path), {"max_days": 7.0}
    with running(in_process_server(tmp_path, pair, engine=ENGINE, store=store)) as server:
        answer = generate(server, "a question", seed=1, **SAMPLED)["tokens"]
        until(lambda: recorded(server) == 1)
        here = application(server)
        assert here._serving is not None
        who = here._serving.provenance

        def read() -> list[tuple[str, list[int]]]:
            return [(salt, list(tokens)) for salt, tokens in logged_outputs(here.stores, here.settings, who, 10_000)]

        def change(**values: object) -> None:
            here.stores.database.write(
                lambda connection: connection.execute(update(generations).values(values))
            ).result()

        assert read() == [("", answer)]
        # A process that starts meanwhile may have forgotten them before it reads, and they are still there.
        number = here.stores.erasures.ask(Selection(ids=frozenset({"of another process"})))
        assert read() == []
        here.stores.erasures.end(number)
        change(api_key="ada")
        assert read() == [("ada", answer)]
        change(api_key="api-key")
        assert read() == [], "of whoever had the settings' key"
        change(api_key=None, created_at=datetime.now(UTC) - timedelta(days=8))
        assert read() == [], "not purged yet"
        change(created_at=datetime.now(UTC), output=b"no tokens")
    with running(in_process_server(tmp_path, pair, engine=ENGINE, store=store)) as again:
        assert generate(again, "a question", seed=1, **SAMPLED)["tokens"] == answer
    assert "look-ups find no answers of the log" in caplog.text


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_each_key_has_its_own_after_a_restart_too(tmp_path: Path, shared: bool) -> None:
    pair = write_pair(tmp_path)
    server = in_process_server(tmp_path, pair, engine=ENGINE, server={"share_across_keys": shared})
    keys: dict[str, dict[str, str]] = {}
    for name in ("ada", "bob"):
        done = CliRunner().invoke(app, ["keys", "create", name, "--config", str(server.config)], catch_exceptions=False)
        keys[name] = {"authorization": f"Bearer {done.stdout.split()[-1]}"}
    answers: dict[str, list[int]] = {}

    def check(server: InProcessServer) -> None:
        for name, answer in answers.items():
            salts = [salt for salt in ("", "ada", "bob") if found(server, answer, salt)]
            assert salts == ([""] if shared else [name])

    with running(server), httpx.Client(base_url=server.url, timeout=60) as http:
        for i, (name, headers) in enumerate(keys.items()):
            body = {"prompt": "a question", "seed": i, "return_tokens": True, **SAMPLED}
            answers[name] = http.post("/generate", json=body, headers=headers).json()["tokens"]
        check(server)
        until(lambda: recorded(server) == 2)
    again = in_process_server(tmp_path, pair, engine=ENGINE, server={"share_across_keys": shared})
    with running(again):
        check(again)
