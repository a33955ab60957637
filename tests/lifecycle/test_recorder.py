"""The recorder neither delays nor breaks decoding, whatever happens to the database."""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from service.core import Selection, Unavailable
from service.lifecycle.recorder import Recorder
from service.store.database import Database
from service.store.log.generations import Generations
from service.store.registry.lineage import Lineage
from tests.support.databases import BOTH, Databases, run_sql
from tests.support.lifecycle_server import generation

pytestmark = BOTH


class RecordedLog:
    """A recorder on a real database, and a second connection that can lock it or make writes fail."""

    def __init__(self, url: str, **changes: float) -> None:
        self.url, self.sqlite = url, url.startswith("sqlite")
        self.database = Database(url)
        self.generations = Generations(self.database)
        self.reported: list[int] = []
        self.recorder = Recorder(self.generations, on_drop=self.reported.append, **changes)  # pyright: ignore[reportArgumentType]

    @contextmanager
    def locked(self) -> Generator[None]:
        engine = create_engine(self.url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with engine.connect() as other:
            for statement in ("BEGIN EXCLUSIVE",) if self.sqlite else ("BEGIN", "LOCK TABLE generations"):
                other.execute(text(statement))
            try:
                yield
            finally:
                other.execute(text("ROLLBACK"))

    @contextmanager
    def broken(self) -> Generator[None]:
        """Every write fails at once."""
        if self.sqlite:
            make = "CREATE TRIGGER no BEFORE INSERT ON generations BEGIN SELECT RAISE(ABORT, 'disk full'); END"
            undo = "DROP TRIGGER no"
        else:
            make, undo = (
                "ALTER TABLE generations ADD CONSTRAINT no CHECK (false)",
                "ALTER TABLE generations DROP CONSTRAINT no",
            )
        run_sql(self.url, make)
        try:
            yield
        finally:
            run_sql(self.url, undo)

    def record(self, count: int, prefix: str = "g") -> float:
        """The longest time that one call took."""
        longest = 0.0
        for i in range(count):
            made = generation(f"{prefix}{i}")
            began = time.perf_counter()
            self.recorder.record(made)
            longest = max(longest, time.perf_counter() - began)
        return longest

    @property
    def stored(self) -> int:
        return self.generations.stats().generations


@pytest.fixture
def make_log(tmp_path: Path, databases: Databases) -> Iterator[Callable[..., RecordedLog]]:
    made: list[RecordedLog] = []

    def make(**changes: float) -> RecordedLog:
        made.append(RecordedLog(databases.empty(tmp_path), **changes))
        return made[-1]

    yield make
    for log in made:
        log.recorder.close(5)
        log.database.close()


def test_recorded_generations_are_stored(make_log: Callable[..., RecordedLog]) -> None:
    log = make_log()
    log.record(100)
    assert log.recorder.flush(10)
    assert log.stored == 100
    assert log.recorder.dropped == 0


@pytest.mark.promise(30)
def test_a_request_with_store_false_is_never_written(make_log: Callable[..., RecordedLog]) -> None:
    log = make_log()
    log.recorder.record(generation("secret", store=False))
    log.recorder.record(generation("open"))
    assert log.recorder.flush(10)
    assert [row.id for row in log.generations.by_ids(["secret", "open"])] == ["open"]
    assert log.recorder.dropped == 0, "not stored, not lost"


def test_a_request_with_store_false_is_not_buffered(make_log: Callable[..., RecordedLog]) -> None:
    """The database is closed, so that a buffered generation would be counted as dropped. The store would refuse it too."""
    log = make_log(backoff_seconds=0.005)
    log.database.close()
    log.recorder.record(generation("secret", store=False))
    assert log.recorder.flush(10)
    assert log.recorder.dropped == 0


@pytest.mark.promise(14)
def test_a_locked_database_delays_no_request_and_drops_only_the_overflow(
    make_log: Callable[..., RecordedLog],
) -> None:
    log = make_log(capacity=50)
    with log.locked():
        assert log.record(300) < 0.5
        assert not log.recorder.flush(0.5)
        assert log.recorder.dropped == sum(log.reported) > 0
    assert log.recorder.flush(10)
    assert log.stored + log.recorder.dropped == 300
    assert log.generations.by_ids(["g299"]), "the oldest go first"
    log.record(10, "later")
    assert log.recorder.flush(10)
    assert log.stored + log.recorder.dropped == 310


@pytest.mark.promise(14)
def test_a_database_that_refuses_everything_costs_counted_losses_and_recovers(
    make_log: Callable[..., RecordedLog],
) -> None:
    log = make_log(backoff_seconds=0.005)
    with log.broken():
        assert log.record(40) < 0.5
        assert log.recorder.flush(10)
        assert log.recorder.dropped == sum(log.reported) == 40
    log.record(5, "later")
    assert log.recorder.flush(10)
    assert (log.stored, log.recorder.dropped) == (5, 40)


@pytest.mark.promise(14)
def test_a_short_failure_loses_nothing(make_log: Callable[..., RecordedLog]) -> None:
    log = make_log(backoff_seconds=0.1)
    with log.broken():
        log.record(10)
        time.sleep(0.15)
    assert log.recorder.flush(10)
    assert (log.stored, log.recorder.dropped) == (10, 0)


@pytest.mark.promise(14)
def test_a_database_that_is_gone_is_survived(make_log: Callable[..., RecordedLog]) -> None:
    log = make_log(backoff_seconds=0.005)
    log.database.close()
    assert log.record(40) < 0.5
    assert log.recorder.flush(10)
    assert log.recorder.dropped == 40


def test_closing_writes_the_buffer_and_refuses_new_generations(make_log: Callable[..., RecordedLog]) -> None:
    log = make_log()
    log.record(200)
    assert log.recorder.close(10)
    assert log.stored == 200
    log.record(1, "late")
    assert log.recorder.dropped == 1
    assert log.recorder.close(10)
    assert log.stored == 200


def test_closing_has_a_time_limit(make_log: Callable[..., RecordedLog]) -> None:
    log = make_log()
    with log.locked():
        log.record(100)
        time.sleep(0.1)
        began = time.monotonic()
        assert not log.recorder.close(0.3)
        assert time.monotonic() - began < 2
    # The batch in progress is written once the lock is released; the rest was counted as dropped.
    assert log.recorder.flush(10)
    assert log.stored + log.recorder.dropped == 100


def test_what_is_forgotten_before_it_is_written_does_not_come_back(make_log: Callable[..., RecordedLog]) -> None:
    log = make_log()
    selection = Selection(ids=frozenset(f"g{i}" for i in range(0, 100, 3)))

    def erase() -> int:
        log.recorder.forget(selection)
        return Lineage(log.database).erase(selection).generations

    with ThreadPoolExecutor(1) as eraser:
        with log.locked():
            # What is recorded queues behind it, and whatever is urgent would go before that.
            log.database.write(lambda connection: None)
            time.sleep(0.1)
            log.record(100)
            while not log.recorder._in_flight:
                time.sleep(0.01)
            erased = eraser.submit(erase)
            time.sleep(0.3)
            assert not erased.done(), "the first batch was under way"
        # Of the first batch a third was written; the others were still in the buffer.
        assert 0 < erased.result(30) < 34
    assert log.recorder.flush(10)
    assert log.recorder.dropped == 0
    assert {one.id for one in log.generations.by_ids([f"g{i}" for i in range(100)])} == {
        f"g{i}" for i in range(100) if i % 3
    }


def test_forgetting_waits_for_a_batch_only_so_long(make_log: Callable[..., RecordedLog]) -> None:
    log = make_log()
    with log.locked():
        log.record(40)
        time.sleep(0.1)
        with pytest.raises(Unavailable, match="busy"):
            log.recorder.forget(Selection(client="nobody"), timeout=0.2)
    assert log.recorder.flush(10)
    log.recorder.forget(Selection(everything=True), timeout=0.0)
    assert log.stored == 40, "the rows are not its own to delete"


def test_many_threads_may_record(make_log: Callable[..., RecordedLog]) -> None:
    log = make_log(capacity=2000)
    threads = [threading.Thread(target=log.record, args=(100, f"t{n}-"), daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert log.recorder.flush(20)
    assert log.stored == 800
