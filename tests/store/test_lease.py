from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from service.core import DatabaseTaken
from service.store.database import Database
from service.store.lease import LEASE_SECONDS, Lease, Owner

HERE = Owner.here()


class FakeClock:
    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def ended_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_second_owner_is_refused_with_the_first_ones_name(database: Database) -> None:
    parent = replace(HERE, pid=os.getppid())
    first, second = Lease(database, parent), Lease(database)
    first.acquire()
    with pytest.raises(DatabaseTaken, match=f"process {parent.pid} on host {HERE.host}"):
        second.acquire()
    assert first.renew() and not second.renew()
    second.release()  # not its own
    with pytest.raises(DatabaseTaken):
        second.acquire()
    first.release()
    second.acquire()
    assert second.renew() and not first.renew()


def test_a_dead_process_of_this_machine_holds_nothing(database: Database) -> None:
    Lease(database, replace(HERE, pid=ended_process())).acquire()
    Lease(database, replace(HERE, pid=os.getppid())).acquire()
    with pytest.raises(DatabaseTaken):
        Lease(database).acquire()


def test_a_reused_process_id_does_not_hold_the_lease(database: Database) -> None:
    Lease(database).acquire()
    Lease(database).acquire()


def test_another_machine_is_given_up_after_a_while(database: Database) -> None:
    time = FakeClock()
    # A process id of another machine means nothing here, even if the host names are equal.
    far = Lease(database, replace(HERE, machine="elsewhere", pid=ended_process()), time)
    near = Lease(database, now=time)
    far.acquire()
    time.pass_by(LEASE_SECONDS - 1)
    assert far.renew()
    time.pass_by(LEASE_SECONDS - 1)
    with pytest.raises(DatabaseTaken):
        near.acquire()
    time.pass_by(2)
    near.acquire()
    assert not far.renew(), "it has to learn that it was given up"
    far.release()
    assert near.renew()
