"""Practice: text that a tiny target writes, and jobs that train on it."""

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import delete

from service.core import AnswerGrammar, RunState, Trigger
from service.learning import practice, practice_text
from service.learning.channel import Channel
from service.learning.make.distil import TextBatch
from service.learning.make.target_text import ANSWER, FORCED, USER, TargetText
from service.learning.practice_text import Kind, Piece, PracticeText
from service.learning.spec import TrainJob, parse
from service.learning.texts import as_text
from service.learning.train import Optimiser
from service.models.training_memory import training_bytes
from service.store import tables
from service.store.log.generations import TRAIN, Generations, split_of
from service.store.log.run_texts import Role
from service.store.log.training_texts import TrainingTexts
from tests.support.oracle import tiny_llama
from tests.support.training_child import (
    SMALL_PRACTICE,
    Home,
    LoggedPair,
    make_logged_pair,
    of_type,
    perform,
    use_many_templates,
)

REDUCED = list(range(2, 62))


@pytest.fixture(scope="module")
def logged_pair(tmp_path_factory: pytest.TempPathFactory) -> LoggedPair:
    return use_many_templates(make_logged_pair(tmp_path_factory.mktemp("logged_pair"), REDUCED))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL_PRACTICE.items():
        monkeypatch.setattr(practice, name, value)


def test_a_practice_run_from_claim_to_scores(home: Home, logged_pair: LoggedPair, tmp_path: Path) -> None:
    spec = home.practice_spec(tmp_path / "practice", 0.03)
    messages = perform(spec)
    kinds = [message["type"] for message in messages]
    assert list(dict.fromkeys(kinds)) == ["progress", "texts", "candidate", "scores", "done"]
    assert messages[-1]["waits"] is False, "what practised has the least priority for good"
    progress = of_type(messages, "progress")
    writing = [one["writing"] for one in progress]
    assert writing == sorted(writing, reverse=True) and writing[0] and not writing[-1], (
        "first it writes, then it trains"
    )
    assert all(one["loss"] is None for one in progress if one["writing"])
    assert of_type(messages, "texts") == [{"type": "texts", "window": [], "replay": []}]
    (candidate,) = of_type(messages, "candidate")
    assert candidate["rank"] == 12
    # It is recorded which texts it began like, and none of them is held out or new to the next run.
    seeds = TrainingTexts(home.database).seeds_of(spec["run"])
    assert {one.id for one in seeds} == {g.id for g in logged_pair.logged if split_of(g.prompt.first_user) == TRAIN}
    assert TrainingTexts(home.database).claimed(spec["run"]) == []
    # The text is on disk: as much of one kind as of the other.
    files = sorted(path.name for path in (tmp_path / "practice" / logged_pair.who.target).iterdir())
    assert Counter(name.rsplit("-", 1)[1] for name in files) == {
        "log.npz": len(files) // 2,
        "general.npz": len(files) // 2,
    }
    # What the gate compares on has nothing in common with them.
    (scores,) = of_type(messages, "scores")
    judged = [g for g in logged_pair.logged if g.id in {s["generation"] for s in scores["scores"]["candidate"]}]
    assert judged
    conversations = {as_text(one).conversation for one in seeds}
    assert not any(as_text(one).conversation in conversations for one in judged)


def test_held_out_texts_like_a_seed_leave_that_gate(home: Home, logged_pair: LoggedPair, tmp_path: Path) -> None:
    spec = home.practice_spec(tmp_path / "practice", 0.01)
    held_out = Generations(home.database).held_out(logged_pair.who, 100)
    templates = {as_text(one).groups for one in TrainingTexts(home.database).seeds_of(spec["run"])}
    left = {one.id for one in held_out if not any(as_text(one).groups & groups for groups in templates)}
    (scores,) = of_type(perform(spec), "scores")
    assert {s["generation"] for s in scores["scores"]["0"]} == left < {one.id for one in held_out}


def test_a_run_learns_from_the_text_of_earlier_ones_and_says_what_that_began_like(
    home: Home, logged_pair: LoggedPair, tmp_path: Path
) -> None:
    folder = tmp_path / "practice"
    spec, earlier, some = second_run(home, logged_pair, folder)
    messages = perform(spec)
    (texts,), (scores,) = of_type(messages, "texts"), of_type(messages, "scores")
    assert set(texts["replay"]) == earlier - some
    # What is like a text that they began like is not what the gate compares on either.
    stored = Generations(home.database)
    groups = [as_text(one).groups for one in stored.by_ids(sorted(earlier))]
    judged = stored.by_ids([one["generation"] for one in scores["scores"]["0"]])
    assert judged and not any(as_text(one).groups & each for one in judged for each in groups)
    # Nothing that began like a text that was erased is learnt from.
    gone = tables.generations.c.id == min(earlier - some)
    home.database.write(lambda connection: connection.execute(delete(tables.generations).where(gone))).result()
    (texts,) = of_type(perform(spec), "texts")
    assert texts["replay"] == []


def second_run(home: Home, logged_pair: LoggedPair, folder: Path) -> tuple[dict[str, Any], set[str], set[str]]:
    """The job of a run after one that was ended from outside when it had written; what that one, and what this one begins
    like."""
    first = home.practice_spec(folder, 0.01)
    perform(first)
    home.runs.move(first["run"], first["fencing"], RunState.ENDED, error="the server was stopped")
    some = [g.id for g in logged_pair.logged if split_of(g.prompt.first_user) == TRAIN][:3]
    run = home.runs.claim(trigger=Trigger.PRACTICE, who=logged_pair.who, parent=0, limit=100, seeds=some)
    assert run is not None
    home.runs.move(run.id, run.fencing, RunState.TRAINING)
    spec = home.spec_of(run) | {"practice": {"folder": str(folder), "minutes": 0.01}}
    earlier = {one.id for one in TrainingTexts(home.database).seeds_of(first["run"])}
    assert len(earlier) > len(some)
    return spec, earlier, set(some)


def test_without_a_seed_that_is_left_the_run_fails(home: Home, tmp_path: Path) -> None:
    spec = home.practice_spec(tmp_path / "practice", 0.01)
    home.database.write(lambda connection: _forget_seeds(connection)).result()
    assert "is in the log any more" in of_type(perform(spec), "failed")[0]["reason"]


def _forget_seeds(connection: object) -> None:
    from sqlalchemy import Connection, delete

    from service.store.tables import run_texts

    assert isinstance(connection, Connection)
    connection.execute(delete(run_texts).where(run_texts.c.role == Role.SEED))


def text(rows: int, value: int) -> TargetText:
    role = np.array([[FORCED, USER, ANSWER]] * rows, dtype=np.uint8)
    return TargetText(np.full((rows, 3), value, dtype=np.int32), role, np.zeros(rows))


def test_pieces_come_back_newest_first_and_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    stored = PracticeText(tmp_path, "t")
    for run, kind in ((3, Kind.LOG), (4, Kind.GENERAL), (5, Kind.LOG)):
        stored.save(Piece(run, kind, text(2, run), (f"seed-{run}", "another")), fencing=1, number=0)
    (tmp_path / "t" / "00000004-1-0001-log.npz").write_bytes(b"damaged")
    (tmp_path / "t" / "00000004-1-0002-log.npz").touch()
    assert [(one.run, one.kind, one.text.tokens.shape, one.seeds) for one in stored.pieces(before=5)] == [
        (4, Kind.GENERAL, (2, 3), ("seed-4", "another")),
        (3, Kind.LOG, (2, 3), ("seed-3", "another")),
    ]
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path, tmp_path / "t"))
    (tmp_path / "t" / ".00000006-1-0000-log.npz.part.npz").write_bytes(b"half-written")
    practice_text.remove(tmp_path)
    assert list((tmp_path / "t").iterdir()) == []


def test_both_kinds_have_as_many_texts_the_newest_first() -> None:
    pieces = [Piece(2, Kind.LOG, text(2, 1)), Piece(2, Kind.GENERAL, text(2, 2)), Piece(1, Kind.LOG, text(4, 3))]
    assert practice_text.mixed(pieces).tokens[:, 0].tolist() == [1, 1, 2, 2]
    assert practice_text.mixed(pieces[:1]).tokens[:, 0].tolist() == [1, 1]


def test_cuts_are_beginnings_of_bounded_length() -> None:
    prompts = ["abcdefghij", "x" * 5000, "y"]
    found = practice.cuts(prompts, 1)
    assert len(found) == 3 * practice.CUTS
    assert all(prompts[i // practice.CUTS].startswith(one) for i, one in enumerate(found))
    assert {6 <= len(one) <= 10 for one in found[: practice.CUTS]} == {True}
    assert max(map(len, found)) <= practice.LONGEST_OPENING
    assert practice.cuts(prompts, 2) != found


def test_general_text_begins_as_the_draft_s_own_did_or_freely(
    home: Home, logged_pair: LoggedPair, tmp_path: Path
) -> None:
    job = parse(json.dumps(home.practice_spec(tmp_path / "practice", 0.01)))
    assert isinstance(job, TrainJob)
    assert practice.general_openings(job) == []
    (tmp_path / "openings.txt").write_text("\nSummarize:\n", encoding="utf-8")
    assert practice.general_openings(replace(job, general=tmp_path / "general.npz")) == ["", "Summarize:"]


def test_logged_texts_are_packed_without_those_that_followed_a_grammar(logged_pair: LoggedPair) -> None:
    some = logged_pair.logged[:40]
    grammar = replace(some[3], grammar=AnswerGrammar("start: /[a-z]/"))
    found = practice.packed([*some, grammar])
    words = [token for one in some for token in (*one.prompt.tokens, *one.output)]
    roles = [role for one in some for role in [FORCED] * len(one.prompt.tokens) + [ANSWER] * len(one.output)]
    assert found.tokens.shape[1] == practice.LENGTH
    assert found.tokens.reshape(-1)[: len(words)].tolist() == words
    assert found.role.reshape(-1)[: len(words)].tolist() == roles
    assert set(found.role.reshape(-1)[len(words) :].tolist()) <= {FORCED}, (
        "nothing is learnt from what fills the last row up"
    )
    long = replace(some[0], output=tuple(range(3, 60)) * 2)
    assert practice.packed([long]).tokens[0].tolist() == list(long.output[-practice.LENGTH :])
    assert practice.packed([grammar]).tokens.shape == (0, practice.LENGTH)


class Recorded:
    """What `train` was asked for, in place of training."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.optimiser = Optimiser(0.0, 0)
        self.calls = list[int]()
        monkeypatch.setattr(practice, "train", self)

    def __call__(self, model: object, found: Iterable[TextBatch], *, optimiser: Optimiser, **options: object) -> None:
        self.optimiser, self.calls = optimiser, [len(batch.tokens) for batch in found]


@pytest.mark.parametrize(
    ("texts", "rows", "seconds", "steps", "calls"),
    [
        (400, 1, 0.001, 66, 6),
        (400, 2, 0.001, 66, 3),
        (4000, 2, 0.001, 75, 4),
        (4000, 8, 0.001, 75, 1),
        (100, 1, 0.001, 25, 4),
        (2, 2, 0.001, 1, 2),
        (4000, 8, 0.01, 7, 1),
    ],
)
def test_few_texts_make_smaller_steps_and_long_calls_are_split(
    home: Home,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    texts: int,
    rows: int,
    seconds: float,
    steps: int,
    calls: int,
) -> None:
    job = parse(json.dumps(home.practice_spec(tmp_path / "practice", 0.01)))
    assert isinstance(job, TrainJob)
    recorded = Recorded(monkeypatch)
    practising = practice.PracticeJob(job, Channel(0, sys.stdout), home.database)
    monkeypatch.setattr(practising, "_left", lambda: 0.6)
    practising._train(tiny_llama(0), text(texts, 0), None, practice.Calls(rows, seconds))  # pyright: ignore
    assert (recorded.optimiser.steps, recorded.optimiser.accumulate) == (steps, calls)
    assert recorded.calls == [rows] * min(steps * calls, texts // rows)


def test_rows_follow_the_memory_that_is_free(logged_pair: LoggedPair) -> None:
    from service.models.pair import load_model

    target = load_model(logged_pair.target).model
    assert practice.writing_rows(target, 100, 2**40, 60.0) == practice.MOST_ROWS_CPU
    assert (
        practice.writing_rows(target, 100, 2**40, 1e-3) == 10 and practice.writing_rows(target, 100, 2**40, 1e-6) == 1
    )
    assert practice.writing_rows(target, 100, 0, 60.0) == 1
    few = practice.writing_rows(target, 100, 200_000, 60.0)
    assert 1 < few < practice.MOST_ROWS_CPU
    # Training is over the draft's reduced vocabulary.
    folders = (logged_pair.target, logged_pair.draft)
    least = practice.weight_bytes(target)
    narrow, whole = (practice.practice_bytes(target, folders, width, 12) - least for width in (97, 10_000_000))
    shape = replace(practice.learning_shape(*folders, len(REDUCED), 12), weights=0)
    assert shape.vocabulary == len(REDUCED) + practice.OWN_IDS
    learning = training_bytes(shape, rows=practice.BATCH_ASIDE, length=practice.LENGTH, recompute=False, chunk=0)
    writing = practice.ROWS_ASIDE * practice._writing_bytes(target, 10_000_000)  # pyright: ignore[reportPrivateUsage]
    assert [narrow, whole] == [learning.total, writing]
