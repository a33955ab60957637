from __future__ import annotations

from pathlib import Path

import pytest

from service.core import BARE_DRAFT, NotFound, RunState, TrainingRun, Trigger
from service.store.adapters import Adapters
from service.store.database import Database
from service.store.generations import Generations
from service.store.quarantine import Held, Quarantine
from service.store.runs import MAX_CRASHES, Runs
from tests.support.store_rows import LOST, WHO, WON, case, generation


class House:
    def __init__(self, database: Database) -> None:
        self.log, self.runs, self.adapters = Generations(database), Runs(database), Adapters(database)
        self.quarantine = Quarantine(database)

    def claim(self) -> TrainingRun:
        run = self.runs.claim(trigger=Trigger.CASES, who=WHO, parent=BARE_DRAFT, limit=9)
        assert run is not None
        return run

    def taken_back(self, generations: int) -> tuple[int, int]:
        """A run on new generations of two cases each whose adapter served and was taken back: run, adapter."""
        self.log.add([generation(cases=[case(0), case(1, tie=True)]) for _ in range(generations)]).result()
        run = self.claim()
        ref = self.adapters.add(
            run_id=run.id,
            fencing=run.fencing,
            folder=Path(f"run-{run.id}"),
            sha256="",
            rank=1,
            scale=1.0,
            keys=[],
            draft=WHO.draft,
            parent=BARE_DRAFT,
        )
        for state in (RunState.TRAINING, RunState.SCORING, RunState.STAGING):
            self.runs.move(run.id, run.fencing, state)
        self.runs.promote(run.id, run.fencing, ref.id, WON)
        self.adapters.take_back(ref.id, BARE_DRAFT, LOST)
        return run.id, ref.id

    def crashed(self) -> None:
        self.log.add([generation(cases=[case(0)])]).result()
        for _ in range(MAX_CRASHES):
            run = self.claim()
            self.runs.move(run.id, run.fencing, RunState.CRASHED)


@pytest.fixture
def house(database: Database) -> House:
    return House(database)


def test_what_is_put_aside_is_told_by_what_it_was_put_aside_for(house: House) -> None:
    assert house.quarantine.held() == []
    first, second = house.taken_back(2), house.taken_back(3)
    house.crashed()
    assert house.quarantine.held() == [Held(*second, 6, 3), Held(*first, 4, 2), Held(None, None, 1, 1)]


def test_what_is_released_can_be_learnt_from_again(house: House) -> None:
    first, second = house.taken_back(2), house.taken_back(3)
    house.crashed()
    assert house.log.counts(WHO).cases == 0
    assert house.quarantine.release(first[0]) == 4
    assert house.log.counts(WHO).cases == 2
    assert house.quarantine.held() == [Held(*second, 6, 3), Held(None, None, 1, 1)]
    assert house.quarantine.release() == 7
    assert house.quarantine.held() == []
    assert house.log.stats().quarantined == house.log.stats().trained == 0
    run = house.claim()
    assert (run.cases, run.generations) == (11, 6)


def test_what_is_released_may_crash_as_often_as_before(house: House) -> None:
    house.crashed()
    assert house.quarantine.release() == 1
    for _ in range(MAX_CRASHES - 1):
        run = house.claim()
        house.runs.move(run.id, run.fencing, RunState.CRASHED)
    assert house.quarantine.held() == []
    run = house.claim()
    house.runs.move(run.id, run.fencing, RunState.CRASHED)
    assert house.quarantine.held() == [Held(None, None, 1, 1)]


def test_nothing_else_is_touched(house: House) -> None:
    """Cases that a run keeps, and cases that a run is at work on."""
    house.log.add([generation()]).result()
    kept = house.claim()
    house.runs.move(kept.id, kept.fencing, RunState.FAILED)
    house.log.add([generation()]).result()
    running = house.claim()
    assert house.quarantine.release() == 0
    assert house.quarantine.release(kept.id) == 0
    assert house.log.stats().trained == 1
    assert len(house.log.claimed(running.id)) == 1


def test_a_run_that_is_not_there_is_named(house: House) -> None:
    with pytest.raises(NotFound, match="no training run 7"):
        house.quarantine.release(7)
