"""Real server processes: one per database, and training that pauses for requests between two ticks."""

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from typer.testing import CliRunner

from service import learning_loop
from service.cli.root import app
from service.core import BARE_DRAFT, DatabaseTaken, RunState, Trigger, Unavailable
from service.evaluation.server_process import LocalServer
from service.models.pair import load_pair
from service.settings import load_settings
from service.store.processes.members import HostProcess, Members
from service.store.stores import open_stores
from service.trainer import run_trainer
from tests.support.databases import run_sql
from tests.support.scraped import scraped
from tests.support.store_rows import generation
from tests.support.tiny_server import generate, in_process_server, prompts, tiny_server, write_pair
from tests.support.waiting import until

LONG = {"epochs": 500, "tick_seconds": 600.0}


def asked(url: str, question: str) -> object:
    engine = create_engine(url)
    with engine.connect() as connection:
        found = connection.execute(text(question)).scalar()
    engine.dispose()
    return found


def train(server: LocalServer) -> dict[str, Any]:
    """Force a run once the recorded generations are written."""
    end = time.monotonic() + 30.0
    while True:
        try:
            return server.post("/train")
        except Unavailable:
            assert time.monotonic() < end
            time.sleep(0.1)


def test_a_server_is_refused_until_the_database_is_free(tmp_path: Path) -> None:
    """The database is this test's parent process's."""
    pair = write_pair(tmp_path)
    server = in_process_server(tmp_path, pair)
    who = load_pair(*pair).provenance
    stores = open_stores(load_settings(server.config), create=True)
    stores.generations.add([generation(who=who)]).result(60)
    other = replace(HostProcess.here(), pid=os.getppid())
    members = Members(stores.database, process=other)
    members.join()
    run = stores.runs.claim(trigger=Trigger.MANUAL, who=who, parent=BARE_DRAFT, limit=1, owner=members.token)
    assert run is not None
    try:
        with pytest.raises(DatabaseTaken, match=f"process {other.pid} on host .* already serves from this database"):
            server.start()
        server.stop()
        assert stores.runs.get(run.id).state is RunState.CLAIMED, "its run goes on"
        # Commands work while a server runs, including those that write.
        stats = CliRunner().invoke(app, ["cases", "stats", "--config", str(server.config)])
        assert stats.exit_code == 0 and "requests recorded" in stats.output
        assert stores.quarantine.release() == 0 and stores.adapters.all() == []
        members.leave()
        server.start()
        try:
            assert generate(server, "hello")["tokens"]
            assert server.get(f"/train/{run.id}")["state"] == "lost"
        finally:
            assert server.stop() == 0
        # A stopped server frees the database for the next one.
        Members(stores.database, process=HostProcess("elsewhere", "elsewhere", 1)).join()
    finally:
        stores.close()


def test_an_upgrade_by_a_newer_version_ends_recording_and_not_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(learning_loop, "RENEW_SECONDS", 0.1)
    server = in_process_server(tmp_path, write_pair(tmp_path))
    server.start()
    try:
        assert generate(server, "recorded")["tokens"]
        url = f"sqlite:///{server.folder / 'redraft.db'}"
        until(lambda: asked(url, "SELECT count(*) FROM generations") == 1)
        of_texts = tmp_path / "home" / "targets" / "model" / "text.npz"
        of_texts.parent.mkdir(parents=True, exist_ok=True)
        of_texts.touch()
        run_sql(url, "UPDATE alembic_version SET version_num = '9999'")
        until(lambda: "Nothing is recorded or trained any more" in caplog.text)
        until(lambda: not of_texts.exists())
        assert generate(server, "served all the same")["tokens"]
        dropped = "redraft:recorder_dropped_total"
        until(lambda: scraped(server.request("GET", "/metrics").text)[dropped] == 1)
        assert server.request("POST", "/train").status_code == 409
    finally:
        assert server.stop() == 0
    assert asked(url, "SELECT count(*) FROM generations") == 1
    assert caplog.text.count("Nothing is recorded") == 1


def test_a_trainer_that_a_newer_version_has_overtaken_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So that who supervises it starts it again, with the newer version."""
    monkeypatch.setattr(learning_loop, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(os, "umask", lambda mask: mask)
    server = in_process_server(tmp_path, write_pair(tmp_path))
    settings, url = load_settings(server.config), f"sqlite:///{server.folder / 'redraft.db'}"
    # Only if it does not end by itself.
    give_up = threading.Timer(10, os.kill, (os.getpid(), signal.SIGTERM))
    give_up.start()
    try:
        status = run_trainer(settings, lambda: run_sql(url, "UPDATE alembic_version SET version_num = '9999'"))
    finally:
        give_up.cancel()
    assert status == 1
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.CRITICAL]
    assert re.fullmatch(
        r"the database was upgraded to revision 9999, this version requires \d+: restart with the new version: ending",
        said,
    )


def test_a_trainer_that_fails_once_it_is_ready_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "umask", lambda mask: mask)
    settings = load_settings(in_process_server(tmp_path, write_pair(tmp_path)).config)

    def on_ready() -> None:
        raise OSError("nobody reads what it says")

    before = set(threading.enumerate())
    with pytest.raises(OSError, match="nobody reads"):
        run_trainer(settings, on_ready)
    until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.nightly
@pytest.mark.parametrize("make", [in_process_server, tiny_server])
def test_a_second_server_on_the_same_database_is_refused(
    tmp_path: Path, make: Callable[[Path, tuple[Path, Path]], LocalServer]
) -> None:
    pair = write_pair(tmp_path)
    first = tiny_server(tmp_path, pair, training={"epochs": 500})
    second = make(tmp_path / "second", pair)
    text = second.config.read_text().replace(str(second.folder / "redraft.db"), str(first.folder / "redraft.db"))
    second.config.write_text(text)

    first.start()
    try:
        for line in prompts(20):
            generate(first, line.prompt)
        run = train(first)
        assert first._process is not None
        pid = first._process.pid
        refused = f"process {pid} on host .* already serves from this database"
        with pytest.raises((DatabaseTaken, Unavailable), match=refused):
            second.start()
        now = first.get(f"/train/{run['id']}")
        assert now["state"] in {"claimed", "training"} and now["error"] is None, "its run goes on"
        # Commands work while a server runs, including those that write.
        stats = CliRunner().invoke(app, ["cases", "stats", "--config", str(first.config)])
        assert stats.exit_code == 0 and "requests recorded" in stats.output
        stores = open_stores(load_settings(first.config))
        assert stores.quarantine.release() == 0 and stores.adapters.all() == []
        stores.close()

        os.kill(pid, signal.SIGKILL)
        first.stop()
        second.start()
        assert generate(second, "hello")["tokens"]
        assert second.get(f"/train/{run['id']}")["state"] == "lost"
        assert second.stop() == 0
        # A stopped server frees the database for the next one.
        stores = open_stores(load_settings(first.config))
        Members(stores.database, process=HostProcess("elsewhere", "elsewhere", 1)).join()
        stores.close()
    finally:
        first.stop()
        second.stop()


@pytest.mark.nightly
@pytest.mark.promise(19)
def test_requests_that_wait_pause_training_between_two_ticks(tmp_path: Path) -> None:
    server = tiny_server(tmp_path, write_pair(tmp_path), training=LONG, engine={"max_rows": 1})
    server.start()
    try:
        for line in prompts(10):
            generate(server, line.prompt)
        train(server)
        log = tmp_path / "home" / "training.log"
        with ThreadPoolExecutor(4) as clients:
            answers = [clients.submit(generate, server, "abc " * i, max_tokens=200) for i in range(1, 5)]
            until(lambda: " paused" in log.read_text())
            assert all(answer.result(120)["tokens"] for answer in answers)
        until(lambda: log.read_text().rstrip().endswith("resumed"))
    finally:
        server.stop()
