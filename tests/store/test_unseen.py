from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, event

from service.core import BARE_DRAFT, Generation, Round, RunState, Sampling, Source, Trigger
from service.store.adapters import Adapters
from service.store.database import Database
from service.store.generations import Generations
from service.store.runs import Runs
from service.store.unseen import Unseen, untried
from tests.support.databases import SQLITE
from tests.support.store_rows import HELD_OUT_TEXT, WHO, WON, case, generation, promote, targets

GREEDY, SEEDED, UNSEEDED = Sampling(), Sampling(temperature=1.0, seed=3), Sampling(temperature=1.0)
_numbers = itertools.count()
PLAIN = tuple(Round(0, at, 0, 0, 1) for at in range(10))


def undrafted(sampling: Sampling = GREEDY, rounds: tuple[Round, ...] = PLAIN, **changes: Any) -> Generation:
    """A generation of ten tokens decoded without a draft."""
    output = (*range(9), 100 + next(_numbers))
    plain: dict[str, Any] = {"cases": [], "collected": targets(10), "output": output, **changes}
    made = generation(**plain)
    return replace(made, prompt=replace(made.prompt, sampling=sampling), rounds=rounds)


def drafted(tokens: int, source: Source = Source.DRAFT) -> tuple[Round, ...]:
    """Rounds in which this many of the ten tokens were proposed for."""
    return (Round(0, 0, 3, tokens - 1, tokens, source), *(Round(0, at, 0, 0, 1) for at in range(tokens, 10)))


@pytest.fixture
def log(database: Database) -> Generations:
    return Generations(database)


@pytest.fixture
def unseen(database: Database) -> Unseen:
    return Unseen(database)


@pytest.mark.parametrize(
    ("made", "counts"),
    [
        (undrafted(), True),
        (undrafted(SEEDED), True),
        (undrafted(UNSEEDED), False),
        (undrafted(collected=None), False),
        (undrafted(output=()), False),
        (undrafted(rounds=drafted(4)), True),
        (undrafted(rounds=drafted(5)), False),
        (undrafted(rounds=drafted(9, Source.LOOKUP)), True),
        (undrafted(first_user=HELD_OUT_TEXT), False),
        (undrafted(who=replace(WHO, draft="other")), False),
        (undrafted(who=replace(WHO, target="other")), False),
        (undrafted(who=replace(WHO, tokenizer="other")), False),
    ],
)
def test_undrafted_generations_wait_for_backfill(
    made: Generation, counts: bool, log: Generations, unseen: Unseen
) -> None:
    log.add([made]).result()
    assert unseen.names(WHO, 10) == [made.id] * counts
    assert unseen.tokens(WHO) == 10 * counts


def test_a_draft_that_was_tried_at_half_of_the_tokens_left_its_cases() -> None:
    assert [untried(undrafted(rounds=drafted(n))) for n in range(1, 10)] == [True] * 4 + [False] * 5


def test_the_newest_come_first(log: Generations, unseen: Unseen) -> None:
    made = [undrafted() for _ in range(5)]
    log.add(made).result()
    log.add([made[0]]).result()  # known already
    assert unseen.names(WHO, 3) == [made[4].id, made[3].id, made[2].id]
    assert unseen.tokens(WHO) == 50


def test_supplied_cases_join_those_that_were_logged(log: Generations, unseen: Unseen) -> None:
    own = replace(case(2), drafted=77)
    made, other = undrafted(cases=[own]), undrafted()
    log.add([made, other]).result()
    supplied = [case(0), case(2), case(7, tie=True)]
    assert unseen.supply({made.id: supplied, "gone": [case(1)]}) == 2
    (found,) = log.by_ids([made.id])
    assert found == replace(made, cases=(case(0), own, case(7, tie=True))), "rounds and everything else are unchanged"
    assert log.counts(WHO).cases == 2
    assert unseen.names(WHO, 10) == [other.id]
    # Once.
    assert unseen.supply({made.id: [case(5)]}) == 0
    # None is an answer too.
    assert unseen.supply({other.id: []}) == 0
    assert unseen.names(WHO, 10) == [] and unseen.tokens(WHO) == 0


def test_they_can_be_claimed_like_all_others(database: Database, log: Generations, unseen: Unseen) -> None:
    made = undrafted()
    log.add([made]).result()
    runs = Runs(database)
    assert runs.claim(trigger=Trigger.CASES, who=WHO, parent=BARE_DRAFT, limit=9) is None
    unseen.supply({made.id: [case(0), case(1)]})
    run = runs.claim(trigger=Trigger.CASES, who=WHO, parent=BARE_DRAFT, limit=9)
    assert run is not None and (run.cases, run.generations) == (2, 1)
    assert [g.id for g in log.claimed(run.id)] == [made.id]


def test_generations_of_a_run_are_not_backfilled(database: Database, log: Generations, unseen: Unseen) -> None:
    made, other = undrafted(cases=[case(2)]), undrafted()
    log.add([made, other]).result()
    runs = Runs(database)
    run = runs.claim(trigger=Trigger.CASES, who=WHO, parent=BARE_DRAFT, limit=9)
    assert run is not None
    assert unseen.names(WHO, 9) == [other.id] and unseen.tokens(WHO) == 10
    assert unseen.supply({made.id: [case(0)]}) == 0
    runs.move(run.id, run.fencing, RunState.CRASHED)
    assert unseen.names(WHO, 9) == [other.id, made.id], "a crash gives it back"
    run = runs.claim(trigger=Trigger.CASES, who=WHO, parent=BARE_DRAFT, limit=9)
    assert run is not None
    runs.move(run.id, run.fencing, RunState.FAILED)
    assert unseen.supply({made.id: [case(0)], other.id: []}) == 0
    assert [g.cases for g in log.by_ids([made.id])] == [(case(2),)]
    with database.read() as connection:
        assert connection.exec_driver_sql("select count(*) from unseen").scalar() == 0, "nothing waits for ever"


def test_quarantined_generations_are_not_backfilled(database: Database, log: Generations, unseen: Unseen) -> None:
    made = undrafted(cases=[case(2)])
    log.add([made]).result()
    runs, adapters = Runs(database), Adapters(database)
    run = runs.claim(trigger=Trigger.CASES, who=WHO, parent=BARE_DRAFT, limit=9)
    assert run is not None
    ref = promote(runs, adapters, run)
    adapters.take_back(ref.id, BARE_DRAFT, WON)
    assert unseen.names(WHO, 9) == []
    assert unseen.supply({made.id: [case(0)]}) == 0


def test_deletions_remove_waiting_generations(database: Database, log: Generations, unseen: Unseen) -> None:
    made = [undrafted(client="ada"), undrafted(client="bob"), undrafted(client="bob")]
    log.add(made).result()
    log.erase(client="ada").result()
    log.purge(1).result()
    assert unseen.names(WHO, 9) == [made[2].id]
    with database.read() as connection:
        assert connection.exec_driver_sql("select count(*) from unseen").scalar() == 1


def test_the_queue_outlives_the_process(url: str) -> None:
    made = undrafted()
    first = Database(url)
    Generations(first).add([made]).result()
    first.close()
    second = Database(url)
    assert Unseen(second).names(WHO, 9) == [made.id]
    second.close()


@SQLITE
def test_only_waiting_generations_are_read(database: Database, unseen: Unseen) -> None:
    """Independent of the total number of generations of the pair."""
    asked: list[tuple[str, Any]] = []

    @event.listens_for(Engine, "before_cursor_execute")
    def hear(connection: Any, cursor: Any, statement: str, parameters: Any, *rest: object) -> None:
        asked.append((statement, parameters))

    try:
        unseen.tokens(WHO)
        unseen.names(WHO, 9)
    finally:
        event.remove(Engine, "before_cursor_execute", hear)
    wanted = [one for one in asked if "FROM unseen" in one[0]]
    assert len(wanted) == 2
    with database.read() as connection:
        for statement, parameters in wanted:
            plan = [row.detail for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
            assert "SCAN unseen" in plan
            assert not [step for step in plan if "generations" in step and "PRIMARY KEY" not in step]
            assert not [step for step in plan if "TEMP B-TREE" in step]
