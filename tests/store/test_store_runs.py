from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
from sqlalchemy import insert, literal, select, update

from service.core import (
    RUN_MOVES,
    AdapterRef,
    AdapterState,
    IllegalMove,
    NotFound,
    ParentChanged,
    Progress,
    RunState,
    StoreError,
    TrainingRun,
    Trigger,
)
from service.store.database import Database
from service.store.log.generations import Generations
from service.store.log.training_texts import TrainingTexts, UntrainedCounts
from service.store.registry.adapters import Adapters, EvaluationKind
from service.store.registry.runs import Runs
from service.store.replay.buffer import Replay
from service.store.tables import adapters, training_runs
from tests.support.store_rows import ADAPTERS, LOST, START, WHO, WON, case, generation, promote

PATHS = {
    RunState.CLAIMED: [],
    RunState.TRAINING: [RunState.TRAINING],
    RunState.SCORING: [RunState.TRAINING, RunState.SCORING],
    RunState.STAGING: [RunState.TRAINING, RunState.SCORING, RunState.STAGING],
}
OPEN = list(PATHS)


def claim(database: Database, key: str | None = None, limit: int = 100) -> TrainingRun:
    active = Adapters(database, ADAPTERS).active(WHO.target, WHO.draft)
    parent = active.id if active is not None else 0
    run = Runs(database).claim(trigger=Trigger.CASES, who=WHO, parent=parent, limit=limit, idempotency_key=key)
    assert run is not None
    return run


def at(database: Database, state: RunState) -> TrainingRun:
    """A newly claimed run, moved to `state`."""
    Generations(database).add([generation()]).result()
    run = claim(database)
    for step in PATHS[state]:
        run = Runs(database).move(run.id, run.fencing, step)
    return run


def candidate(database: Database, run: TrainingRun, parent: int = 0) -> AdapterRef:
    return Adapters(database, ADAPTERS).add(
        run_id=run.id,
        fencing=run.fencing,
        folder=ADAPTERS / f"{run.id}",
        sha256="5" * 64,
        rank=8,
        scale=2.0,
        keys=["a.lora", "b.lora"],
        draft=WHO.draft,
        parent=parent,
    )


def promoted(database: Database, parent: int = 0) -> AdapterRef:
    run = at(database, RunState.STAGING)
    ref = candidate(database, run, parent)
    Runs(database).promote(run.id, run.fencing, ref.id, WON)
    return Adapters(database, ADAPTERS).get(ref.id)


def test_a_claim_takes_the_newest_and_their_ties(database: Database) -> None:
    store, runs = Generations(database), Runs(database)
    made = [generation(cases=[case(0), case(1, tie=True)]) for _ in range(5)]
    store.add(made).result()
    run = claim(database, limit=3)
    assert (run.state, run.generations, run.cases, run.parent) == (RunState.CLAIMED, 3, 6, 0)
    assert [g.id for g in TrainingTexts(database).claimed(run.id)] == [g.id for g in reversed(made[2:])]
    assert TrainingTexts(database).untrained(WHO) == UntrainedCounts(2, 10, 2)
    assert runs.current(WHO) == run == runs.get(run.id)
    assert runs.claim(trigger=Trigger.MANUAL, who=WHO, parent=0, limit=9) is None


def test_a_run_says_for_which_pair_and_with_which_settings_it_was_claimed(database: Database) -> None:
    runs, other = Runs(database), replace(WHO, draft="e" * 64)
    first = promoted(database)
    Generations(database).add([generation(who=other)]).result()
    given = {"rank": 4, "learning_rate": 0.001, "pause_when_hot": True}
    second = runs.claim(trigger=Trigger.MANUAL, who=other, parent=0, limit=9, config=given)
    assert second is not None
    under_way = at(database, RunState.TRAINING)
    runs.move(second.id, second.fencing, RunState.FAILED, error="NaN")
    assert runs.recipe(first.run or 0) == (WHO, {})
    assert runs.recipe(second.id) == (other, given)
    assert runs.recipe(under_way.id) == (WHO, {})
    with pytest.raises(NotFound):
        runs.recipe(99)


def test_nothing_to_train_on_is_no_run(database: Database) -> None:
    Generations(database).add([generation(cases=[case(0, tie=True)]), generation(cases=[])]).result()
    assert Runs(database).claim(trigger=Trigger.CASES, who=WHO, parent=0, limit=9) is None
    assert Runs(database).current(WHO) is None


def test_promotion_is_one_step_for_run_adapters_and_cases(database: Database) -> None:
    store, adapters, runs = Generations(database), Adapters(database, ADAPTERS), Runs(database)
    first = promoted(database)
    second = promoted(database, parent=first.id)
    assert adapters.get(first.id).state is AdapterState.RETIRED
    assert adapters.active(WHO.target, WHO.draft) == second
    assert second.keys == ("a.lora", "b.lora")
    run = runs.get(second.run or 0)
    assert (run.state, run.adapter, run.verdict) == (RunState.PROMOTED, second.id, WON)
    assert run.finished_at is not None
    assert [verdict for _, verdict in adapters.evaluations(second.id, EvaluationKind.GATE)] == [WON]
    assert (TrainingTexts(database).untrained(WHO).cases, store.stats().trained) == (0, 2)
    assert len(TrainingTexts(database).claimed(run.id)) == 1, "what it learnt from stays known"
    assert runs.current(WHO) is None


@pytest.mark.parametrize("word", ["an adapter", "the bare draft"])
def test_a_candidate_is_promoted_only_over_what_it_was_compared_with(database: Database, word: str) -> None:
    adapters, runs = Adapters(database, ADAPTERS), Runs(database)
    old, parent = promoted(database), promoted(database, parent=1)
    run = at(database, RunState.STAGING)
    ref = candidate(database, run, parent.id)
    # Meanwhile another adapter is activated, perhaps by another process.
    adapters.activate(old.id if word == "an adapter" else 0, WHO.target, WHO.draft)
    before = adapters.active(WHO.target, WHO.draft)
    with pytest.raises(ParentChanged, match=f"adapter {parent.id}, which it was compared with, no longer serves"):
        runs.promote(run.id, run.fencing, ref.id, WON)
    assert adapters.active(WHO.target, WHO.draft) == before
    assert adapters.get(ref.id).state is AdapterState.CANDIDATE
    assert runs.get(run.id).state is RunState.STAGING
    runs.reject(run.id, run.fencing, ref.id, LOST)


def test_a_lost_gate_uses_up_the_cases(database: Database) -> None:
    run = at(database, RunState.SCORING)
    ref = candidate(database, run)
    lost = Runs(database).reject(run.id, run.fencing, ref.id, LOST)
    assert (lost.state, lost.verdict) == (RunState.REJECTED, LOST)
    assert Adapters(database, ADAPTERS).get(ref.id).state is AdapterState.REJECTED
    assert Adapters(database, ADAPTERS).active(WHO.target, WHO.draft) is None
    assert Generations(database).stats().trained == 1
    assert TrainingTexts(database).untrained(WHO).cases == 0


@pytest.mark.parametrize("end", [state for state in RunState if state.gives_texts_back])
def test_a_run_without_a_verdict_gives_its_texts_back_and_records_the_reason(database: Database, end: RunState) -> None:
    run = at(database, RunState.TRAINING)
    assert TrainingTexts(database).untrained(WHO).cases == 0
    ended = Runs(database).move(run.id, run.fencing, end, error="the reason")
    assert ended.state is end and ended.texts_given_back and str(ended.error).startswith("the reason")
    assert Generations(database).stats().trained == Generations(database).stats().quarantined == 0
    assert TrainingTexts(database).untrained(WHO).cases == 1
    assert claim(database).generations == 1


@pytest.mark.parametrize("state", OPEN)
def test_only_legal_moves_are_made(database: Database, state: RunState) -> None:
    runs = Runs(database)
    run = at(database, state)
    # Rejecting and promoting have their own methods, which take the adapter and its verdict.
    for aim in (set(RunState) - RUN_MOVES[state]) | {RunState.PROMOTED, RunState.REJECTED}:
        with pytest.raises(IllegalMove, match=str(run.id)):
            runs.move(run.id, run.fencing, aim)
    if RunState.PROMOTED not in RUN_MOVES[state]:
        with pytest.raises(IllegalMove):
            runs.promote(run.id, run.fencing, candidate(database, run).id, WON)
        assert Adapters(database, ADAPTERS).active(WHO.target, WHO.draft) is None
    assert runs.get(run.id).state is state


@pytest.mark.parametrize("end", [state for state in RunState if state.gives_texts_back])
def test_a_finished_run_stays_finished(database: Database, end: RunState) -> None:
    runs = Runs(database)
    run = at(database, RunState.SCORING)
    ref = candidate(database, run)
    over = runs.move(run.id, run.fencing, end)
    for state in RunState:
        with pytest.raises(IllegalMove):
            runs.move(run.id, run.fencing, state)
    with pytest.raises(IllegalMove):
        runs.progress(run.id, run.fencing, Progress(1, 2, 0.5))
    with pytest.raises(IllegalMove):
        runs.promote(run.id, run.fencing, ref.id, WON)
    with pytest.raises(IllegalMove):
        runs.reject(run.id, run.fencing, ref.id, LOST)
    with pytest.raises(IllegalMove):
        Adapters(database, ADAPTERS).add(
            run_id=run.id,
            fencing=run.fencing,
            folder=ADAPTERS / "late",
            sha256="6" * 64,
            rank=8,
            scale=2.0,
            keys=[],
            draft=WHO.draft,
            parent=0,
        )
    assert runs.get(run.id) == over
    assert Adapters(database, ADAPTERS).get(ref.id).state is AdapterState.CANDIDATE


@pytest.mark.parametrize("offset", [-1, 1])
def test_a_stale_token_moves_nothing(database: Database, offset: int) -> None:
    runs, adapters = Runs(database), Adapters(database, ADAPTERS)
    first = at(database, RunState.CLAIMED)
    runs.move(first.id, first.fencing, RunState.ENDED)
    run = at(database, RunState.SCORING)
    assert run.fencing == first.fencing + 1
    ref = candidate(database, run)
    before, stale = runs.get(run.id), run.fencing + offset
    with pytest.raises(IllegalMove, match="stale"):
        runs.move(run.id, stale, RunState.STAGING)
    with pytest.raises(IllegalMove, match="stale"):
        runs.progress(run.id, stale, Progress(1, 2, 0.5))
    with pytest.raises(IllegalMove, match="stale"):
        runs.promote(run.id, stale, ref.id, WON)
    with pytest.raises(IllegalMove, match="stale"):
        runs.reject(run.id, stale, ref.id, LOST)
    with pytest.raises(IllegalMove, match="stale"):
        adapters.add(
            run_id=run.id,
            fencing=stale,
            folder=ADAPTERS / "stale",
            sha256="6" * 64,
            rank=8,
            scale=2.0,
            keys=[],
            draft=WHO.draft,
            parent=0,
        )
    assert runs.get(run.id) == before
    assert [a.id for a in adapters.all()] == [ref.id]


def test_unknown_ids_are_not_found(database: Database) -> None:
    runs, adapters = Runs(database), Adapters(database, ADAPTERS)
    for ask in (
        runs.get,
        runs.loss_curve,
        adapters.get,
        lambda i: adapters.activate(i, WHO.target, WHO.draft),
        lambda i: adapters.roll_back(i, 0, LOST),
    ):
        with pytest.raises(NotFound):
            ask(99)
    with pytest.raises(NotFound):
        runs.move(99, 1, RunState.TRAINING)


@pytest.mark.promise(15)
def test_eight_claims_at_once_make_one_run(url: str) -> None:
    databases = [Database(url) for _ in range(2)]  # another process' writer is another thread to SQLite
    Generations(databases[0]).add([generation() for _ in range(5)]).result()
    barrier = threading.Barrier(8)
    claimed: list[TrainingRun | None] = []

    def work(database: Database) -> None:
        barrier.wait()
        claimed.append(Runs(database).claim(trigger=Trigger.CASES, who=WHO, parent=0, limit=2))

    threads = [threading.Thread(target=work, args=(databases[i % 2],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claimed) == 8
    assert len([run for run in claimed if run is not None]) == 1
    assert len(Runs(databases[0]).latest(10)) == 1
    for database in databases:
        database.close()


def test_each_pair_has_one_open_run(database: Database) -> None:
    runs = Runs(database)
    pairs = [WHO, replace(WHO, draft="e" * 64), replace(WHO, target="u" * 64), replace(WHO, tokenizer="l" * 64)]
    Generations(database).add([generation(who=who) for who in pairs for _ in range(2)]).result()
    opened = [runs.claim(trigger=Trigger.CASES, who=who, parent=0, limit=1) for who in pairs]
    assert [runs.current(who) for who in pairs] == opened
    assert None not in opened and runs.unfinished() == opened[::-1]
    assert not any(runs.claim(trigger=Trigger.CASES, who=who, parent=0, limit=1) for who in pairs)
    first = runs.unfinished()[-1]
    runs.move(first.id, first.fencing, RunState.FAILED)
    assert runs.current(WHO) is None and len(runs.unfinished()) == 3
    assert runs.claim(trigger=Trigger.CASES, who=WHO, parent=0, limit=1) is not None


@pytest.mark.parametrize("state", list(RunState))
def test_the_database_itself_allows_one_open_run_of_a_pair(database: Database, state: RunState) -> None:
    run = at(database, RunState.CLAIMED)
    columns = [column.name for column in training_runs.columns if column.name not in {"id", "state"}]
    twin = insert(training_runs).from_select(
        ["state", *columns], select(literal(state.value), *(training_runs.c[name] for name in columns))
    )
    with pytest.raises(StoreError, match=r"(?i)unique") if not state.over else nullcontext():
        database.write(lambda connection: connection.execute(twin)).result()
    assert Runs(database).unfinished() == [run]


def test_the_database_itself_allows_one_active_adapter_of_a_pair(database: Database) -> None:
    Generations(database).add([generation()]).result()
    ref = promote(Runs(database), Adapters(database, ADAPTERS), claim(database))
    twin = {"folder": "other", "sha256": "", "rank": 1, "scale": 1.0, "keys": "[]", "parent": 0, "created_at": START}

    def add(target: str, draft: str, state: AdapterState) -> None:
        values = twin | {"folder": f"{target} {draft} {state}", "target": target, "draft": draft, "state": state.value}
        database.write(lambda connection: connection.execute(insert(adapters).values(**values))).result()

    with pytest.raises(StoreError, match=r"(?i)unique"):
        add(WHO.target, WHO.draft, AdapterState.ACTIVE)
    add(WHO.target, WHO.draft, AdapterState.RETIRED)
    add(WHO.target, "other", AdapterState.ACTIVE)
    add("other", WHO.draft, AdapterState.ACTIVE)
    active = Adapters(database, ADAPTERS).active(WHO.target, WHO.draft)
    assert active is not None and active.id == ref.id


@pytest.mark.promise(15)
def test_a_key_names_one_run_for_ever(database: Database) -> None:
    runs = Runs(database)
    Generations(database).add([generation()]).result()
    run = claim(database, key="again")
    assert claim(database, key="again") == run == runs.by_key("again")
    over = runs.move(run.id, run.fencing, RunState.FAILED, error="x")
    Generations(database).add([generation()]).result()
    assert claim(database, key="again") == over
    assert runs.by_key("other") is None
    assert claim(database, key="other").id != run.id


def test_progress_becomes_a_curve(database: Database) -> None:
    runs = Runs(database)
    run = at(database, RunState.TRAINING)
    for step in range(3):
        runs.progress(run.id, run.fencing, Progress(step, 3, 1.0 / (step + 1), 0.5, 100.0, 2.0))
    runs.progress(run.id, run.fencing, Progress(3, 3))
    assert runs.loss_curve(run.id) == [(0, 1.0), (1, 0.5), (2, 1.0 / 3)]
    assert runs.get(run.id).progress == Progress(3, 3)


def test_a_rollback_reaches_the_nearest_servable_ancestor(database: Database) -> None:
    adapters = Adapters(database, ADAPTERS)
    first = promoted(database)
    second = promoted(database, parent=first.id)
    third = promoted(database, parent=second.id)
    adapters.mark_broken(second.id, "its file is gone")
    back = adapters.roll_back(third.id, third.parent, LOST)
    assert back is not None
    assert (back.id, back.state) == (first.id, AdapterState.ACTIVE)
    assert adapters.get(third.id).state is AdapterState.ROLLED_BACK
    assert adapters.roll_back(first.id, first.parent, LOST) is None
    assert adapters.active(WHO.target, WHO.draft) is None
    with pytest.raises(IllegalMove):
        adapters.roll_back(first.id, first.parent, LOST)


def test_an_ancestor_takes_the_place_of_a_broken_adapter_that_served(database: Database) -> None:
    """In one write: a process that dies after it leaves no draft without its adapter."""
    adapters = Adapters(database, ADAPTERS)
    first = promoted(database)
    second = promoted(database, parent=first.id)
    third = promoted(database, parent=second.id)
    adapters.mark_broken(second.id, "damaged")
    assert adapters.active(WHO.target, WHO.draft) == third
    adapters.mark_broken(third.id, "damaged")
    assert adapters.active(WHO.target, WHO.draft) == adapters.get(first.id)
    adapters.mark_broken(first.id, "damaged")
    assert adapters.active(WHO.target, WHO.draft) is None


def test_a_rolled_back_ancestor_returns_only_by_an_operators_choice(database: Database) -> None:
    adapters = Adapters(database, ADAPTERS)
    first = promoted(database)
    second = promoted(database, parent=first.id)
    assert adapters.roll_back(second.id, second.parent, LOST) == adapters.get(first.id)
    assert adapters.roll_back(first.id, first.parent, LOST) is None
    adapters.activate(second.id, WHO.target, WHO.draft)
    assert adapters.roll_back(second.id, second.parent, LOST) is None
    assert adapters.get(first.id).state is AdapterState.ROLLED_BACK
    assert adapters.active(WHO.target, WHO.draft) is None


def test_an_operator_may_choose_only_adapters_that_served_before(database: Database) -> None:
    adapters = Adapters(database, ADAPTERS)
    first = promoted(database)
    second = promoted(database, parent=first.id)
    adapters.activate(first.id, WHO.target, WHO.draft)
    assert adapters.get(second.id).state is AdapterState.RETIRED
    adapters.roll_back(first.id, first.parent, LOST)
    again = adapters.activate(first.id, WHO.target, WHO.draft)
    assert again is not None
    assert adapters.activate(first.id, WHO.target, WHO.draft) == again
    with pytest.raises(IllegalMove, match="another draft"):
        adapters.activate(second.id, WHO.target, "e" * 64)
    with pytest.raises(IllegalMove, match="another target"):
        adapters.activate(second.id, "e" * 64, WHO.draft)
    assert adapters.activate(0, WHO.target, WHO.draft) is None
    assert adapters.active(WHO.target, WHO.draft) is None
    run = at(database, RunState.SCORING)
    unproven = candidate(database, run)
    Runs(database).reject(run.id, run.fencing, unproven.id, LOST)
    adapters.mark_broken(second.id, "damaged")
    for ref in (unproven, second):
        with pytest.raises(IllegalMove):
            adapters.activate(ref.id, WHO.target, WHO.draft)
    assert adapters.active(WHO.target, WHO.draft) is None


def test_a_run_is_judged_by_its_own_adapter(database: Database) -> None:
    runs, adapters = Runs(database), Adapters(database, ADAPTERS)
    earlier = promoted(database)
    adapters.activate(0, WHO.target, WHO.draft)
    run = at(database, RunState.STAGING)
    with pytest.raises(IllegalMove, match="another draft"):
        adapters.add(
            run_id=run.id,
            fencing=run.fencing,
            folder=ADAPTERS / "foreign",
            sha256="6" * 64,
            rank=8,
            scale=2.0,
            keys=[],
            draft="e" * 64,
            parent=0,
        )
    with pytest.raises(IllegalMove, match="not of run"):
        runs.promote(run.id, run.fencing, earlier.id, WON)
    with pytest.raises(IllegalMove, match="not of run"):
        runs.reject(run.id, run.fencing, earlier.id, LOST)
    with pytest.raises(NotFound):
        runs.promote(run.id, run.fencing, 99, WON)
    assert runs.get(run.id).state is RunState.STAGING
    assert adapters.active(WHO.target, WHO.draft) is None


def test_a_pause_is_recorded_without_changing_other_progress(database: Database) -> None:
    runs = Runs(database)
    run = at(database, RunState.TRAINING)
    runs.progress(run.id, run.fencing, Progress(1, 3, 0.5, 0.5, 100.0, 2.0))
    assert runs.pause(run.id, run.fencing, "on battery").progress == Progress(1, 3, 0.5, 0.5, 100.0, 2.0, "on battery")
    assert runs.pause(run.id, run.fencing, None).progress == Progress(1, 3, 0.5, 0.5, 100.0, 2.0)
    assert runs.loss_curve(run.id) == [(1, 0.5)]
    with pytest.raises(IllegalMove):
        runs.pause(run.id, run.fencing - 1, "on battery")


def test_a_rollback_quarantines_cases_and_empties_their_replay(database: Database) -> None:
    store, adapters, replay = Generations(database), Adapters(database, ADAPTERS), Replay(database)
    good = generation(cases=[case(0)])
    store.add([good]).result()
    first = promoted(database)  # claims everything there is
    replay.offer("code", [good.id], 10, 0)
    bad = [generation(cases=[case(0), case(1, tie=True)]) for _ in range(2)]
    store.add(bad).result()
    second = promoted(database, parent=first.id)
    replay.offer("code", [one.id for one in bad], 10, 0)
    assert replay.sizes() == {("code", ""): 3}
    back = adapters.roll_back(second.id, first.id, LOST)
    assert back is not None and (back.id, back.state) == (first.id, AdapterState.ACTIVE)
    assert adapters.get(second.id).state is AdapterState.ROLLED_BACK
    assert [verdict for _, verdict in adapters.evaluations(second.id, EvaluationKind.WATCH)] == [LOST]
    assert replay.sizes() == {("code", ""): 1}
    # Two generations, and one that `promoted` made for its run.
    assert store.stats().quarantined == 5
    assert TrainingTexts(database).untrained(WHO).cases == 0
    assert [verdict for _, verdict in adapters.watched(WHO.target, WHO.draft, 9)] == [LOST]
    assert adapters.watched(WHO.target, "another", 9) == adapters.watched("another", WHO.draft, 9) == []


def test_an_ancestor_of_another_target_does_not_take_its_place(database: Database) -> None:
    """Before adapters were of one target, a run could start from one of another."""
    store = Adapters(database, ADAPTERS)
    first = promoted(database)
    second = promoted(database, parent=first.id)
    other = update(adapters).where(adapters.c.id == first.id).values(target="other")
    database.write(lambda connection: connection.execute(other)).result()
    assert store.roll_back(second.id, first.id, LOST) is None
    assert store.active(WHO.target, WHO.draft) is None
    assert store.get(first.id).state is AdapterState.RETIRED


def test_taking_back_may_mean_the_bare_draft(database: Database) -> None:
    adapters = Adapters(database, ADAPTERS)
    first = promoted(database)
    second = promoted(database, parent=first.id)
    assert adapters.roll_back(second.id, 0, LOST) is None
    assert adapters.active(WHO.target, WHO.draft) is None
    assert adapters.get(first.id).state is AdapterState.RETIRED
    with pytest.raises(IllegalMove):
        adapters.roll_back(second.id, 0, LOST)
    assert len(adapters.evaluations(second.id, EvaluationKind.WATCH)) == 1, "a refused move changes nothing"


def test_watches_are_listed_newest_first(database: Database) -> None:
    adapters = Adapters(database, ADAPTERS)
    first = promoted(database)
    adapters.record_evaluation(first.id, EvaluationKind.INTERIM, WON)
    adapters.record_evaluation(first.id, EvaluationKind.WATCH, WON)
    second = promoted(database, parent=first.id)
    adapters.roll_back(second.id, first.id, LOST)
    assert [verdict for _, verdict in adapters.watched(WHO.target, WHO.draft, 9)] == [LOST, WON]
    assert [verdict for _, verdict in adapters.watched(WHO.target, WHO.draft, 1)] == [LOST]
