from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select, text

from service.core import BadRequest, Erased, Generation, Provenance, Round, Sampling, Selection, Trigger
from service.store.database import Database
from service.store.log.generations import Generations, split_of
from service.store.log.rows import id_bytes, target_bytes, values_of
from service.store.log.run_texts import PAGE
from service.store.log.training_texts import TrainingTexts, UntrainedCounts
from service.store.registry.lineage import Lineage
from service.store.registry.runs import Runs
from service.store.replay.buffer import Replay
from service.store.tables import metadata
from tests.support.databases import BY_NIGHT
from tests.support.store_rows import START, WHO, case, generation, reject, targets, texts


def test_a_generation_is_read_as_it_was_stored(database: Database) -> None:
    store = Generations(database)
    made = generation(collected=targets(5), cases=[case(1), case(3, tie=True)])
    bare = generation(client=None, domain=None, cases=[], output=[], first_user="")
    assert store.add([made, bare]).result() == 2
    back, nothing = store.by_ids([made.id])[0], store.by_ids([bare.id])[0]
    assert back == made
    assert nothing == bare
    assert back.targets is not None
    assert back.targets.positions == len(back.output)
    logprobs = np.frombuffer(back.targets.logprobs, "<f2")
    assert np.isfinite(logprobs).all()
    assert not np.isnan(np.frombuffer(back.targets.tail, "<f2")).any()
    assert not any(math.isnan(value) for value in (*back.logprobs, *back.sampled_logprobs))


def test_how_an_answer_was_sampled_comes_back(database: Database) -> None:
    store, made = Generations(database), generation()
    sampling = replace(made.prompt.sampling, repetition_penalty=1.1, stop_token_ids=(5, 7), include_stop=True)
    penalised = generation()
    penalised = replace(penalised, prompt=replace(penalised.prompt, sampling=sampling))
    store.add([made, penalised]).result()
    assert store.by_ids([penalised.id]) == [penalised]
    # An older version may read the same database.
    usual = {"temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop"}
    assert set(json.loads(values_of(made)["sampling"])) == usual


def test_targets_of_every_shape_come_back(database: Database) -> None:
    store = Generations(database)
    made = [
        generation(tokens=(top,), collected=targets(positions, top, seed=top), output=range(positions))
        for positions in (0, 1, 7)
        for top in (1, 32)
    ]
    store.add(made).result()
    assert {g.id: g.targets for g in store.by_ids([g.id for g in made])} == {g.id: g.targets for g in made}


def test_the_newest_outputs_of_a_target_are_read(database: Database) -> None:
    store, made, other = Generations(database), [generation() for _ in range(7)], replace(WHO, target="x" * 64)
    made[2] = replace(made[2], prompt=replace(made[2].prompt, api_key="ada"))
    # Of another draft, it is the target's all the same.
    made[4] = replace(made[4], provenance=replace(WHO, draft="y" * 64))
    made = [replace(one, created_at=START + timedelta(days=i)) for i, one in enumerate(made)]
    for one in made:
        store.add([one, *(generation(who=other) for _ in range(4))]).result()
    wanted = [(one.prompt.api_key, one.output) for one in made]
    assert store.outputs(WHO, 10**6, 100) == wanted and wanted[2][0] == "ada"
    assert len(store.outputs(other, 10**6, 100)) == 28 and len(store.outputs(other, 10**6, 9)) == 8
    few = sum(len(one.output) for one in made[-3:])
    assert store.outputs(WHO, few, 100) == wanted[-3:] and store.outputs(WHO, few - 1, 100) == wanted[-2:]
    assert store.outputs(WHO, 10**6, 100, START + timedelta(days=4.5)) == wanted[-2:]


def test_rows_of_another_target_or_tokenizer_never_mix(database: Database) -> None:
    store, runs = Generations(database), Runs(database)
    held = texts("held_out", 1)[0]
    strangers = [replace(WHO, target="x" * 64), replace(WHO, tokenizer="y" * 64)]
    mine = [generation(), generation(first_user=held)]
    store.add(mine).result()
    for who in strangers:
        store.add([generation(who=who), generation(who=who), generation(first_user=held, who=who)]).result()
    for who in strangers:
        assert TrainingTexts(database).untrained(who) == UntrainedCounts(2, 10, 2)
    assert TrainingTexts(database).untrained(WHO) == UntrainedCounts(1, 5, 1)
    assert [g.id for g in store.held_out(WHO, 10)] == [mine[1].id]
    assert set(store.names_after(WHO, 0, 10)) == {g.id for g in mine}
    run = runs.claim(trigger=Trigger.CASES, who=WHO, parent=0, limit=10)
    assert run is not None
    assert [g.id for g in TrainingTexts(database).claimed(run.id)] == [mine[0].id]
    assert TrainingTexts(database).claimed_names(run.id) == [(mine[0].id, mine[0].prompt.domain)]
    replay = Replay(database)
    replay.offer("code", store.names_after(strangers[0], 0, 10), 10, 0)
    assert replay.sample(WHO, 10, 0) == []


def test_of_a_pair_the_newest_are_found_among_any_number_of_others(database: Database) -> None:
    store, other = Generations(database), replace(WHO, draft="e" * 64)
    made = [generation(who=WHO if i % 10 == 0 else other) for i in range(3 * PAGE)]
    store.add(made).result()
    mine = [one.id for one in reversed(made[::10])]
    assert store.names_after(WHO, 0, 100) == mine[:100] and len(mine) > 100
    assert [one.id for one in store.texts_after(WHO, 0, 10**6)] == mine
    assert store.names_after(WHO, PAGE, 10**6) == [one.id for one in reversed(made[PAGE:]) if one.id in set(mine)]


def test_another_draft_of_the_same_target_is_a_sample_all_the_same(database: Database) -> None:
    store = Generations(database)
    store.add([generation(who=Provenance(WHO.target, WHO.tokenizer, "e" * 64))]).result()
    assert TrainingTexts(database).untrained(WHO).cases == 1


def test_adding_twice_changes_nothing(database: Database) -> None:
    store = Generations(database)
    made = generation()
    assert store.add([made, made]).result() == 1
    assert store.add([replace(made, output=(1,)), generation()]).result() == 1
    assert store.by_ids([made.id]) == [made]
    assert store.stats().cases == 2


def test_generations_with_store_false_are_not_stored(database: Database) -> None:
    store = Generations(database)
    assert store.add([generation(store=False), generation()]).result() == 1
    assert store.stats().generations == 1


def test_counts_leave_out_ties_and_the_held_out(database: Database) -> None:
    store = Generations(database)
    store.add(
        [
            generation(cases=[case(0), case(1), case(2, tie=True)]),
            generation(cases=[case(0, tie=True)]),
            generation(cases=[]),
            generation(first_user=texts("held_out", 1)[0]),
        ]
    ).result()
    assert TrainingTexts(database).untrained(WHO) == UntrainedCounts(2, 5, 1)


def test_held_out_gives_the_newest_of_every_prompt(database: Database) -> None:
    store = Generations(database)
    one, two = texts("held_out", 2)
    made = [
        generation(first_user=one, tokens=[1]),
        generation(first_user=two, tokens=[2]),
        generation(first_user=one, tokens=[1]),
        generation(first_user=two, tokens=[3], output=[]),
    ]
    store.add(made).result()
    assert [g.id for g in store.held_out(WHO, 10)] == [made[2].id, made[1].id]
    assert [g.id for g in store.held_out(WHO, 1)] == [made[2].id]


def test_after_lists_later_generations_newest_first(database: Database) -> None:
    store = Generations(database)
    # Whatever the clocks of their machines say.
    made = [generation(created=START - timedelta(hours=i)) for i in range(5)]
    store.add(made).result()
    assert store.names_after(WHO, 2, 10) == [g.id for g in reversed(made[2:])]
    assert store.names_after(WHO, 2, 2) == [made[4].id, made[3].id]
    assert [text.id for text in store.texts_after(WHO, 3, 10)] == [made[4].id, made[3].id]


@given(st.text())
def test_the_split_is_a_function_of_the_text(first_user: str) -> None:
    assert split_of(first_user) == split_of(str(first_user)) in ("train", "held_out")


def test_prompts_without_a_message_are_split_by_their_tokens(database: Database) -> None:
    store = Generations(database)
    made = [generation(first_user="", tokens=[i], cases=[]) for i in range(60) for _ in range(2)]
    store.add(made).result()
    held = {one.prompt.tokens for one in made if split_of(id_bytes(one.prompt.tokens).hex()) == "held_out"}
    assert 3 < len(held) < 30
    assert {one.prompt.tokens for one in store.held_out(WHO, 100)} == held, "every answer to a prompt is on its side"


def test_one_prompt_in_five_is_held_out() -> None:
    # The hash's first byte is below 256: 52 of 256 values are multiples of five.
    count, share = 20_000, 52 / 256
    held = sum(split_of(f"prompt {i}") == "held_out" for i in range(count))
    assert abs(held - count * share) < 5 * math.sqrt(count * share * (1 - share))


CANARY_TEXT = "canary-7f3a-" + "q" * 3000
CANARY_TOKENS = [0xC0FFEE, 0xBADCAB, 0xFACADE] * 700


@pytest.mark.parametrize(
    "selection",
    [
        Selection(client="mallory"),
        Selection(domain="secret"),
        Selection(client="mallory", domain="secret"),
        Selection(ids=frozenset({"secret0", "secret1", "secret2", "unknown"})),
        Selection(before=START),
        None,
    ],
    ids=["client", "domain", "both", "ids", "before", "purge"],
)
@pytest.mark.promise(30)
def test_removed_texts_leave_no_bytes(database: Database, tmp_path: Path, selection: Selection | None) -> None:
    """In PostgreSQL no rows: what stays in its files until VACUUM is the server's."""
    store, replay = Generations(database), Replay(database)
    secrets = [
        generation(
            id=f"secret{i}",
            first_user=CANARY_TEXT + texts("train", 3, CANARY_TEXT)[i][len(CANARY_TEXT) :],
            tokens=[*CANARY_TOKENS, i],
            output=CANARY_TOKENS,
            client="mallory",
            domain="secret",
            collected=targets(2100),
            created=START - timedelta(seconds=i + 1),
        )
        for i in range(3)
    ]
    open_ones = [generation(domain="open", collected=targets(5)) for _ in range(20)]
    store.add([*secrets, *open_ones]).result()
    replay.offer("secret", [g.id for g in secrets], 8, 0)
    canaries = (b"canary-7f3a", np.array(CANARY_TOKENS[:3], "<u4").tobytes())

    def on_disk() -> bytes:
        if files := list(tmp_path.glob("redraft.db*")):
            return b"".join(path.read_bytes() for path in files)
        with database.read() as connection:
            rows = [row for table in metadata.sorted_tables for row in connection.execute(select(table))]
        return b"".join(each if isinstance(each, bytes) else str(each).encode() for row in rows for each in row)

    assert all(canary in on_disk() for canary in canaries)
    if selection is None:
        assert store.purge(keep=20, spare_replay=False).result() == 3
    else:
        assert Lineage(database).erase(selection) == Erased(3, (), ())
    assert not any(canary in on_disk() for canary in canaries)
    assert set(store.names_after(WHO, 0, 100)) == {g.id for g in open_ones}
    assert store.stats().cases == len(open_ones)
    assert replay.sizes() == {}


def test_erasing_needs_a_selection(database: Database) -> None:
    store = Generations(database)
    store.add([generation(client="ada"), generation(client="bob")]).result()
    for wrong in ({}, {"client": "ada", "everything": True}):
        with pytest.raises(BadRequest, match="everything"):
            Selection(**wrong)  # pyright: ignore[reportArgumentType]
    lineage = Lineage(database)
    assert lineage.erase(Selection(client="nobody")).generations == 0
    assert lineage.erase(Selection(client="ada", domain="elsewhere")).generations == 0
    assert lineage.erase(Selection(everything=True)).generations == 2
    assert store.stats().generations == 0


def test_purge_keeps_the_newest(database: Database) -> None:
    store = Generations(database)
    made = [generation() for _ in range(10)]
    store.add(made).result()
    assert store.purge(keep=10).result() == 0
    assert store.purge(keep=4).result() == 6
    assert {g.id for g in store.by_ids([g.id for g in made])} == {g.id for g in made[-4:]}
    assert store.purge(keep=0).result() == 4


def test_purge_by_age_and_by_size_spares_nothing(database: Database) -> None:
    store = Generations(database)
    made = [replace(generation(collected=targets(5)), created_at=START + timedelta(days=day)) for day in range(10)]
    store.add(made).result()
    everything = Selection(everything=True)
    assert store.names(everything) == [g.id for g in made]
    assert store.names(Selection(before=START + timedelta(days=2))) == [g.id for g in made[:2]]
    replay = Replay(database)
    replay.offer("all", [g.id for g in made[:3]], 100, seed=0)
    assert store.purge(keep=7).result() == 0, "they are replayed"
    assert store.purge(keep=100, before=START + timedelta(days=3)).result() == 3
    one = stored_bytes(made[0])
    assert store.purge(keep=100, max_bytes=7 * one).result() == 0
    assert store.purge(keep=100, max_bytes=4 * one - 1).result() == 4
    assert store.names(everything) == [g.id for g in made[7:]]
    assert store.purge(keep=100, before=START + timedelta(days=20), max_bytes=1).result() == 3


def stored_bytes(made: Generation) -> int:
    values = values_of(made)
    assert made.targets is not None
    names = ("prompt", "output", "first_user", "rounds", "logprobs", "sampled_logprobs")
    return sum(len(values[name]) for name in names) + len(target_bytes(made.targets))


@BY_NIGHT
def test_eight_hundred_copies_count_once(database: Database) -> None:
    store, runs = Generations(database), Runs(database)
    first = generation(tokens=[1, 2], output=[3, 4, 5], cases=[case(0), case(1)])
    copies = [replace(first, id=f"copy{i}", prompt=replace(first.prompt, client=f"c{i}")) for i in range(799)]
    store.add([first, *copies]).result()
    other = generation()
    assert store.add([other]).result() == 1
    assert TrainingTexts(database).untrained(WHO) == UntrainedCounts(cases=3, tokens=8, generations=2)
    stats = store.stats()
    assert (stats.requests, stats.generations, stats.cases) == (801, 2, 3)
    run = runs.claim(trigger=Trigger.CASES, who=WHO, parent=0, limit=10)
    assert run is not None and (run.cases, run.generations) == (3, 2)
    reject(runs, run)
    # A run has claimed the text, so copies of it are not new while the same adapter serves.
    store.add([replace(first, id="later")]).result()
    assert TrainingTexts(database).untrained(WHO).cases == 0


@pytest.mark.parametrize("other", ["prompt", "output", "split", "adapter", "draft", "target"])
def test_different_texts_are_no_copies(database: Database, other: str) -> None:
    store = Generations(database)
    made = generation(tokens=[1, 2], output=[3, 4])
    prompt = replace(made.prompt, tokens=(1, 9)) if other == "prompt" else made.prompt
    if other == "split":  # the same tokens, cut elsewhere
        prompt = replace(made.prompt, tokens=(1, 2, 3))
    changed = replace(
        made,
        id="other",
        prompt=prompt,
        output={"output": (3, 9), "split": (4,)}.get(other, made.output),
        rounds=(Round(8, 0, 4, 2, 3),) if other == "adapter" else made.rounds,
        provenance=replace(WHO, **{other: "x"}) if other in {"draft", "target"} else WHO,
    )
    assert store.add([made, changed, replace(changed, id="copy")]).result() == 2
    assert store.stats().requests == 3


def test_a_text_that_was_not_drafted_gets_the_cases_of_a_copy_that_was(database: Database) -> None:
    store = Generations(database)
    plain = tuple(Round(0, at, 0, 0, 1) for at in range(5))
    drafted = generation(output=range(5), cases=[case(2)], collected=targets(5))
    drafted = replace(drafted, prompt=replace(drafted.prompt, sampling=Sampling()), rounds=(Round(0, 0, 5, 4, 5),))
    store.add([replace(drafted, id="parked", rounds=plain, cases=())]).result()
    assert TrainingTexts(database).untrained(WHO).undrafted == 5
    store.add([replace(drafted, id="parked again", rounds=plain, cases=())]).result()
    assert TrainingTexts(database).untrained(WHO).undrafted == 5
    assert store.add([drafted]).result() == 0
    assert (TrainingTexts(database).untrained(WHO).undrafted, TrainingTexts(database).untrained(WHO).cases) == (0, 1)
    assert store.by_ids(["parked"])[0].cases == drafted.cases
    store.add([replace(drafted, id="once more", cases=(case(3),))]).result()
    assert store.by_ids(["parked"])[0].cases == drafted.cases, "only generations without cases get them"


def test_numbers_are_never_used_again(database: Database) -> None:
    store = Generations(database)

    def newest() -> list[int]:
        with database.read() as connection:
            return list(connection.execute(text("SELECT max(seq) FROM generations")).scalars())

    store.add([generation() for _ in range(3)]).result()
    (last,) = newest()
    Lineage(database).erase(Selection(everything=True))
    store.add([generation()]).result()
    assert newest() == [last + 1]


def test_retention_spares_replayed_texts(database: Database) -> None:
    store, replay = Generations(database), Replay(database)
    old = [generation() for _ in range(40)]
    store.add(old).result()
    replay.offer("code", [g.id for g in old], 8, 0)
    held = {g.id for g in replay.sample(WHO, 100, 0)}
    assert len(held) == 8
    store.add([generation() for _ in range(20)]).result()
    for _ in range(2):
        store.purge(keep=20).result()
        assert {g.id for g in replay.sample(WHO, 100, 0)} == held
        assert store.stats().generations == 28
    # Unlimited names from clients do not grow the log: the newest generations stay, at most twice the limit.
    for i in range(30):
        made = generation(domain=f"tag {i}")
        store.add([made]).result()
        replay.offer(None, [made.id], 8, 0)
    store.purge(keep=20).result()
    assert store.stats().generations <= 40
    assert len(replay.sample(WHO, 100, 0)) == 20
