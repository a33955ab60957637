"""Reservoirs after a run: its own texts and texts without failures, by tag or kind."""

from __future__ import annotations

import random

from sqlalchemy import update

from service.core import Generation, Trigger
from service.store.database import Database
from service.store.log.generations import Generations
from service.store.log.likeness import KINDS
from service.store.registry.runs import Runs
from service.store.replay.buffer import Replay
from service.store.tables import generations
from tests.support.databases import BY_NIGHT
from tests.support.store_rows import HELD_OUT_TEXT, TRAIN_TEXT, WHO, case, generation, reject, texts

CAPACITY = 32


def run_on(database: Database) -> int:
    """A run that claims all cases, is rejected and remembered."""
    runs = Runs(database)
    run = runs.claim(trigger=Trigger.MANUAL, who=WHO, parent=0, limit=1000)
    assert run is not None
    reject(runs, run)
    Replay(database).offer_run(run.id, CAPACITY, seed=0)
    return run.id


def held(database: Database) -> set[str]:
    return {g.id for g in Replay(database).sample(WHO, 10_000, 0)}


@BY_NIGHT
def test_failures_and_successes_are_remembered_once(database: Database) -> None:
    store, replay = Generations(database), Replay(database)
    well = [generation(cases=[]) for _ in range(4)]
    badly = [generation(cases=[case(2)]) for _ in range(4)]
    held_out = [generation(cases=[], first_user=HELD_OUT_TEXT)]
    store.add([*well[:2], *badly[:2], *held_out, *well[2:], *badly[2:]]).result()
    late = [generation(cases=[])]
    store.add(late).result()
    first = run_on(database)
    assert held(database) == {g.id for g in [*well, *badly]}
    replay.offer_run(first, CAPACITY, seed=0)
    assert replay.sizes() == {("code", ""): 8}
    more = [generation(cases=[case(1)])]
    store.add(more).result()
    run_on(database)
    assert held(database) == {g.id for g in [*well, *badly, *late, *more]}
    replay.offer_run(999, CAPACITY, seed=0)
    assert replay.sizes() == {("code", ""): 10}


@BY_NIGHT
def test_quarantined_texts_are_not_remembered(database: Database) -> None:
    """Neither those that a run has learnt from, nor those between them that left no failure."""
    store, replay = Generations(database), Replay(database)
    well, badly = ([generation(cases=cases) for _ in range(4)] for cases in ([], [case(2)]))
    store.add([*well, *badly]).result()
    bad = [well[1], badly[1], badly[3]]
    aside = update(generations).where(generations.c.id.in_([g.id for g in bad])).values(quarantined_run=1)
    runs = Runs(database)
    run = runs.claim(trigger=Trigger.MANUAL, who=WHO, parent=0, limit=1000)
    assert run is not None
    database.write(lambda connection: connection.execute(aside).rowcount).result()
    replay.offer_run(run.id, CAPACITY, seed=0)
    free = {g.id for g in [*well, *badly]} - {g.id for g in bad}
    assert held(database) == free
    replay.offer("code", [g.id for g in bad], CAPACITY, seed=0)
    assert held(database) == free


def test_equal_texts_take_one_slot(database: Database) -> None:
    Generations(database).add([generation(output=(1, 2, 3)) for _ in range(20)]).result()
    run_on(database)
    assert Replay(database).sizes() == {("code", ""): 1}


@BY_NIGHT
def test_untagged_prompts_are_stored_by_kind(database: Database) -> None:
    rng = random.Random(0)
    leads = [[rng.randrange(50_000) for _ in range(47)] for _ in range(3)]

    def asked(which: int, count: int) -> list[Generation]:
        return [
            generation(
                domain=None,
                client=None,
                first_user=text,
                tokens=[*leads[which], *(rng.randrange(50_000) for _ in range(20))],
            )
            for text in texts("train", count, tag=f"kind {which}")
        ]

    store, replay = Generations(database), Replay(database)
    first = asked(0, 20)
    store.add(first).result()
    run_on(database)
    (name,) = replay.sizes()
    # A flood of other kinds leaves the first kind's reservoir alone.
    store.add(asked(1, 400)).result()
    run_on(database)
    assert replay.sizes()[name] == 20
    assert len(replay.sizes()) == 2 <= KINDS
    found = replay.sample(WHO, 30, seed=1)
    assert sum((g.prompt.domain or "", g.prompt.kind) == name for g in found) == 15, "uniform over kinds"
    (again,) = replay.labelled([asked(0, 1)[0]])
    assert (again.prompt.domain or "", again.prompt.kind) == name
    tagged = generation(domain="sql")
    assert replay.labelled([tagged]) == [tagged]


@BY_NIGHT
def test_a_flooding_client_leaves_room_for_others(database: Database) -> None:
    store = Generations(database)
    named = texts("train", 300)
    store.add([generation(client="flood", first_user=text) for text in named]).result()
    run_on(database)
    honest = [generation(client=f"c{i}", first_user=TRAIN_TEXT if i == 0 else f"{named[i]}") for i in range(20)]
    store.add(honest).result()
    run_on(database)
    sampled = Replay(database).sample(WHO, 1000, 0)
    assert len(sampled) == CAPACITY
    assert sum(g.prompt.client == "flood" for g in sampled) == CAPACITY // 2
