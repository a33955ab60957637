"""Earlier texts that a run trains on again."""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import update

from service.core import RunState, Trigger
from service.store.database import Database
from service.store.log.generations import Generations
from service.store.log.training_texts import TrainingTexts
from service.store.registry.adapters import Adapters
from service.store.registry.runs import Runs
from service.store.tables import generations
from tests.support.store_rows import ADAPTERS, HELD_OUT_TEXT, LOST, WHO, WON, case, generation


def run_on_all(database: Database) -> int:
    run = Runs(database).claim(trigger=Trigger.CASES, who=WHO, parent=0, limit=100)
    assert run is not None
    return run.id


def ended(database: Database, run_id: int, *, rolled_back: bool) -> None:
    runs, adapters = Runs(database), Adapters(database, ADAPTERS)
    run = runs.get(run_id)
    for state in (RunState.TRAINING, RunState.SCORING):
        runs.move(run.id, run.fencing, state)
    ref = adapters.add(
        run_id=run.id,
        fencing=run.fencing,
        folder=ADAPTERS / f"{run.id}",
        sha256="5" * 64,
        rank=8,
        scale=2.0,
        keys=["a"],
        draft=WHO.draft,
        parent=0,
    )
    if rolled_back:
        runs.move(run.id, run.fencing, RunState.STAGING)
        runs.promote(run.id, run.fencing, ref.id, WON)
        adapters.roll_back(ref.id, 0, LOST)
    else:
        runs.reject(run.id, run.fencing, ref.id, LOST)


def test_the_newest_before_come_along_whatever_became_of_their_run(database: Database) -> None:
    store = Generations(database)
    old = [generation() for _ in range(5)]
    store.add([*old, generation(first_user=HELD_OUT_TEXT), generation(who=replace(WHO, target="x" * 64))]).result()
    ended(database, run_on_all(database), rolled_back=False)
    well = generation(cases=[])
    new = [generation() for _ in range(2)]
    store.add([well, generation(output=(), cases=[]), *new]).result()
    run = run_on_all(database)
    assert {g.id for g in TrainingTexts(database).claimed(run)} == {g.id for g in new}
    wanted = [well.id, *(g.id for g in reversed(old))]
    assert [g.id for g in TrainingTexts(database).window(WHO, run, 50)] == wanted
    assert [g.id for g in TrainingTexts(database).window(WHO, run, 3)] == wanted[:3]
    assert TrainingTexts(database).window(WHO, run, 0) == TrainingTexts(database).window(WHO, run, -7) == []
    assert [g.id for g in TrainingTexts(database).window(replace(WHO, draft="y" * 64), run, 50)] == wanted, (
        "whatever drafted them"
    )


def test_quarantined_texts_are_not_trained_on_again(database: Database) -> None:
    store = Generations(database)
    bad = [generation(cases=[case(0)]) for _ in range(3)]
    store.add(bad).result()
    ended(database, run_on_all(database), rolled_back=True)
    good = generation()
    store.add([good]).result()
    run = run_on_all(database)
    assert [g.id for g in TrainingTexts(database).claimed(run)] == [good.id]
    assert TrainingTexts(database).window(WHO, run, 50) == []


def test_rows_of_older_releases_that_are_on_neither_side_are_not_trained_on(database: Database) -> None:
    """Answers under a grammar were recorded so: too little of them is stored."""
    store, texts = Generations(database), TrainingTexts(database)
    earlier, neither = generation(), generation()
    store.add([earlier, neither]).result()
    aside = update(generations).where(generations.c.id == neither.id).values(split="constrained")
    database.write(lambda connection: connection.execute(aside).rowcount).result()
    assert texts.untrained(WHO).generations == 1
    ended(database, run_on_all(database), rolled_back=False)
    store.add([generation()]).result()
    run = run_on_all(database)
    assert [g.id for g in texts.window(WHO, run, 50)] == [earlier.id]
    assert neither.id not in texts.seeds(WHO, 50)
    assert store.held_out(WHO, 50) == []
