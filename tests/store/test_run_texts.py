"""What runs learn from: each draft has a text as new once, and what a rolled-back adapter learnt is put aside."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from sqlalchemy import select

from service.core import AdapterRef, Generation, IllegalMove, Provenance, RunState, Selection, TrainingRun, Trigger
from service.store.database import Database
from service.store.log.generations import TRAIN, Generations, split_of
from service.store.log.quarantine import Quarantine, QuarantinedTexts
from service.store.log.run_texts import Role
from service.store.log.sampler import MIN_TEXTS
from service.store.log.training_texts import TrainingTexts, UntrainedCounts
from service.store.registry.adapters import Adapters
from service.store.registry.lineage import Lineage
from service.store.registry.runs import Runs
from service.store.replay.buffer import Replay
from service.store.tables import generations, run_texts
from tests.support.store_rows import ADAPTERS, HELD_OUT_TEXT, LOST, WHO, case, generation, promote, reject

OTHER = replace(WHO, draft="e" * 64)


class Texts:
    """The stores of one database."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.log, self.runs, self.adapters = Generations(database), Runs(database), Adapters(database, ADAPTERS)
        self.training_texts = TrainingTexts(database)

    def add(self, count: int = 1, cases: int = 1) -> list[Generation]:
        made = [generation(cases=[case(i) for i in range(cases)]) for _ in range(count)]
        self.log.add(made).result()
        return made

    def claim(self, who: Provenance = WHO) -> TrainingRun:
        active = self.adapters.active(who.target, who.draft)
        run = self.runs.claim(trigger=Trigger.CASES, who=who, parent=active.id if active else 0, limit=9)
        assert run is not None
        return run

    def promote(self, run: TrainingRun) -> AdapterRef:
        return promote(self.runs, self.adapters, run)

    def of(self, run: TrainingRun) -> dict[str, str]:
        """Role by generation."""
        query = select(generations.c.id, run_texts.c.role).join_from(
            run_texts, generations, generations.c.seq == run_texts.c.seq
        )
        with self.database.read() as connection:
            return {row.id: row.role for row in connection.execute(query.where(run_texts.c.run == run.id))}


@pytest.fixture
def texts(database: Database) -> Texts:
    return Texts(database)


def test_each_draft_has_a_text_as_new_once(texts: Texts) -> None:
    made = texts.add(2)
    run = texts.claim()
    reject(texts.runs, run)
    assert texts.training_texts.untrained(WHO) == UntrainedCounts(0, 0, 0)
    assert texts.runs.claim(trigger=Trigger.CASES, who=WHO, parent=0, limit=9) is None
    assert texts.training_texts.untrained(OTHER) == UntrainedCounts(2, 10, 2), "another draft has learnt none of it"
    other = texts.claim(OTHER)
    assert texts.of(run) == texts.of(other) == dict.fromkeys([one.id for one in made], "new")


def test_all_that_a_run_learns_from_is_named(texts: Texts) -> None:
    old, new = texts.add(2), texts.add(1)
    run = texts.claim()
    texts.runs.record_texts(run.id, run.fencing, Role.WINDOW, [new[0].id, "general-5", old[0].id])
    well = texts.add(2, cases=0)
    texts.runs.record_texts(run.id, run.fencing, Role.WINDOW, [well[0].id])
    texts.runs.record_texts(run.id, run.fencing, Role.REPLAY, [well[0].id, well[1].id])
    named = {old[0].id: "new", old[1].id: "new", new[0].id: "new", well[0].id: "window", well[1].id: "replay"}
    assert texts.of(run) == named
    with pytest.raises(IllegalMove, match="stale"):
        texts.runs.record_texts(run.id, run.fencing + 1, Role.REPLAY, [well[1].id])
    Lineage(texts.database).erase(Selection(client="ada"))
    assert texts.of(run) == {}, "an erased text is named nowhere"


def test_a_rollback_puts_aside_what_no_standing_adapter_has_learnt(texts: Texts, database: Database) -> None:
    first = texts.add(1)
    promoted = texts.promote(texts.claim())
    lost = texts.add(1)
    reject(texts.runs, texts.claim())
    (well,) = texts.add(1, cases=0)
    second = texts.add(1, cases=2)
    Replay(database).offer("code", [one.id for one in (*first, *lost, well, *second)], 8, 0)
    run = texts.claim()
    texts.runs.record_texts(run.id, run.fencing, Role.WINDOW, [first[0].id, lost[0].id])
    texts.runs.record_texts(run.id, run.fencing, Role.REPLAY, [well.id])
    bad = texts.promote(run)
    texts.adapters.roll_back(bad.id, promoted.id, LOST)
    quarantine = Quarantine(database)
    assert quarantine.all() == [QuarantinedTexts(run.id, bad.id, 3, 3)], (
        "the new, and of the others what only it had learnt"
    )
    assert [one.id for one in Replay(database).sample(WHO, 8, 0)] == [first[0].id]
    assert [one.id for one in texts.training_texts.window(WHO, 0, 9)] == [first[0].id]
    assert quarantine.release(run.id) == 3
    # What was new to either run is free for runs again; what was replayed has no case.
    assert texts.training_texts.untrained(WHO) == UntrainedCounts(3, 10, 2)


def test_a_text_that_is_new_to_a_run_is_not_counted_for_the_next_while_it_runs(texts: Texts) -> None:
    texts.add(3)
    run = texts.claim()
    assert texts.training_texts.untrained(WHO).generations == 0
    texts.runs.move(run.id, run.fencing, RunState.ENDED)
    assert texts.training_texts.untrained(WHO).generations == 3


def test_seeds_are_learnable_chats_of_this_target_and_of_many_clients(database: Database) -> None:
    store, runs, logged = Generations(database), Runs(database), TrainingTexts(database)
    words = [word for word in ("abcdefghij"[i % 10] * (1 + i // 10) for i in range(60)) if split_of(word) == TRAIN]
    loud = [generation(first_user=f"{word}", client="loud", tokens=[7, i]) for i, word in enumerate(words[:30])]
    others = [generation(first_user=word, client=f"client {i}", tokens=[8, i]) for i, word in enumerate(words[30:], 1)]
    left_out = [
        generation(first_user=HELD_OUT_TEXT),
        generation(first_user=" "),
        generation(output=[]),
        generation(who=replace(WHO, target="another")),
    ]
    drafted_otherwise = generation(client="b", who=replace(WHO, draft="another"))
    store.add([*loud, *others, *left_out, drafted_otherwise]).result()
    seeds = logged.seeds(WHO, 100)
    assert {one.id for one in others} | {drafted_otherwise.id} <= set(seeds)
    assert not {one.id for one in left_out} & set(seeds)
    assert len({one.id for one in loud} & set(seeds)) == MIN_TEXTS, "a tenth of these would be fewer"
    assert logged.seeds(WHO, 3) == seeds[:3] and len(seeds[:3]) == 3
    assert {one.id for one in logged.named(seeds)} == set(seeds)
    # Claimed for practice, they are new to the next run on logged texts.
    run = runs.claim(trigger=Trigger.PRACTICE, who=WHO, parent=0, limit=9, seeds=[*seeds, "gone"])
    assert run is not None and (run.cases, run.generations) == (0, len(seeds))
    assert {one.id for one in logged.seeds_of(run.id)} == set(seeds)
    assert logged.claimed(run.id) == []
    # An erasure of one finds the adapter.
    ref = promote(runs, Adapters(database, ADAPTERS), run)
    assert Lineage(database).adapters(Selection(ids=frozenset({others[0].id}))) == {ref.id: 1}
    assert runs.claim(trigger=Trigger.PRACTICE, who=WHO, parent=0, limit=9, seeds=[]) is None


def test_whoever_sends_most_lately_has_no_more_than_its_share_of_the_seeds(database: Database) -> None:
    store, letters = Generations(database), random.Random(0)
    words = ("".join(letters.choices("abcdefghij ", k=40)) for _ in range(1000))
    learnt = [word for word in words if split_of(word) == TRAIN][:270]
    others = [generation(first_user=w, client=f"client {i % 10}", tokens=[8, i]) for i, w in enumerate(learnt[:150])]
    loud = [generation(first_user=w, client="loud", tokens=[7, i]) for i, w in enumerate(learnt[150:])]
    store.add([*others, *loud]).result()
    seeds = TrainingTexts(database).seeds(WHO, 100)
    assert 95 <= len(seeds) <= 100 and len({one.id for one in loud} & set(seeds)) <= 10
    assert seeds == [one.id for one in reversed([*others, *loud]) if one.id in set(seeds)], "newest first"
