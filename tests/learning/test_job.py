"""Training jobs with a real database and models on disk, in a process of their own where it matters."""

import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import psutil
import pytest
from mlx_lm.tuner.utils import load_adapters

from service.core import RunState, Score, TrainingFailed
from service.learning import training_job
from service.learning.batches import Batch
from service.learning.channel import ORPHANED, Channel
from service.learning.general_set import GeneralSet
from service.learning.loading import training_shape
from service.learning.losses import TargetDivergence
from service.learning.memory_errors import is_out_of_memory
from service.learning.scoring.score import score
from service.learning.spec import TrainJob, parse
from service.models import vocabulary
from service.models.fingerprint import folder_sha256
from service.models.heads import cut
from service.models.pair import load_model
from service.models.training_memory import TrainingPlan, TrainingShape, plan_training, training_bytes
from service.store.log.generations import TRAIN, Generations, split_of
from service.store.log.training_texts import TrainingTexts
from tests.support.databases import BY_NIGHT
from tests.support.logged_texts import VOCABULARY
from tests.support.training_child import (
    TRAINING,
    Child,
    Home,
    LoggedPair,
    Message,
    child,
    make_logged_pair,
    of_type,
    perform,
)
from tests.support.typed import as_float

REDUCED = list(range(VOCABULARY))[:1:-1][:60]
"""The draft's reduced vocabulary before training."""
LONG = {"epochs": 2000, "learning_rate": 1e-4}


@pytest.fixture(scope="module")
def logged_pair(tmp_path_factory: pytest.TempPathFactory) -> LoggedPair:
    return make_logged_pair(tmp_path_factory.mktemp("logged_pair"), REDUCED)


def assert_same_scores(sent: Sequence[Message], expected: Sequence[Score]) -> None:
    """Up to the rounding of calls that compute other numbers of logits at once."""
    found: list[Score] = []
    for each in sent:
        given: Message = {**each, "calls": tuple(each["calls"])}
        found.append(Score(**given))
    assert [replace(each, calls=()) for each in found] == [replace(each, calls=()) for each in expected]
    assert np.allclose([each.calls for each in found], [each.calls for each in expected], rtol=1e-6)


@BY_NIGHT
def test_a_run_from_claim_to_scores(home: Home, logged_pair: LoggedPair) -> None:
    spec = home.spec()
    with child(spec) as running:
        messages = running.read_to_end()
    kinds = [message["type"] for message in messages]
    assert list(dict.fromkeys(kinds)) == ["texts", "progress", "candidate", "scores", "done"]
    (texts,) = of_type(messages, "texts")
    claimed = {name for name, _ in TrainingTexts(home.database).claimed_names(spec["run"])}
    window, replayed = set(texts["window"]), set(texts["replay"])
    assert len(claimed) == 30 and window and not window & claimed
    assert window <= {g.id for g in logged_pair.logged if split_of(g.prompt.first_user) == TRAIN}
    assert replayed and all(name.startswith("general") for name in replayed), "no run has filled the replay buffer yet"

    progress = of_type(messages, "progress")
    steps = progress[0]["steps"]
    assert [p["step"] for p in progress] == list(range(1, steps + 1))
    assert progress[-1]["seconds_left"] == 0
    assert all(p["grad_norm"] > 0 and p["tokens_per_second"] > 0 for p in progress)
    assert progress[-1]["loss"] < progress[0]["loss"]

    (candidate,) = of_type(messages, "candidate")
    folder = Path(candidate["folder"])
    assert home.published() == [folder.name]
    assert folder_sha256(folder) == candidate["sha256"]
    assert (candidate["rank"], candidate["scale"], candidate["skipped"]) == (8, 2.0, 0)
    assert 0 < candidate["trainable"] < candidate["frozen"]

    # The scores equal those of the folder as mlx-lm loads it, on held-out generations only.
    (scores,) = of_type(messages, "scores")
    golden = {g.id for g in GeneralSet.load(logged_pair.general).generations(logged_pair.who, golden=True)}
    assert golden
    assert [{s["generation"] for s in scores["golden"][name]} for name in ("0", "candidate")] == [golden, golden]
    assert scores["steps"] == {"0": 1.0, "candidate": 1.0}, "weights of the same shapes cost the same"
    held_out = Generations(home.database).held_out(logged_pair.who, 100)
    assert {s["generation"] for s in scores["scores"]["0"]} == {g.id for g in held_out}
    assert all(split_of(g.prompt.first_user) == "held_out" for g in held_out)
    bare = load_model(logged_pair.draft).model
    cut(bare, REDUCED)
    assert_same_scores(scores["scores"]["0"], score(bare, held_out, k=3, vocabulary=VOCABULARY))
    adapted = load_adapters(bare, str(folder))
    # Tokens of the training texts come first in the new reduced vocabulary, which keeps its size.
    learnt = vocabulary.read(folder)
    assert learnt is not None and len(learnt) == len(REDUCED) and learnt != REDUCED
    cut(adapted, learnt)
    mine = score(adapted, held_out, k=3, vocabulary=VOCABULARY)
    assert np.allclose([s["calls"] for s in scores["scores"]["candidate"]], [s.calls for s in mine], rtol=1e-4)
    for at in range(3):
        assert sum(s.calls[at] for s in mine) < sum(s["calls"][at] for s in scores["scores"]["0"])
    assert {s["domain"] for s in scores["scores"]["0"]} <= {"sql", ""}

    # Only the parent process updates the rows.
    assert home.runs.get(spec["run"]).state is RunState.TRAINING
    # Targets were computed only where they were missing: for replayed general texts and some logged ones.
    claimed = TrainingTexts(home.database).claimed(spec["run"])
    cached = len(list((home.cache / logged_pair.who.target).iterdir()))
    learnt = [*claimed, *TrainingTexts(home.database).window(logged_pair.who, spec["run"], 350 - len(claimed))]
    assert len(learnt) > len(claimed)
    assert cached == round(len(learnt) / 3) + sum(g.targets is None for g in learnt)


def test_a_second_run_starts_from_the_first_and_reuses_its_targets(
    home: Home, logged_pair: LoggedPair, tmp_path: Path
) -> None:
    spec = home.spec(training={"epochs": 2})
    first = of_type(perform(spec), "candidate")[0]
    home.runs.move(spec["run"], spec["fencing"], RunState.ENDED)
    # Without its weights the target cannot be run again.
    asleep = tmp_path / "target"
    asleep.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (asleep / name).write_bytes((logged_pair.target / name).read_bytes())
    again = home.spec(
        training={"epochs": 1, "learning_rate": 1e-4, "accumulate": 2},
        parent=first["folder"],
        parent_id=5,
        target=str(asleep),
    )
    messages = perform(again)
    assert messages[-1]["type"] == "done", messages[-1]
    assert len(home.published()) == 2
    (scores,) = of_type(messages, "scores")
    assert scores["scores"].keys() == {"candidate", "5", "0"}
    # With a tiny learning rate the second adapter drafts nearly like the first, and not like the bare draft.
    (candidate,) = of_type(messages, "candidate")
    base = load_model(logged_pair.draft).model
    probe = mx.array([[3, 1, 4, 1, 5]])
    plain = base(probe)
    moved = as_float(
        mx.abs(load_adapters(load_model(logged_pair.draft).model, candidate["folder"])(probe) - plain).mean()
    )
    apart = mx.abs(
        load_adapters(load_model(logged_pair.draft).model, candidate["folder"])(probe)
        - load_adapters(load_model(logged_pair.draft).model, first["folder"])(probe)
    )
    assert as_float(apart.mean()) < 0.2 * moved

    job = {key: again[key] for key in ("url", "draft", "target", "training", "k", "provenance")}
    ids = [g.id for g in logged_pair.logged[:9]]
    adapters = {"0": None, "5": first["folder"], "6": candidate["folder"]}
    messages = perform({**job, "kind": "score", "adapters": adapters, "generations": [*ids, "gone"]})
    assert [message["type"] for message in messages] == ["scores", "done"]
    scored = messages[0]["scores"]
    assert scored.keys() == adapters.keys()
    for name, folder in adapters.items():
        assert {s["generation"] for s in scored[name]} == set(ids)
        assert any(s["rounds"] for s in scored[name]) is (name == "0"), "the bare draft drafted these texts"
        model = load_model(logged_pair.draft).model
        model = load_adapters(model, folder) if folder else model
        cut(model, vocabulary.read(Path(folder)) or [] if folder else REDUCED)
        texts = Generations(home.database).by_ids(ids)
        expected = score(model, texts, k=3, vocabulary=VOCABULARY)
        assert np.allclose([s["calls"] for s in scored[name]], [s.calls for s in expected], rtol=1e-4)


def test_the_child_lowers_its_priority_pauses_and_ends_with_its_parent(home: Home) -> None:
    with child(home.spec(training=LONG)) as running:
        running.until_training()
        started = psutil.Process(running.process.pid)
        # Niceness is per thread on Linux, per process elsewhere.
        threads = [thread.id for thread in started.threads()] if sys.platform == "linux" else [started.pid]
        nice = {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
        assert nice == {max(os.getpriority(os.PRIO_PROCESS, 0), 7)}
        running.send_line("pause")
        os.set_blocking(running.stdout.fileno(), False)
        assert wait_for(lambda: silent(running))
        running.send_line("resume")
        assert wait_for(lambda: drain(running))
        running.send_line("pause")
        running.stdin.close()
        assert running.process.wait(60) == ORPHANED
    assert home.published() == []


def drain(running: Child) -> bool:
    """Whether any message came since the last call."""
    try:
        return bool(os.read(running.stdout.fileno(), 2**20))
    except BlockingIOError:
        return False


def silent(running: Child) -> bool:
    """Whether, after messages already sent, none comes for much longer than a step takes."""
    drain(running)
    time.sleep(0.5)
    return not drain(running)


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_a_run_that_was_cancelled_meanwhile_is_not_published(home: Home) -> None:
    spec = home.spec(training={"epochs": 1})

    def give_up(message: Message) -> None:
        if message["type"] == "progress" and message["step"] == 1:
            home.runs.move(spec["run"], spec["fencing"], RunState.ENDED)

    messages = perform(spec, give_up)
    assert of_type(messages, "progress")
    assert messages[-1]["type"] == "failed"
    assert "no longer belongs to this process" in messages[-1]["reason"]
    assert not of_type(messages, "candidate")
    assert home.published() == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fencing": 0}, "fencing token has changed"),
        ({"training": TRAINING | {"memory_gb": 1e-3}}, "GiB of memory may be used"),
        ({"training": TRAINING | {"memory_gb": 1e-3}, "own_texts_only": True}, "GiB of memory may be used"),
        ({"parent": "/nowhere", "parent_id": 3}, "cannot be read"),
    ],
)
def test_an_impossible_run_reports_the_reason(home: Home, changes: Message, reason: str) -> None:
    messages = perform(home.spec() | changes)
    assert [message["type"] for message in messages if message["type"] != "texts"] == ["failed"]
    assert reason in messages[-1]["reason"]
    assert messages[-1]["memory"] is (reason == "GiB of memory may be used")
    if "own_texts_only" in changes:
        assert of_type(messages, "texts") == [{"type": "texts", "window": [], "replay": []}]
    assert home.published() == []


def test_allocations_that_fail_are_told_from_other_errors() -> None:
    with pytest.raises(MemoryError) as numpys:
        np.zeros(2**50)
    assert is_out_of_memory(numpys.value)
    for text in (
        "[malloc] Unable to allocate 68719476736 bytes.",
        "[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum allowed buffer size",
        "[METAL] Command buffer execution failed: Insufficient Memory (kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "cudaMallocAsync(&data, size, stream) failed: out of memory",
    ):
        assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(RuntimeError("[matmul] Last dimension of first input must match"))
    assert not is_out_of_memory(ValueError("out of memory"))


def peaks(home: Home) -> Callable[..., int]:
    """Planned bytes of a run of the logged pair with longer texts than the tests' own."""
    shape = training_shape(home.logged_pair.target, home.logged_pair.draft, rank=8)

    def peak(rows: int, length: int = 64, *, recompute: bool = False, chunk: int = 512) -> int:
        return training_bytes(shape, rows=rows, length=length, recompute=recompute, chunk=chunk).total

    return peak


@pytest.mark.parametrize(
    ("rows", "recompute", "words"), [(2, False, "4 x 2 texts"), (8, True, "1 x 8 texts of 64 tokens with gradient")]
)
def test_a_run_with_little_memory_computes_smaller_pieces_and_publishes(
    home: Home,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rows: int,
    recompute: bool,
    words: str,
) -> None:
    """As the setting limits it."""
    if recompute:
        # A tiny model's stored activations are nothing beside its logits.
        monkeypatch.setattr("service.learning.loading.plan_training", first_that_recomputes)
    calls: list[int] = []
    positions = training_job.TargetDivergence.__call__

    def noting(loss: TargetDivergence, model: nn.Module, batch: Batch) -> mx.array:
        calls.append(batch.rows)
        return positions(loss, model, batch)

    monkeypatch.setattr(training_job.TargetDivergence, "__call__", noting)
    peak = peaks(home)
    limit = peak(8) if recompute else (peak(rows, chunk=32) + peak(2 * rows, recompute=True, chunk=32)) // 2
    spec = home.spec(training={"epochs": 2, "memory_gb": limit / 2**30})
    with caplog.at_level(logging.INFO):
        messages = perform(spec)
    assert messages[-1]["type"] == "done", messages[-1]
    assert of_type(messages, "candidate") and home.published()
    assert max(calls) == rows
    assert f"steps of {words}" in caplog.text
    progress = of_type(messages, "progress")
    assert progress[-1]["loss"] < progress[0]["loss"]


def first_that_recomputes(shape: TrainingShape, free: int, **wanted: int) -> TrainingPlan | None:
    plan = plan_training(shape, free, **wanted)
    return plan and replace(plan, recompute=True)


def test_texts_are_shortened_before_a_run_is_refused(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    job = parse(json.dumps(home.spec(training={"max_length": 96})))
    assert isinstance(job, TrainJob)
    run = training_job.TrainingJob(job, Channel(0, io.StringIO()), home.database)
    lengths: list[int] = []

    def shorter(shape: TrainingShape, free: int, *, batch: int, length: int) -> TrainingPlan:
        lengths.append(length)
        return TrainingPlan(1, batch, 32, False, 32, 0)

    monkeypatch.setattr(training_job, "plan_run", shorter)
    data, plan, texts = run._data()  # pyright: ignore[reportPrivateUsage]
    assert lengths == [64] and plan.length == 32
    assert 16 < data.longest <= 32
    assert len(data.examples) > len(texts), "one text becomes several windows"


def test_an_invalid_job_is_refused_by_name(home: Home) -> None:
    spec = home.spec()
    job = parse(json.dumps(spec))
    assert isinstance(job, TrainJob)
    assert (job.run, job.training.epochs, job.gate.min_prompts, job.parent) == (spec["run"], 6, 5, None)
    for changes, reason in (
        ({"kind": "sing"}, "unknown kind of job: 'sing'"),
        ({"training": {"epochs": 0}}, "epochs"),
        ({"training": {"colour": 1}}, "colour"),
        ({"provenance": {"target": "t"}}, "tokenizer"),
        ({"k": "many"}, "many"),
    ):
        with pytest.raises(TrainingFailed, match=reason):
            parse(json.dumps(spec | changes))
    del spec["fencing"]
    for line in (json.dumps(spec), "not json", "", "[]"):
        with pytest.raises(TrainingFailed, match="incomplete or wrong"):
            parse(line)
