"""What the page shows of a pair's rows: bounded samples of the log by time and adapter, verdicts, and the worst cases."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Connection, event

from service.core import (
    AdapterState,
    DepthCounts,
    FailureCase,
    Generation,
    Provenance,
    Round,
    RunState,
    Source,
    Trigger,
)
from service.evaluation.bench.synthetic_log import CASES, fill_log
from service.store.database import Database
from service.store.log import traffic
from service.store.log.generations import remove
from service.store.registry.overview import PairOverview
from service.store.stores import Stores
from service.store.tables import generations
from tests.support.databases import Databases
from tests.support.store_rows import ADAPTERS, LOST, WHO, generation, promote

OTHER = Provenance("o" * 64, WHO.tokenizer, WHO.draft)


@pytest.fixture
def stores(databases: Databases, tmp_path: Path) -> Stores:
    return Stores.of(Database(databases.empty(tmp_path)), ADAPTERS)


def made(adapter: int, minutes: float, *, accepted: int = 2, who: Provenance = WHO, **rest: object) -> Generation:
    """An answer of two rounds, recorded so many minutes ago."""
    rounds = (Round(adapter, 0, 4, accepted, 3), Round(adapter, 3, 3, 3, 2, Source.LOOKUP))
    created = datetime.now(UTC) - timedelta(minutes=minutes)
    return replace(generation(who=who, created=created, **rest), rounds=rounds)  # pyright: ignore[reportArgumentType]


def fill(stores: Stores, log: Sequence[Generation]) -> PairOverview:
    stores.generations.add(log).result(60)
    return PairOverview(stores.database, WHO)


def test_points_are_by_adapter_in_order_of_time(stores: Stores) -> None:
    log = [made(0, 600 - i) for i in range(10)] + [made(3, 300 - i, accepted=4) for i in range(20)]
    history = fill(stores, log).history(24)
    assert [point.adapter for point in history.points] == sorted(point.adapter for point in history.points)
    assert [point.at for point in history.points] == sorted(point.at for point in history.points)
    assert all(history.start < point.at < history.end for point in history.points)
    for adapter, count, accepted in ((0, 10, 2), (3, 20, 4)):
        points = [point for point in history.points if point.adapter == adapter]
        assert sum(point.generations for point in points) == count
        # Look-ups count as rounds and tokens, not as the draft's.
        assert sum(point.tokens for point in points) == 5 * count
        assert sum(point.rounds for point in points) == 2 * count
        assert sum(point.drafted for point in points) == 4 * count
        assert sum(point.accepted for point in points) == accepted * count
    assert history.depths == (
        DepthCounts(3, (20, 20, 20, 20), (20, 20, 20, 20)),
        DepthCounts(0, (10, 10, 10, 10), (10, 10, 0, 0)),
    )
    stores.close()


def test_a_swap_inside_one_stretch_makes_two_points(stores: Stores) -> None:
    log = [made(0, 600), *(made(1, 6) for _ in range(30)), *(made(2, 5) for _ in range(30)), made(3, 0.5)]
    points = fill(stores, log).history(24).points
    assert [(point.adapter, point.generations) for point in points] == [
        (0, 1),
        (1, traffic.EDGE),
        (2, traffic.EDGE - 1),
        (3, 1),
    ]
    stores.close()


def test_only_the_time_asked_for_and_this_pair_count(stores: Stores) -> None:
    log = [made(1, 200), made(2, 90, who=OTHER), made(2, 50), made(2, 30, who=OTHER), made(2, 20)]
    overview = fill(stores, log)
    for hours, expected in ((1, {2: 2}), (24, {1: 1, 2: 2})):
        counted = {2: 0} | {point.adapter: 0 for point in overview.history(hours).points}
        for point in overview.history(hours).points:
            counted[point.adapter] += point.generations
        assert counted == expected
    stores.close()


def test_an_empty_log_and_an_old_one_have_no_points(stores: Stores) -> None:
    overview = fill(stores, [])
    assert (overview.history(24).points, overview.history(24).depths) == ((), ())
    assert (overview.history(24).adapters, overview.disagreements(10), overview.newest_run()) == ((), [], None)
    assert fill(stores, [made(1, 90), made(1, 80)]).history(1).points == ()
    stores.close()


def test_holes_in_the_log_hide_nothing(stores: Stores) -> None:
    overview = fill(stores, [made(1, 400 - i) for i in range(200)])

    def thin_out(connection: Connection) -> None:
        remove(connection, generations.c.seq % 40 != 0, generations.c.seq <= 160)

    stores.database.write(thin_out).result(60)
    points = overview.history(24).points
    assert sum(point.generations for point in points) == 4 + 40
    stores.close()


def rows_read(overview: PairOverview, hours: int) -> tuple[int, int]:
    """How many statements were sent for a history, and how many generations are counted in it."""
    sent: list[str] = []
    engine = overview._db.backend.readers

    def count(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        sent.append(statement)

    event.listen(engine, "before_cursor_execute", count)
    try:
        history = overview.history(hours)
    finally:
        event.remove(engine, "before_cursor_execute", count)
    return len(sent), sum(point.generations for point in history.points)


def test_a_longer_log_costs_hardly_more(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "STRETCHES", 6)
    monkeypatch.setattr(traffic, "EDGE", 5)
    overview = fill(stores, [made(1, 1200 - i) for i in range(300)])
    statements, counted = rows_read(overview, 24)
    assert counted == 6 * 2 * 5
    fill(stores, [made(1, 900 - i) for i in range(900)])
    more, counted = rows_read(overview, 24)
    assert counted == 6 * 2 * 5
    # Two more steps of the search for the beginning and for each stretch.
    assert more <= statements + 2 * (1 + 6)
    stores.close()


@pytest.mark.nightly
def test_a_million_cases_are_shown_at_once(stores: Stores, capsys: pytest.CaptureFixture[str]) -> None:
    count = fill_log(stores.generations, WHO, 1_000_000)
    assert count * CASES >= 1_000_000
    overview = PairOverview(stores.database, WHO)
    hours = int((datetime.now(UTC) - datetime(2026, 1, 1, tzinfo=UTC)).total_seconds() / 3600) + 1
    seconds: dict[str, float] = {}
    for name, read in (
        ("history", lambda: overview.history(hours).points),
        ("cases", lambda: overview.disagreements(20)),
    ):
        started_at = time.perf_counter()
        assert len(read()) >= 20
        seconds[name] = time.perf_counter() - started_at
    with capsys.disabled():
        print({name: round(value, 3) for name, value in seconds.items()})
    assert max(seconds.values()) < 2.0
    stores.close()


# ------------------------------------------------------------------------------------------------ adapters and runs


def test_adapters_come_with_the_verdicts_that_decided(stores: Stores) -> None:
    overview = fill(stores, [made(0, 30)])
    run = stores.runs.claim(trigger=Trigger.MANUAL, who=WHO, parent=0, limit=1)
    assert run is not None
    assert (found := overview.newest_run()) is not None and found.id == run.id
    first = promote(stores.runs, stores.adapters, run)
    stores.generations.add([made(1, 20)]).result(60)
    other = stores.runs.claim(trigger=Trigger.MANUAL, who=WHO, parent=first.id, limit=1)
    assert other is not None
    second = promote(stores.runs, stores.adapters, other)
    stores.adapters.roll_back(second.id, first.id, LOST)
    newest, oldest = overview.history(1).adapters
    assert (newest.id, newest.parent, newest.run, newest.state) == (
        second.id,
        first.id,
        other.id,
        AdapterState.ROLLED_BACK,
    )
    assert newest.gate is not None and newest.gate.verdict.promoted and newest.gate.at.tzinfo is not None
    assert newest.watch is not None and newest.watch.verdict == LOST and newest.watch.at >= newest.gate.at
    assert (oldest.id, oldest.state, oldest.watch) == (first.id, AdapterState.ACTIVE, None)
    assert (found := overview.newest_run()) is not None and found.state is RunState.PROMOTED
    assert PairOverview(stores.database, replace(WHO, draft="e" * 64)).history(1).adapters == ()
    stores.close()


# ------------------------------------------------------------------------------------------------------------- cases


def case(position: int, q: float, p: float, *, drafted: int = 7, target: int = 9, tie: bool = False) -> FailureCase:
    return FailureCase(position, drafted, target, p, q, 1.0, tie)


def test_the_worst_cases_come_first_each_pair_of_tokens_once(stores: Stores) -> None:
    log = [
        made(1, 5, cases=[case(2, 0.9, 0.1), case(4, 0.99, 0.0, tie=True)]),
        made(2, 4, cases=[case(1, 0.95, 0.01, drafted=11, target=12), case(3, 0.5, 0.4, drafted=13)]),
        made(3, 3, cases=[case(2, 0.8, 0.2)]),
        made(3, 2, cases=[case(2, 0.99, 0.01, drafted=20)], who=OTHER),
    ]
    found = fill(stores, log).disagreements(10)
    assert [(one.drafted, one.target) for one in found] == [(11, 12), (7, 9), (13, 9)]
    # At position 3 the look-up had proposed, not the draft.
    assert [one.adapter for one in found] == [2, 1, None]
    assert [one.generation for one in found] == [log[1].id, log[0].id, log[1].id]
    assert (found[0].q, found[0].p, found[0].domain, found[0].client) == (0.95, 0.01, "code", "ada")
    assert len(fill(stores, []).disagreements(1)) == 1
    stores.close()


def test_the_newest_cases_come_in_order_with_near_ties_and_by_the_page(stores: Stores) -> None:
    log = [
        made(1, 5, cases=[case(2, 0.9, 0.1, drafted=1), case(4, 0.99, 0.0, drafted=2, tie=True)]),
        made(2, 4, cases=[case(1, 0.5, 0.4, drafted=3)]),
        made(3, 2, cases=[case(2, 0.99, 0.01, drafted=20)], who=OTHER),
        made(3, 3, cases=[case(2, 0.8, 0.2, drafted=4)]),
    ]
    overview = fill(stores, log)
    found = overview.newest_cases(10)
    assert [(one.drafted, one.tie) for one in found] == [(4, False), (3, False), (2, True), (1, False)]
    assert (found[0].generation, found[0].q, found[0].context[-1]) == (log[3].id, 0.8, log[3].output[1])
    first = overview.newest_cases(3)
    second = overview.newest_cases(3, first[-1].case)
    pages = [first, second, overview.newest_cases(3, second[-1].case)]
    assert [[one.drafted for one in page] for page in pages] == [[4, 3, 2], [1], []]
    stores.close()


def test_the_context_is_what_the_draft_had_read(stores: Stores) -> None:
    output = tuple(range(100, 105))
    log = [made(1, 5, tokens=range(1, 100), output=output, cases=[case(2, 0.9, 0.1)])]
    (found,) = fill(stores, log).disagreements(10)
    assert found.context == (*range(54, 100), 100, 101)
    assert found.created_at == log[0].created_at
    stores.close()
