"""Which adapters learnt a text, and what erasing it does to them."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from service.core import (
    BARE_DRAFT,
    AdapterRef,
    AdapterState,
    Erased,
    IllegalMove,
    Provenance,
    RunState,
    Selection,
    StoreError,
    Trigger,
)
from service.store.backends import sqlite
from service.store.database import Database
from service.store.log.generations import Generations
from service.store.log.run_texts import Role
from service.store.processes.erasures import Erasures
from service.store.registry.adapters import Adapters
from service.store.registry.lineage import Lineage
from service.store.registry.runs import Runs
from tests.support.databases import SQLITE
from tests.support.store_rows import ADAPTERS, HELD_OUT_TEXT, LOST, START, WHO, case, generation, promote


class House:
    """The stores of one database, and runs that learn from named texts."""

    def __init__(self, database: Database) -> None:
        self.log, self.runs, self.adapters = Generations(database), Runs(database), Adapters(database, ADAPTERS)
        self.lineage = Lineage(database)

    def add(self, *names: str, client: str = "ada", who: Provenance = WHO, new: bool = False) -> None:
        """new: a run is claimed for them."""
        cases = [case(1)] if new else []
        self.log.add([generation(id=name, client=client, who=who, cases=cases) for name in names]).result()

    def learn(self, *new: str, window: tuple[str, ...] = (), replay: tuple[str, ...] = ()) -> AdapterRef:
        """A run that learns from these, on top of what serves, and is promoted."""
        self.add(*new, new=True)
        active = self.adapters.active(WHO.target, WHO.draft)
        run = self.runs.claim(trigger=Trigger.CASES, who=WHO, parent=active.id if active else BARE_DRAFT, limit=99)
        assert run is not None and run.generations == len(new)
        self.runs.record_texts(run.id, run.fencing, Role.WINDOW, window)
        self.runs.record_texts(run.id, run.fencing, Role.REPLAY, replay)
        return promote(self.runs, self.adapters, run)

    def marks(self) -> dict[int, int | None]:
        return {ref.id: ref.erased_texts for ref in self.adapters.all()}

    def states(self) -> dict[int, AdapterState]:
        return {ref.id: ref.state for ref in self.adapters.all()}


@pytest.fixture
def house(database: Database) -> House:
    return House(database)


def of(*names: str) -> Selection:
    return Selection(ids=frozenset(names))


def test_an_adapter_learnt_what_its_run_and_its_ancestors_runs_had_in_any_role(house: House) -> None:
    house.add("old", "older")
    first = house.learn("a")
    second = house.learn("b", window=("a", "old"))
    house.adapters.roll_back(second.id, first.id, LOST)
    third = house.learn("c", replay=("older",))
    find = house.lineage.adapters
    assert find(of("a")) == {first.id: 1, second.id: 1, third.id: 1}, "an ancestor learnt it"
    assert find(of("b")) == {second.id: 1}, "its sister was not trained on top of it"
    assert find(of("old")) == {second.id: 1}
    assert find(of("older")) == {third.id: 1}
    assert find(of("a", "old")) == {first.id: 1, second.id: 2, third.id: 1}, "each text counts once for an adapter"
    assert find(of("unknown")) == {}
    assert find(Selection(client="ada")) == {first.id: 1, second.id: 3, third.id: 3}
    assert find(Selection(client="ada", domain="elsewhere")) == {}
    assert find(Selection(everything=True)) == find(Selection(domain="code"))


def test_what_was_released_was_learnt_all_the_same(house: House, database: Database) -> None:
    from service.store.log.quarantine import Quarantine

    bad = house.learn("a")
    house.adapters.roll_back(bad.id, BARE_DRAFT, LOST)
    assert Quarantine(database).release() == 1
    assert house.lineage.adapters(of("a")) == {bad.id: 1}


def test_marks_add_up_and_are_handed_down(house: House) -> None:
    house.add("old", client="bob")
    first = house.learn("a", "b")
    second = house.learn("c", window=("a", "old"))
    assert house.marks() == {first.id: None, second.id: None}
    assert house.lineage.erase(Selection(client="bob")) == Erased(1, (second.id,), ())
    assert house.marks() == {first.id: None, second.id: 1}
    assert house.lineage.erase(of("a")) == Erased(1, (first.id, second.id), ())
    assert house.marks() == {first.id: 1, second.id: 2}
    assert house.lineage.erase(of("a", "unknown")) == Erased(0, (), ())
    third = house.learn("d")
    assert house.marks() == {first.id: 1, second.id: 2, third.id: 2}, "trained on top of one that learnt two"
    assert house.states()[third.id] is AdapterState.ACTIVE, "marked, not retired"


def test_a_moment_is_compared_whatever_its_time_zone(house: House) -> None:
    """SQLite forgets time zones."""
    house.log.add([generation(id=f"g{i}", created=START + timedelta(hours=i)) for i in range(4)]).result()
    east = timezone(timedelta(hours=9))
    assert house.lineage.erase(Selection(before=(START + timedelta(hours=2)).astimezone(east))).generations == 2
    assert [one.id for one in house.log.by_ids(["g0", "g1", "g2", "g3"])] == ["g3", "g2"]
    assert house.lineage.erase(Selection(before=datetime.now(UTC), client="nobody")).generations == 0
    assert house.lineage.erase(Selection(before=datetime.now(UTC), client="ada")).generations == 2


def test_retired_adapters_give_way_to_their_nearest_ancestor_that_learnt_none_of_it(house: House) -> None:
    first = house.learn("a")
    second = house.learn("b")
    third = house.learn("c", replay=("b",))
    erased = house.lineage.erase(of("b"), retire_adapters=True)
    assert erased == Erased(1, (second.id, third.id), (second.id, third.id))
    revoked = AdapterState.REVOKED
    assert house.states() == {first.id: AdapterState.ACTIVE, second.id: revoked, third.id: revoked}
    for ref in (second, third):
        with pytest.raises(IllegalMove, match="revoked"):
            house.adapters.activate(ref.id, WHO.target, WHO.draft)
    fourth = house.learn("d")
    assert house.adapters.roll_back(fourth.id, third.id, LOST), "back to what is left of its ancestors"
    assert house.states()[first.id] is AdapterState.ACTIVE
    assert house.states()[second.id] is house.states()[third.id] is revoked


def test_the_parent_serves_where_only_the_adapter_that_served_learnt_the_text(house: House) -> None:
    first = house.learn("a")
    second = house.learn("b")
    assert house.lineage.erase(of("b"), retire_adapters=True) == Erased(1, (second.id,), (second.id,))
    assert house.states() == {first.id: AdapterState.ACTIVE, second.id: AdapterState.REVOKED}


def test_an_adapter_that_was_rolled_back_is_revoked_too(house: House) -> None:
    first = house.learn("a")
    second = house.learn("b")
    house.adapters.roll_back(second.id, first.id, LOST)
    assert house.lineage.erase(of("b"), retire_adapters=True) == Erased(1, (second.id,), (second.id,))
    assert house.states() == {first.id: AdapterState.ACTIVE, second.id: AdapterState.REVOKED}
    with pytest.raises(IllegalMove, match="revoked"):
        house.adapters.activate(second.id, WHO.target, WHO.draft)


def test_where_no_ancestor_is_left_the_bare_draft_serves(house: House) -> None:
    first = house.learn("a")
    second = house.learn("b")
    assert house.lineage.erase(of("a")).revoked == ()
    assert house.states() == {first.id: AdapterState.RETIRED, second.id: AdapterState.ACTIVE}
    assert house.lineage.erase(of("a"), retire_adapters=True) == Erased(0, (), (first.id, second.id)), "marked earlier"
    assert house.adapters.active(WHO.target, WHO.draft) is None
    assert house.lineage.erase(of("a"), retire_adapters=True).revoked == ()


def test_what_never_served_stays_what_it_is(house: House) -> None:
    house.add("a", new=True)
    run = house.runs.claim(trigger=Trigger.CASES, who=WHO, parent=BARE_DRAFT, limit=9)
    assert run is not None
    ref = house.adapters.add(
        run_id=run.id,
        fencing=run.fencing,
        folder=ADAPTERS / "lost",
        sha256="",
        rank=1,
        scale=1.0,
        keys=[],
        draft=WHO.draft,
        parent=BARE_DRAFT,
    )
    for state in (RunState.TRAINING, RunState.SCORING):
        house.runs.move(run.id, run.fencing, state)
    house.runs.reject(run.id, run.fencing, ref.id, LOST)
    assert house.lineage.erase(of("a"), retire_adapters=True) == Erased(1, (ref.id,), ())
    assert house.states() == {ref.id: AdapterState.REJECTED}
    assert house.marks() == {ref.id: 1}


def test_runs_and_held_out_texts_are_found(house: House) -> None:
    house.log.add([generation(id="measured", first_user=HELD_OUT_TEXT)]).result()
    first = house.learn("a")
    second = house.learn("b", window=("a",))
    assert house.lineage.runs(of("a", "unknown")) == {first.run, second.run}
    assert house.lineage.runs(of("measured")) == set()
    assert house.lineage.held_out(of("a", "measured"))
    assert not house.lineage.held_out(of("a", "b"))


def test_other_processes_read_what_is_to_be_erased_as_it_was_said(database: Database) -> None:
    asked = [
        of("a", "b"),
        Selection(api_key="ada"),
        Selection(client="bob"),
        Selection(domain="code"),
        Selection(before=START),
        Selection(ids=frozenset({"a"}), api_key="ada", client="bob", domain="code", before=START),
        Selection(everything=True),
    ]
    erasures = Erasures(database)
    numbers = [erasures.ask(each) for each in asked]
    assert erasures.asked() == list(zip(numbers, asked, strict=True))
    for number in numbers:
        erasures.end(number)
    assert erasures.asked() == []


@SQLITE
def test_bytes_that_cannot_leave_the_log_are_said_and_go_with_the_next_erasure(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.1)
    database = Database(url)
    house = House(database)
    house.log.add([generation(id="a", client="canary-7f3a")]).result()
    reader = sqlite3.connect(tmp_path / "redraft.db", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM generations").fetchone()
    try:
        with pytest.raises(StoreError, match="write-ahead log"):
            house.lineage.erase(of("a"))
    finally:
        reader.close()
    assert house.log.stats().generations == 0

    def on_disk() -> bytes:
        return b"".join(path.read_bytes() for path in tmp_path.glob("redraft.db*"))

    assert b"canary-7f3a" in on_disk()
    house.lineage.erase(of("a"))
    assert b"canary-7f3a" not in on_disk()
    database.close()


@pytest.mark.parametrize(("before", "gone"), [("0001-01-01T00:00:00+09:00", 0), ("9999-12-31T23:59:59-09:00", 1)])
def test_a_moment_beyond_the_years_that_have_numbers_is_before_or_after_all(
    house: House, before: str, gone: int
) -> None:
    house.log.add([generation()]).result()
    assert house.lineage.erase(Selection(before=datetime.fromisoformat(before))).generations == gone
