from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection, text

from service.core import IllegalMove, StoreError
from service.store.database import Database, integrity, upgrade
from service.store.log.generations import Generations
from tests.support.databases import BY_NIGHT, SQLITE, Databases, run_sql
from tests.support.store_rows import generation, url_of

ROOT = Path(__file__).parents[2]


@BY_NIGHT
@pytest.mark.parametrize("deaths", [2, pytest.param(5, marks=pytest.mark.nightly)])
@pytest.mark.promise(12)
def test_every_acknowledged_row_survives_kill_9(
    url: str, databases: Databases, deaths: int, figure: Callable[[str], None]
) -> None:
    rng = random.Random(11)
    acknowledged: set[str] = set()
    for attempt in range(deaths):
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.support.write_until_killed", url, f"w{attempt}"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert child.stdout is not None
        acknowledged |= {child.stdout.readline().strip() for _ in range(rng.randint(3, 30))}
        time.sleep(rng.uniform(0.0, 0.01))  # anywhere within a write
        child.send_signal(signal.SIGKILL)
        # A line that the kill cut short acknowledges nothing.
        acknowledged |= {line.strip() for line in child.stdout if line.endswith("\n")}
        child.stdout.close()
        assert child.wait(60) == -signal.SIGKILL
        database = Database(url)
        assert integrity(database) == "ok"
        with database.read() as connection:
            stored = set(connection.execute(text("SELECT id FROM generations")).scalars())
            check = "PRAGMA foreign_key_check" if databases.kind == "sqlite" else "SELECT 1 WHERE false"
            orphans = connection.execute(text(check)).all()
            cases = connection.execute(text("SELECT count(*) FROM failure_cases")).scalar()
        database.close()
        assert acknowledged <= stored
        assert orphans == []
        assert cases == 2 * len(stored)
    assert len(acknowledged) >= 3 * deaths
    figure(f"{databases.kind}: {deaths} kills, {len(acknowledged)} acknowledged rows, all there")


@pytest.mark.promise(13)
def test_many_writers_and_readers_never_see_a_lock(database: Database) -> None:
    store = Generations(database)
    errors: list[Exception] = []
    done = threading.Event()

    def write() -> None:
        try:
            for _ in range(15):
                store.add([generation(), generation()]).result()
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    def read() -> None:
        try:
            while not done.is_set():
                stats = store.stats()
                assert stats.generations <= 240
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    writers = [threading.Thread(target=write, daemon=True) for _ in range(8)]
    readers = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for thread in (*writers, *readers):
        thread.start()
    try:
        for thread in writers:
            thread.join(60)
    finally:
        done.set()
    for thread in readers:
        thread.join(60)
    assert not any(thread.is_alive() for thread in (*writers, *readers))
    assert errors == []
    assert store.stats().generations == 240


HOLD = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
time.sleep(1.0)
connection.execute("COMMIT")
"""


@contextmanager
def holding_the_lock(path: Path) -> Generator[None]:
    """Another process that holds the write lock for a second."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield
        assert holder.wait(10) == 0


@SQLITE
def test_a_write_waits_for_another_process(database: Database, tmp_path: Path) -> None:
    with holding_the_lock(tmp_path / "redraft.db"):
        futures = [Generations(database).add([generation()]) for _ in range(3)]
        with database.read() as connection:  # readers do not wait
            assert connection.execute(text("SELECT count(*) FROM generations")).scalar() == 0
        assert not futures[0].done()
        assert [future.result(60) for future in futures] == [1, 1, 1]


@SQLITE
def test_opening_waits_for_another_process(url: str, tmp_path: Path) -> None:
    # A new database is not in WAL mode yet, and SQLite does not wait for the lock to change the mode.
    with holding_the_lock(tmp_path / "redraft.db"):
        database = Database(url)
        assert Generations(database).add([generation()]).result(60) == 1
        database.close()


@SQLITE
def test_a_lock_longer_than_one_timeout_is_waited_out(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.store.backends.sqlite.BUSY_SECONDS", 0.02)
    other = sqlite3.connect(tmp_path / "redraft.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.3, lambda: other.execute("COMMIT"))
    timer.start()
    assert Generations(database).add([generation()]).result(60) == 1
    timer.join()
    other.close()


def test_urgent_writes_go_first(database: Database) -> None:
    begun, go = threading.Event(), threading.Event()
    order: list[str] = []

    def block(connection: Connection) -> None:
        begun.set()
        go.wait(10)

    futures = [database.write(block)]
    assert begun.wait(10)
    futures += [database.write(lambda c, i=i: order.append(f"bulk {i}"), urgent=False) for i in range(3)]
    futures += [database.write(lambda c, i=i: order.append(f"urgent {i}")) for i in range(3)]
    go.set()
    for future in futures:
        future.result(60)
    assert order == ["urgent 0", "urgent 1", "urgent 2", "bulk 0", "bulk 1", "bulk 2"]


def test_a_failed_write_leaves_nothing_and_the_next_one_works(database: Database) -> None:
    def half(connection: Connection) -> None:
        connection.execute(text("INSERT INTO replay_domains VALUES ('half', '', 1)"))
        raise IllegalMove("no")

    with pytest.raises(IllegalMove):
        database.write(half).result()
    with pytest.raises(StoreError, match="absent"):
        database.write(lambda connection: connection.execute(text("DELETE FROM absent"))).result()
    with pytest.raises(ZeroDivisionError):
        database.write(lambda connection: 1 // 0).result()
    with database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM replay_domains")).scalar() == 0
    assert Generations(database).add([generation()]).result() == 1


def test_closing_writes_the_queue_then_refuses(url: str) -> None:
    database = Database(url)
    store = Generations(database)
    futures = [store.add([generation()]) for _ in range(30)]
    database.close()
    assert [future.result(0) for future in futures] == [1] * 30
    with pytest.raises(StoreError, match="closed"):
        store.add([generation()]).result(0)
    with pytest.raises(StoreError, match="closed"):
        store.stats()
    database.close()
    again = Database(url)
    assert Generations(again).stats().generations == 30
    again.close()


def test_a_reader_follows_the_writer_and_cannot_write(database: Database) -> None:
    store = Generations(database)
    reader = Database(database.url, read_only=True)
    seen = Generations(reader)
    for count in range(1, 6):
        store.add([generation()]).result()
        assert seen.stats().generations == count
    with pytest.raises(StoreError, match="reading only"):
        seen.add([generation()]).result(0)
    with pytest.raises(StoreError, match=r"read-?only"), reader.read() as connection:
        connection.execute(text("DELETE FROM generations"))
    assert store.stats().generations == 5
    reader.close()


def test_a_long_read_does_not_block_writes_and_sees_one_snapshot(database: Database) -> None:
    store = Generations(database)
    count = text("SELECT count(*) FROM generations")
    with database.read() as connection:
        assert connection.execute(count).scalar() == 0
        store.add([generation()]).result(5)
        assert connection.execute(count).scalar() == 0
    assert store.stats().generations == 1


@pytest.mark.parametrize("read_only", [False, True])
def test_a_wrong_revision_names_the_remedy(tmp_path: Path, databases: Databases, read_only: bool) -> None:
    url = databases.bare(tmp_path)
    upgrade(url)
    run_sql(url, "UPDATE alembic_version SET version_num = '0000'")
    with pytest.raises(StoreError, match="redraft db upgrade") as refused:
        Database(url, read_only=read_only)
    assert "0000" in str(refused.value)


def test_a_database_without_tables_names_the_remedy(tmp_path: Path, databases: Databases) -> None:
    with pytest.raises(StoreError, match="redraft db upgrade"):
        Database(databases.bare(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_database_is_a_store_error(tmp_path: Path) -> None:
    path = tmp_path / "text.db"
    path.write_text("this is no database, and it is long enough to be looked at" * 100)
    with pytest.raises(StoreError):
        Database(url_of(path))
    with pytest.raises(StoreError):
        upgrade(url_of(path))
    with pytest.raises(StoreError, match="file"):
        Database("sqlite://")


def test_a_name_with_odd_characters_is_a_file_like_any_other(tmp_path: Path) -> None:
    url = url_of(tmp_path / "a b%20#c?e=f" / "ü%d.db")
    upgrade(url)
    database = Database(url)
    assert Generations(database).add([generation()]).result() == 1
    assert integrity(database) == "ok"
    database.close()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.db")] == ["a b%20#c?e=f/ü%d.db"]


@SQLITE
def test_a_full_disk_is_an_error_of_that_write_alone(database: Database) -> None:
    store = Generations(database)
    store.add([generation(id="before")]).result()

    def fill(connection: Connection) -> None:
        # SQLite's limit on the file size raises the same error as a full disk.
        connection.execute(text("PRAGMA max_page_count = 1"))
        for _ in range(200):
            connection.execute(text("INSERT INTO replay_domains VALUES (hex(randomblob(60)), '', 1)"))

    def widen(connection: Connection) -> None:
        connection.execute(text("PRAGMA max_page_count = 1000000"))

    with pytest.raises(StoreError, match="full"):
        database.write(fill).result()
    database.write(widen).result()
    assert store.add([generation()]).result() == 1
    with database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM replay_domains")).scalar() == 0
    assert [g.id for g in store.by_ids(["before"])] == ["before"]
    assert integrity(database) == "ok"


def test_a_write_cancelled_before_its_turn_is_not_made(database: Database) -> None:
    begun, go = threading.Event(), threading.Event()

    def block(connection: Connection) -> None:
        begun.set()
        go.wait(10)

    first = database.write(block)
    assert begun.wait(10)
    dropped = Generations(database).add([generation()])
    pending = Generations(database).add([generation()])
    assert dropped.cancel()
    go.set()
    first.result(60)
    assert pending.result(60) == 1
    assert Generations(database).stats().generations == 1
