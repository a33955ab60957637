from __future__ import annotations

import pytest

from service.core import BARE_DRAFT, NotFound, RunState, TrainingRun, Trigger
from service.store.database import Database
from service.store.log.generations import Generations
from service.store.log.quarantine import Quarantine, QuarantinedTexts
from service.store.log.training_texts import TrainingTexts
from service.store.registry.adapters import Adapters
from service.store.registry.runs import Runs
from tests.support.store_rows import ADAPTERS, LOST, WHO, case, generation, promote, reject


class QuarantineStores:
    """The stores of one database, and helpers that put cases into quarantine."""

    def __init__(self, database: Database) -> None:
        self.log, self.runs, self.adapters = Generations(database), Runs(database), Adapters(database, ADAPTERS)
        self.training_texts = TrainingTexts(database)
        self.quarantine = Quarantine(database)

    def claim(self) -> TrainingRun:
        run = self.runs.claim(trigger=Trigger.CASES, who=WHO, parent=BARE_DRAFT, limit=9)
        assert run is not None
        return run

    def roll_back_one(self, generations: int) -> tuple[int, int]:
        """A run on new generations of two cases each whose adapter served and was rolled back. Returns run and adapter."""
        self.log.add([generation(cases=[case(0), case(1, tie=True)]) for _ in range(generations)]).result()
        run = self.claim()
        ref = promote(self.runs, self.adapters, run)
        self.adapters.roll_back(ref.id, BARE_DRAFT, LOST)
        return run.id, ref.id

    def crash_out(self) -> None:
        """A text of one case that crashes its runs until it is quarantined, and one without that the last adapter learns."""
        bad, good = generation(cases=[case(0)]), generation(cases=[case(0)])
        self.log.add([bad, good]).result()
        for _ in range(9):
            run = self.claim()
            if bad.id in [name for name, _ in self.training_texts.claimed_names(run.id)]:
                run = self.runs.move(run.id, run.fencing, RunState.CRASHED)
            else:
                reject(self.runs, run)
            if "is quarantined" in str(run.error):
                return
        raise AssertionError("it was not found")


@pytest.fixture
def stores(database: Database) -> QuarantineStores:
    return QuarantineStores(database)


def test_quarantined_cases_are_listed_by_their_reason(stores: QuarantineStores) -> None:
    assert stores.quarantine.all() == []
    first, second = stores.roll_back_one(2), stores.roll_back_one(3)
    stores.crash_out()
    assert stores.quarantine.all() == [
        QuarantinedTexts(*second, 6, 3),
        QuarantinedTexts(*first, 4, 2),
        QuarantinedTexts(None, None, 1, 1),
    ]


def test_released_cases_can_be_trained_on_again(stores: QuarantineStores) -> None:
    first, second = stores.roll_back_one(2), stores.roll_back_one(3)
    stores.crash_out()
    assert stores.training_texts.untrained(WHO).cases == 0
    learnt = [name for name, _ in stores.training_texts.claimed_names(first[0])]
    assert stores.training_texts.named(learnt) == [], "practice text that began like them is not learnt from either"
    assert stores.quarantine.release(first[0]) == 4
    assert {one.id for one in stores.training_texts.named(learnt)} == set(learnt) and len(learnt) == 2
    assert stores.training_texts.untrained(WHO).cases == 2
    assert stores.quarantine.all() == [QuarantinedTexts(*second, 6, 3), QuarantinedTexts(None, None, 1, 1)]
    assert stores.quarantine.release() == 7
    assert stores.quarantine.all() == []
    assert (stores.log.stats().quarantined, stores.log.stats().trained) == (0, 1), "the good text beside the bad one"
    run = stores.claim()
    assert (run.cases, run.generations) == (11, 6)


def test_what_is_known_of_a_released_text_is_forgotten(stores: QuarantineStores) -> None:
    stores.crash_out()
    assert stores.quarantine.release() == 1
    assert not stores.runs.crash_search(WHO).open
    run = stores.claim()
    stores.runs.move(run.id, run.fencing, RunState.CRASHED)
    assert stores.quarantine.all() == [], "a first crash, on no other text"


def test_nothing_else_is_touched(stores: QuarantineStores) -> None:
    """Cases used by a rejected run, and cases claimed by a running one."""
    stores.log.add([generation()]).result()
    rejected = stores.claim()
    reject(stores.runs, rejected)
    stores.log.add([generation()]).result()
    running = stores.claim()
    assert stores.quarantine.release() == 0
    assert stores.quarantine.release(rejected.id) == 0
    assert stores.log.stats().trained == 1
    assert len(stores.training_texts.claimed(running.id)) == 1


def test_a_run_that_is_not_there_is_named(stores: QuarantineStores) -> None:
    with pytest.raises(NotFound, match="no training run 7"):
        stores.quarantine.release(7)
