"""A text that crashes runs is found by bisection and quarantined alone; nothing is where the cause is another."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Set

import pytest

from service.core import BARE_DRAFT, RunState, Trigger
from service.store.database import Database
from service.store.log.generations import Generations
from service.store.log.quarantine import Quarantine
from service.store.log.run_texts import Role
from service.store.log.training_texts import TrainingTexts
from service.store.registry.crash_search import PastRun, Search, search
from service.store.registry.runs import Runs
from tests.support.store_rows import WHO, generation, reject

Ends = Callable[[Set[int]], RunState]
INCONCLUSIVE = (RunState.TIMED_OUT, RunState.OUT_OF_MEMORY, RunState.ENDED, RunState.LOST)


class Log:
    """Texts 1 to `count`, and runs on them that end as `ends` says."""

    def __init__(self, count: int, ends: Ends, *, limit: int = 10_000) -> None:
        self.untrained = set(range(1, count + 1))
        self.ends, self.limit = ends, limit
        self.runs: list[PastRun] = []
        self.quarantined: list[int] = []

    def search(self) -> Search:
        return search([run for run in self.runs if not run.texts & set(self.quarantined)])

    def run(self) -> None:
        """One run, as the store claims and ends it."""
        found = self.search()
        assert found.culprit is None
        texts = sorted(found.probe or self.untrained - found.avoid or self.untrained)[-self.limit :]
        self.runs.append(PastRun(self.ends(set(texts)), frozenset(texts)))
        if self.runs[-1].state.judged:
            self.untrained -= set(texts)
        elif (culprit := self.search().culprit) is not None:
            self.quarantined.append(culprit)
            self.untrained.discard(culprit)

    def go_on(self, runs: int) -> Log:
        while self.untrained and len(self.runs) < runs:
            self.run()
        return self


def crashing_on(*bad: int, otherwise: RunState = RunState.REJECTED) -> Ends:
    return lambda texts: RunState.CRASHED if texts & set(bad) else otherwise


@pytest.mark.parametrize("count", [2, 3, 8, 100, 800])
def test_a_text_that_crashes_runs_is_quarantined_alone(count: int) -> None:
    most = 0
    for bad in {*range(1, count + 1, math.ceil(count / 40)), count}:
        log = Log(count, crashing_on(bad)).go_on(100)
        assert (log.quarantined, log.untrained) == ([bad], set()), "all the others were learnt"
        most = max(most, 1 + max(i for i, run in enumerate(log.runs) if run.state is RunState.CRASHED))
    # The crash, both halves, a run for each halving, and one on the text alone.
    assert most <= 4 + math.ceil(math.log2(count / 2))


def test_runs_until_it_is_found_in_a_whole_window() -> None:
    log = Log(800, crashing_on(431)).go_on(100)
    assert max(i for i, run in enumerate(log.runs, 1) if run.state is RunState.CRASHED) == 12


def test_several_are_found_one_after_the_other() -> None:
    for seed in range(10):
        bad = set(random.Random(seed).sample(range(1, 401), 5))
        log = Log(400, crashing_on(*bad)).go_on(200)
        assert (set(log.quarantined), log.untrained) == (bad, set())


@pytest.mark.parametrize("count", [1, 2, 50, 800])
def test_a_crash_on_any_texts_quarantines_none_and_says_so(count: int) -> None:
    log = Log(count, lambda texts: RunState.CRASHED)
    for number in range(1, 65):
        log.run()
        assert log.search().any_texts is (number >= 3 and count > 1), "when both halves have crashed as well"
    assert log.quarantined == [] and len(log.untrained) == count


@pytest.mark.parametrize("crashes", [1, 2, 3, 7, 12, 30])
def test_when_what_crashed_any_run_is_mended_all_texts_are_learnt(crashes: int) -> None:
    ends = iter([RunState.CRASHED] * crashes)
    log = Log(200, lambda texts: next(ends, RunState.REJECTED)).go_on(200)
    assert (log.quarantined, log.untrained) == ([], set())
    assert not log.search().open
    # Once a text that had crashed alone is survived, all earlier crashes are forgotten.
    assert crashes < 10 or len(log.runs) <= crashes + 4


def test_a_single_crash_costs_two_smaller_runs() -> None:
    ends = iter([RunState.CRASHED])
    log = Log(800, lambda texts: next(ends, RunState.PROMOTED)).go_on(100)
    assert [len(run.texts) for run in log.runs] == [800, 400, 400]


def test_other_endings_between_delay_the_search_and_mislead_it_nowhere() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        bad = chance.randint(1, 60)

        def ends(texts: Set[int], chance: random.Random = chance, bad: int = bad) -> RunState:
            return chance.choice(INCONCLUSIVE) if chance.random() < 0.4 else crashing_on(bad)(texts)

        log = Log(60, ends).go_on(300)
        assert (log.quarantined, log.untrained) == ([bad], set())


def test_no_text_is_suspected_of_anything_but_a_crash() -> None:
    for state in (*INCONCLUSIVE, RunState.FAILED):
        log = Log(8, lambda texts, state=state: state).go_on(20)
        assert log.search() == Search() and {len(run.texts) for run in log.runs} == {8}


def test_a_text_too_short_to_learn_from_is_cleared_when_its_run_says_so() -> None:
    log = Log(8, lambda texts: RunState.FAILED if texts == {3} else crashing_on(3)(texts)).go_on(30)
    assert (log.quarantined, log.untrained) == ([], {3}), "the others are learnt all the same"


@pytest.mark.parametrize("limit", [1, 7, 50])
def test_runs_made_small_by_memory_find_it_too(limit: int) -> None:
    log = Log(100, crashing_on(60), limit=limit).go_on(300)
    assert (log.quarantined, log.untrained) == ([60], set())


# --------------------------------------------------------------------------------------------------------- in the database


def test_rows_lead_to_the_text_whatever_it_was_to_its_runs(database: Database) -> None:
    """The window may hold it as well: an older text that other runs have learnt, or one without failure cases."""
    log, runs, texts = Generations(database), Runs(database), TrainingTexts(database)
    old = [generation() for _ in range(4)]
    log.add(old).result()
    first = runs.claim(trigger=Trigger.CASES, who=WHO, parent=BARE_DRAFT, limit=99)
    assert first is not None
    reject(runs, first)
    new = [generation() for _ in range(4)]
    log.add(new).result()
    bad, errors = old[1].id, list[str | None]()
    for number in range(12):
        run = runs.claim(trigger=Trigger.CASES, who=WHO, parent=BARE_DRAFT, limit=99)
        if run is None:
            break
        if number == 0:
            runs.record_texts(run.id, run.fencing, Role.WINDOW, [one.id for one in old])
        read = {one.id for one in (*texts.claimed(run.id), *texts.claimed_again(run.id))}
        assert number == 0 or run.generations == len(read), "nothing but what it was claimed for"
        if bad in read:
            errors.append(runs.move(run.id, run.fencing, RunState.CRASHED, error="exit code 1").error)
        else:
            reject(runs, run)
    assert errors[0] == "exit code 1; the next run learns from 4 of 8 suspected texts alone, to find the cause"
    assert errors[-1] == "exit code 1; a text is quarantined: runs crash on it, and not on others"
    (found,) = Quarantine(database).all()
    assert (found.run, found.generations) == (None, 1)
    assert {one.id for one in texts.window(WHO, 0, 99)} == {one.id for one in (*old, *new)} - {bad}
    assert texts.untrained(WHO).generations == 0 and log.stats().trained == 8


def test_pairs_and_practice_are_no_witnesses(database: Database) -> None:
    log, runs = Generations(database), Runs(database)
    made = [generation() for _ in range(4)]
    log.add(made).result()
    run = runs.claim(trigger=Trigger.PRACTICE, who=WHO, parent=0, limit=9, seeds=[one.id for one in made])
    assert run is not None
    runs.move(run.id, run.fencing, RunState.CRASHED)
    assert not runs.crash_search(WHO).open, "no text of the log was read"
    run = runs.claim(trigger=Trigger.CASES, who=WHO, parent=0, limit=9)
    assert run is not None
    runs.move(run.id, run.fencing, RunState.CRASHED)
    assert len(runs.crash_search(WHO).probe) == 2
