"""Texts that were hardly drafted: their failure cases are not known, and runs learn from them by their tokens."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from service.core import (
    BARE_DRAFT,
    Generation,
    Provenance,
    Round,
    RunState,
    Sampling,
    Source,
    TrainingRun,
    Trigger,
)
from service.store.database import Database
from service.store.log.cases import undrafted
from service.store.log.generations import Generations
from service.store.log.training_texts import TrainingTexts, UntrainedCounts
from service.store.registry.adapters import Adapters
from service.store.registry.runs import Runs
from service.store.replay.buffer import Replay
from tests.support.store_rows import ADAPTERS, HELD_OUT_TEXT, WHO, WON, case, generation, promote, reject, targets

GREEDY, SEEDED, UNSEEDED = Sampling(), Sampling(temperature=1.0, seed=3), Sampling(temperature=1.0)
_numbers = itertools.count()
PLAIN = tuple(Round(0, at, 0, 0, 1) for at in range(10))


def plain(sampling: Sampling = GREEDY, rounds: tuple[Round, ...] = PLAIN, **changes: Any) -> Generation:
    """A generation of ten tokens decoded without a draft."""
    output = (*range(9), 100 + next(_numbers))
    values: dict[str, Any] = {"cases": [], "collected": targets(10), "output": output, **changes}
    made = generation(**values)
    return replace(made, prompt=replace(made.prompt, sampling=sampling), rounds=rounds)


def drafted(tokens: int, source: Source = Source.DRAFT) -> tuple[Round, ...]:
    """Rounds in which this many of the ten tokens were proposed for."""
    return (Round(0, 0, 3, tokens - 1, tokens, source), *(Round(0, at, 0, 0, 1) for at in range(tokens, 10)))


@pytest.fixture
def log(database: Database) -> Generations:
    return Generations(database)


@pytest.fixture
def texts(database: Database) -> TrainingTexts:
    return TrainingTexts(database)


@pytest.fixture
def runs(database: Database) -> Runs:
    return Runs(database)


def claim(runs: Runs, who: Provenance = WHO) -> TrainingRun:
    run = runs.claim(trigger=Trigger.CASES, who=who, parent=BARE_DRAFT, limit=9)
    assert run is not None
    return run


@pytest.mark.parametrize(
    ("made", "counts"),
    [
        (plain(), True),
        (plain(SEEDED), True),
        (plain(UNSEEDED), True),
        (plain(collected=None), False),
        (plain(output=()), False),
        (plain(rounds=drafted(4)), True),
        (plain(rounds=drafted(5)), False),
        (plain(rounds=drafted(9, Source.LOOKUP)), True),
        (plain(first_user=HELD_OUT_TEXT), False),
        # Whatever draft did not draft it, it is a sample of the target.
        (plain(who=replace(WHO, draft="other")), True),
        (plain(who=replace(WHO, target="other")), False),
        (plain(who=replace(WHO, tokenizer="other")), False),
    ],
)
def test_undrafted_texts_count_and_can_be_claimed(
    made: Generation, counts: bool, log: Generations, runs: Runs, texts: TrainingTexts
) -> None:
    log.add([made]).result()
    assert texts.untrained(WHO) == UntrainedCounts(0, 0, 0, 10 * counts)
    run = runs.claim(trigger=Trigger.CASES, who=WHO, parent=BARE_DRAFT, limit=9)
    assert (run is not None) is counts
    if run is not None:
        assert run.cases == 0 and [g.id for g in texts.claimed(run.id)] == [made.id]


def test_a_draft_that_proposed_half_of_the_tokens_left_its_cases() -> None:
    assert [undrafted(plain(rounds=drafted(n))) for n in range(1, 10)] == [True] * 4 + [False] * 5


def test_the_rate_is_of_the_newest_texts_that_have_cases(
    log: Generations, monkeypatch: pytest.MonkeyPatch, texts: TrainingTexts
) -> None:
    made = [
        plain(rounds=drafted(10), cases=[case(i) for i in range(count)] + [case(9, tie=True)]) for count in (5, 1, 3)
    ]
    log.add([*made, plain(rounds=drafted(10)), plain(first_user=HELD_OUT_TEXT, cases=[case(0)])]).result()
    assert texts.untrained(WHO).rate is None, "nothing is undrafted"
    log.add([plain(), plain(cases=[case(7)])]).result()
    assert texts.untrained(WHO) == UntrainedCounts(9, 30, 3, 20, rate=9 / 30)
    monkeypatch.setattr("service.store.log.training_texts.RATED", 2)
    assert texts.untrained(WHO).rate == 4 / 20


def test_expected_cases() -> None:
    counts = UntrainedCounts(cases=10, tokens=100, generations=5)
    assert (counts.expected_cases, counts.expected_tokens) == (10, 100)
    counts = replace(counts, undrafted=200, rate=0.05)
    assert (counts.expected_cases, counts.expected_tokens) == (20, 300)
    assert replace(counts, rate=None).expected_cases == float("inf")


def test_without_a_verdict_they_are_free_and_what_a_run_had_it_keeps(
    log: Generations, runs: Runs, texts: TrainingTexts
) -> None:
    made = plain()
    log.add([made]).result()
    run = claim(runs)
    assert texts.untrained(WHO).undrafted == 0
    runs.move(run.id, run.fencing, RunState.ENDED)
    assert texts.untrained(WHO).undrafted == 10
    reject(runs, claim(runs))
    assert texts.untrained(WHO) == UntrainedCounts(0, 0, 0)
    log.add([replace(made, id="copy", rounds=drafted(10), cases=(case(0),))]).result()
    assert not log.by_ids([made.id])[0].cases, "a copy adds none to what a run has had"
    other = replace(WHO, draft="other")
    assert texts.untrained(other).undrafted == 10, "another draft has not had it"


def test_quarantined_texts_do_not_come_back(
    database: Database, log: Generations, runs: Runs, texts: TrainingTexts
) -> None:
    made = plain()
    log.add([made]).result()
    adapters = Adapters(database, ADAPTERS)
    ref = promote(runs, adapters, claim(runs))
    adapters.roll_back(ref.id, BARE_DRAFT, WON)
    log.add([replace(made, id="copy", rounds=drafted(10), cases=(case(0),))]).result()
    for who in (WHO, replace(WHO, draft="other")):
        assert texts.untrained(who) == UntrainedCounts(0, 0, 0)
    assert not log.by_ids([made.id])[0].cases


def test_they_are_not_replayed_as_texts_without_failures(database: Database, log: Generations, runs: Runs) -> None:
    """A text that was logged between two runs and left no case is offered to the reservoirs; of these nobody knows."""
    parked, well, failed = plain(), plain(rounds=drafted(10)), plain(rounds=drafted(10), cases=[case(1)])
    log.add([parked, well, failed]).result()
    run = runs.claim(trigger=Trigger.CASES, who=WHO, parent=BARE_DRAFT, limit=1)
    assert run is not None
    replay = Replay(database)
    replay.offer_run(run.id, 8, seed=0)
    assert {g.id for g in replay.sample(WHO, 9, 0)} == {well.id, failed.id}


def test_they_outlive_the_process(url: str) -> None:
    made = plain()
    first = Database(url)
    Generations(first).add([made]).result()
    first.close()
    second = Database(url)
    assert TrainingTexts(second).untrained(WHO).undrafted == 10
    second.close()
