"""Processes that share a database: who is a member, who leads, and that nobody else writes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from sqlalchemy import Connection, select

from service.core import DatabaseTaken, IllegalMove, Outdated, Progress, RunState, StoreError, Trigger
from service.store.backends import postgres
from service.store.database import REVISION, Database
from service.store.log.generations import Generations
from service.store.processes.members import LEASE_SECONDS, RENEW_SECONDS, HostProcess, Members, Role
from service.store.registry.runs import Runs
from service.store.tables import members
from service.store.times import time_of
from tests.support.databases import BOTH, POSTGRES, SQLITE, run_sql
from tests.support.store_rows import WHO, generation

HERE = HostProcess.here()
ELSEWHERE = HostProcess("elsewhere", "another machine", 1)


class Clock:
    """The database's time and what has passed since."""

    def __init__(self) -> None:
        self.passed = timedelta()

    def __call__(self, connection: Connection) -> datetime:
        return time_of(connection) + self.passed


def ended_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def joined(
    database: Database, process: HostProcess = HERE, role: Role = Role.SERVER, *, trains: bool = True
) -> Members:
    found = Members(database, role, process)
    found.join()
    found.register_pair(WHO, trains=trains)
    return found


def tokens(database: Database) -> set[str]:
    with database.read() as connection:
        return set(connection.execute(select(members.c.token)).scalars())


@SQLITE
def test_a_second_server_is_refused_with_the_first_ones_name(database: Database) -> None:
    parent = replace(HERE, pid=os.getppid())
    first, second = Members(database, process=parent), Members(database)
    first.join()
    with pytest.raises(DatabaseTaken, match=f"process {parent.pid} on host {HERE.host}"):
        second.join()
    assert first.renew() and tokens(database) == {first.token}
    first.leave()
    second.join()
    assert second.renew() and not first.renew()


@SQLITE
def test_a_dead_process_of_this_machine_holds_nothing(database: Database) -> None:
    Members(database, process=replace(HERE, pid=ended_process())).join()
    Members(database, process=replace(HERE, pid=os.getppid())).join()
    with pytest.raises(DatabaseTaken):
        Members(database).join()


@SQLITE
def test_a_reused_process_id_does_not_hold_the_database(database: Database) -> None:
    Members(database).join()
    Members(database).join()


@BOTH
def test_a_machine_that_falls_silent_is_given_up(database: Database) -> None:
    # A process id of another machine means nothing here, even if the host names are equal.
    far = Members(database, Role.COMMAND, replace(HERE, machine="elsewhere", pid=ended_process()))
    far.join()
    clock = Clock()
    near = Members(database, Role.COMMAND, time=clock)
    clock.passed = timedelta(seconds=LEASE_SECONDS - 1)
    with pytest.raises(DatabaseTaken):
        near.join()
    clock.passed = timedelta(seconds=LEASE_SECONDS + 1)
    near.join()
    assert not far.renew(), "it has to learn that it was given up"
    far.leave()
    assert near.renew()


def test_a_write_that_is_stopped_ends_no_lease() -> None:
    """Renewals wait for it: found where a process was stopped inside a write, and 60 s were allowed."""
    assert RENEW_SECONDS + postgres.IDLE_SECONDS < LEASE_SECONDS


@POSTGRES
def test_several_join_and_a_trainer_leads_then_the_longest_there_that_trains(database: Database) -> None:
    idle = joined(database, ELSEWHERE, trains=False)
    assert idle.leads() and not idle.has_trainer()
    first, second = (joined(database, replace(ELSEWHERE, pid=pid)) for pid in (2, 3))
    assert [each.leads() for each in (idle, first, second)] == [False, True, False] and idle.has_trainer()
    trainer = joined(database, replace(ELSEWHERE, pid=4), Role.TRAINER)
    other = Members(database, Role.TRAINER, replace(ELSEWHERE, pid=5))
    other.join()
    other.register_pair(replace(WHO, draft="other"), trains=True)
    assert [each.leads() for each in (idle, first, second, trainer, other)] == [False, False, False, True, True]
    trainer.leave()
    assert first.leads() and not second.leads()
    with pytest.raises(DatabaseTaken):
        Members(database, Role.COMMAND, replace(ELSEWHERE, pid=6)).join()


@POSTGRES
def test_who_was_given_up_writes_nothing_until_it_has_joined_again(database: Database) -> None:
    late = joined(database, ELSEWHERE)
    store, runs = Generations(database), Runs(database)
    store.add([generation()]).result()
    run = runs.claim(trigger=Trigger.CASES, who=WHO, parent=0, limit=9, owner=late.token)
    assert run is not None and run.owner == late.token and runs.orphaned() == []
    other = Database(database.url)
    clock = Clock()
    clock.passed = timedelta(seconds=LEASE_SECONDS + 1)
    watching = Members(other, process=replace(ELSEWHERE, pid=2), time=clock)
    watching.join()
    assert tokens(database) == {watching.token}
    assert [each.id for each in runs.orphaned()] == [run.id]
    for write in (
        lambda: store.add([generation()]).result(),
        lambda: runs.progress(run.id, run.fencing, Progress(1, 2)),
        lambda: runs.move(run.id, run.fencing, RunState.TRAINING),
    ):
        with pytest.raises(StoreError, match="missed its lease"):
            write()
    assert not late.renew()
    late.join()
    assert store.add([generation()]).result() == 1
    with pytest.raises(IllegalMove, match="given up"):
        runs.move(run.id, run.fencing, RunState.TRAINING)
    ended = Runs(other).give_up(run, "gone")
    assert ended is not None and ended.state is RunState.LOST
    assert Runs(other).give_up(run, "gone") is None
    other.close()


@BOTH
def test_a_run_that_waits_is_taken_once(database: Database) -> None:
    mine = joined(database)
    Generations(database).add([generation()]).result()
    runs = Runs(database)
    run = runs.claim(trigger=Trigger.MANUAL, who=WHO, parent=0, limit=9)
    assert run is not None and run.owner is None and runs.orphaned() == [], "nobody was to do it yet"
    taken = runs.take(run.id, mine.token)
    assert taken is not None and (taken.owner, taken.fencing) == (mine.token, run.fencing + 1)
    assert runs.take(run.id, "another") is None
    with pytest.raises(IllegalMove, match="stale"):
        runs.move(run.id, run.fencing, RunState.TRAINING)
    assert runs.move(run.id, taken.fencing, RunState.TRAINING).state is RunState.TRAINING


@BOTH
def test_after_an_upgrade_by_a_newer_version_nothing_is_written(database: Database) -> None:
    mine = joined(database)
    run_sql(database.url, "UPDATE alembic_version SET version_num = '9999'")
    for write in (lambda: Generations(database).add([generation()]).result(), mine.renew, mine.leave):
        with pytest.raises(Outdated, match="revision 9999"):
            write()
    assert Generations(database).stats().generations == 0, "what is there can still be read"
    run_sql(database.url, f"UPDATE alembic_version SET version_num = '{REVISION}'")
    assert mine.renew()


@POSTGRES
def test_a_lease_is_renewed_while_a_write_takes_long(database: Database) -> None:
    """Its own or another's, as an erasure of a large log is."""
    mine, other = Members(database), Database(database.url)
    mine.join()
    under_way, may_end = threading.Event(), threading.Event()

    def takes_long(connection: object) -> None:
        under_way.set()
        assert may_end.wait(60)

    for writer in (database, other):
        under_way.clear()
        may_end.clear()
        written = writer.write(takes_long)
        assert under_way.wait(60)
        begun = time.monotonic()
        assert mine.renew()
        assert time.monotonic() - begun < 5 and not written.done()
        may_end.set()
        written.result(60)
    other.close()
