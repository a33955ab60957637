"""What only PostgreSQL has: other writers, connections that break, and a server that goes and comes back."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import pytest
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool

from service.core import RunState, StoreError, TrainingRun, Trigger
from service.store.backends import postgres
from service.store.database import Database, revision, size_bytes, upgrade
from service.store.log.generations import Generations
from service.store.registry.runs import Runs
from tests.support.databases import POSTGRES, PostgresDatabases, run_sql
from tests.support.postgres import GUARDED, Wire
from tests.support.store_rows import WHO, generation

pytestmark = POSTGRES
COUNTER = "INSERT INTO replay_domains (domain, kind, seen) VALUES ('counter', '', 0)"
COMMIT = b"COMMIT\0"  # the statement alone, not BEGIN ISOLATION LEVEL READ COMMITTED
READ = text("SELECT seen FROM replay_domains WHERE domain = 'counter'")


def add(connection: Connection) -> int:
    """Write what was read, as most writes do."""
    seen = connection.execute(READ).scalar_one()
    connection.execute(text("UPDATE replay_domains SET seen = :seen WHERE domain = 'counter'"), {"seen": seen + 1})
    return seen + 1


def counted(database: Database) -> int:
    with database.read() as connection:
        return connection.execute(READ).scalar_one()


@pytest.fixture
def wire(databases: PostgresDatabases) -> Iterator[Wire]:
    made = Wire(databases.server.port)
    yield made
    made.close()


@pytest.fixture
def far(url: str, databases: PostgresDatabases, wire: Wire) -> Iterator[Database]:
    """The database over a line that can break."""
    run_sql(url, COUNTER)
    opened = Database(databases.server.tcp_url(url, port=wire.port))
    yield opened
    opened.close()


def test_writers_that_meet_leave_what_they_would_have_left_one_after_the_other(url: str) -> None:
    run_sql(url, COUNTER)
    several = [Database(url) for _ in range(4)]
    futures: list[Future[int]] = [database.write(add) for _ in range(25) for database in several]
    assert sorted(future.result(60) for future in futures) == list(range(1, 101))
    assert counted(several[0]) == 100
    for database in several:
        database.close()


@pytest.mark.promise(13)
def test_recorders_do_not_wait_for_each_other_and_everybody_else_does(url: str) -> None:
    run_sql(url, COUNTER)
    several = [Database(url) for _ in range(3)]
    started, go = threading.Event(), threading.Event()

    def slow(connection: Connection) -> None:
        started.set()
        assert go.wait(20)

    first = several[0].write(slow, shared=True)
    assert started.wait(10)
    assert Generations(several[1]).add([generation()]).result(10) == 1
    alone = several[1].write(add)
    time.sleep(0.3)
    assert not alone.done()
    # Those that come later wait behind it, or it would never have its turn.
    later = Generations(several[2]).add([generation()])
    time.sleep(0.3)
    assert not later.done()
    go.set()
    first.result(20)
    assert alone.result(20) == 1 and later.result(20) == 1
    for database in several:
        database.close()


def test_a_lock_that_is_held_for_long_fails_the_write(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr(postgres, "RETRY_SECONDS", 0.3)
    run_sql(url, COUNTER)
    database = Database(url)
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as other:
        other.execute(text(f"SELECT pg_advisory_xact_lock({postgres.WRITING})"))
        with pytest.raises(StoreError, match="lock timeout"):
            database.write(add).result(20)
        assert counted(database) == 0, "reading does not wait"
    assert database.write(add).result(20) == 1
    database.close()


def test_whoever_says_nothing_loses_the_lock(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host may be gone, and the server would not know for hours."""
    monkeypatch.setattr(postgres, "IDLE_SECONDS", 0.3)
    run_sql(url, COUNTER)
    several = [Database(url) for _ in range(2)]
    started, go, tries = threading.Event(), threading.Event(), list[int]()

    def stuck(connection: Connection) -> int:
        tries.append(add(connection))
        started.set()
        assert go.wait(20)
        return add(connection)

    first = several[0].write(stuck)
    assert started.wait(10)
    assert several[1].write(add).result(20) == 1
    go.set()
    assert first.result(20) == 3, "it runs again on what the other left"
    assert tries == [1, 2]
    for database in several:
        database.close()


def test_a_deadlock_is_run_again(url: str) -> None:
    run_sql(url, COUNTER, COUNTER.replace("'counter'", "'other'"))
    several = [Database(url) for _ in range(2)]
    met = threading.Barrier(2)  # both have one row, and want the other

    def crossing(names: Sequence[str]) -> Callable[[Connection], None]:
        tries = list[int]()

        def work(connection: Connection) -> None:
            for name in names:
                connection.execute(text("SELECT 1 FROM replay_domains WHERE domain = :d FOR UPDATE"), {"d": name})
                if not tries:
                    tries.append(1)
                    met.wait(10)

        return work

    names = ("counter", "other")
    futures = [
        database.write(crossing(order), shared=True)
        for database, order in zip(several, (names, names[::-1]), strict=True)
    ]
    for future in futures:
        future.result(60)
    for database in several:
        database.close()


def test_whoever_claims_second_gets_no_run(url: str) -> None:
    """The other's row is committed while this transaction waits for it: the index refuses what was free when it was read."""
    database = Database(url)
    Generations(database).add([generation(), generation()]).result()
    columns = (
        "state, trigger, fencing, target, tokenizer, draft, parent, cases, generations, config, progress, loss_curve"
    )
    row = f"'claimed', 'cases', 1, '{WHO.target}', '{WHO.tokenizer}', '{WHO.draft}', 0, 1, 1, '{{}}', '{{}}', '[]'"
    engine = create_engine(url, poolclass=NullPool)
    claimed: list[TrainingRun | None] = []

    def claim() -> None:
        claimed.append(Runs(database).claim(trigger=Trigger.CASES, who=WHO, parent=0, limit=9))

    with engine.begin() as other:
        other.execute(text(f"INSERT INTO training_runs ({columns}, created_at) VALUES ({row}, now())"))
        thread = threading.Thread(target=claim)
        thread.start()
        waits = text(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        end = time.monotonic() + 20
        while other.execute(waits).scalar() == 0:
            assert time.monotonic() < end
            # Within a transaction the view does not change.
            other.execute(text("SELECT pg_stat_clear_snapshot()"))
            time.sleep(0.01)
    thread.join(20)
    assert claimed == [None]
    assert [run.state for run in Runs(database).latest(9)] == [RunState.CLAIMED]
    database.close()


@pytest.mark.parametrize("delivered", [True, False])
def test_a_write_whose_commit_was_not_answered_is_made_once(far: Database, wire: Wire, delivered: bool) -> None:
    wire.break_at(COMMIT, delivered=delivered)
    assert far.write(add).result(60) == 1
    assert wire.breaks == 1
    assert counted(far) == 1
    assert far.write(add).result(60) == 2


def test_a_write_is_made_again_when_the_connection_broke_before_its_commit(far: Database, wire: Wire) -> None:
    wire.break_at(b"UPDATE replay_domains", delivered=True)
    assert far.write(add).result(60) == 1
    assert wire.breaks == 1 and counted(far) == 1


def test_where_nobody_says_what_became_of_a_commit_the_write_fails(
    far: Database, wire: Wire, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "RETRY_SECONDS", 0.2)
    assert far.write(add).result(60) == 1
    wire.break_at(COMMIT, delivered=True)
    wire.close()
    with pytest.raises(StoreError, match="cannot tell whether the write was committed"):
        far.write(add).result(60)
    near = Database(url)
    assert counted(near) == 2, "it was not made twice"
    near.close()


def test_a_server_that_restarts_is_survived(url: str, databases: PostgresDatabases) -> None:
    database = Database(url)
    store = Generations(database)
    store.add([generation()]).result()
    for _ in range(2):
        with databases.server.away():
            with pytest.raises(StoreError, match="reading the database failed"):
                store.stats()
            waiting = store.add([generation()])
            time.sleep(0.3)
            assert not waiting.done(), "it is tried for a while"
        assert waiting.result(60) == 1
    assert store.stats().generations == 3
    database.close()


def test_a_server_that_stays_away_fails_writes_until_it_is_back(
    url: str, databases: PostgresDatabases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "RETRY_SECONDS", 0.2)
    database = Database(url)
    store = Generations(database)
    store.add([generation()]).result()
    with databases.server.away():
        for _ in range(2):
            with pytest.raises(StoreError, match="writing to the database failed"):
                store.add([generation()]).result(60)
        for use in (revision, upgrade, Database):
            with pytest.raises(StoreError, match="failed"):
                use(url)
    assert store.add([generation()]).result(60) == 1
    assert store.stats().generations == 2
    database.close()


def test_nothing_is_prepared_on_the_server(url: str) -> None:
    database = Database(url)
    prepared = text("SELECT count(*) FROM pg_prepared_statements")
    with database.read() as connection:
        assert [connection.execute(prepared).scalar() for _ in range(10)] == [0] * 10
    database.close()


def test_a_read_only_database_cannot_write(url: str) -> None:
    """The child's: whatever it runs, the transaction refuses."""
    reader = Database(url, read_only=True)
    with reader.read() as connection:
        assert connection.execute(text("SHOW transaction_read_only")).scalar() == "on"
        assert connection.execute(text("SHOW transaction_isolation")).scalar() == "repeatable read"
    reader.close()


def test_moments_are_utc_whatever_the_session_s_zone(url: str) -> None:
    made = generation()
    database = Database(f"{url}&options=-c%20timezone%3DAsia/Tokyo")
    Generations(database).add([made]).result()
    (stored,) = Generations(database).by_ids([made.id])
    assert stored.created_at == made.created_at
    assert stored.created_at.utcoffset() == made.created_at.utcoffset()
    database.close()


def test_another_encoding_is_refused(databases: PostgresDatabases) -> None:
    url = databases.server.create("ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'")
    with pytest.raises(StoreError, match="LATIN1"):
        upgrade(url)
    assert revision(url) is None
    databases.server.drop(url)


def test_a_password_is_in_no_error(url: str, databases: PostgresDatabases, caplog: pytest.LogCaptureFixture) -> None:
    server = databases.server
    server.execute(f"CREATE ROLE {GUARDED} SUPERUSER LOGIN PASSWORD 'right-s3cr-t'")
    guarded = server.tcp_url(url, user=f"{GUARDED}:%s")
    refused = [
        (guarded % "wrong-s3cr-t", "password authentication failed"),
        (guarded.replace(f":{server.port}/", ":1/") % "right-s3cr-t", "refused"),
        (guarded % "right-s3cr-t" + "_none", "does not exist"),
    ]
    for bad, message in refused:
        for use in (revision, upgrade, Database):
            with pytest.raises(StoreError, match=message) as caught:
                use(bad)
            assert "s3cr-t" not in "".join(traceback.format_exception(caught.value))
    assert revision(guarded % "right-s3cr-t") is not None
    assert "s3cr-t" not in caplog.text
    server.execute(f"DROP ROLE {GUARDED}")


def test_its_size_is_known(url: str) -> None:
    database = Database(url)
    assert size_bytes(database) > 1_000_000
    database.close()
