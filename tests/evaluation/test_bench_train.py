"""The benchmark of training at toy size: both trainers, each in its own process."""

import sys
from pathlib import Path

import pytest
from mlx_lm.tuner.trainer import default_loss, iterate_batches

from service.core import RedraftError
from service.evaluation.bench import train
from service.evaluation.bench.train import OURS, THEIRS, Task, masked, perform, random_example, run_train
from service.learning.batches import collate
from service.models.pair import load_model
from service.settings import Settings
from tests.support.published import check_published
from tests.support.typed import as_floats, as_ints, as_rows


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [1, 2])
def test_train_compares_both_trainers(
    settings: Settings, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    if processes == 1:
        child = train._measure
        monkeypatch.setattr(train, "_measure", lambda task: (child if task.arm == OURS else perform)(task))
    report = run_train(settings, models, steps=2, turns=1, batch=2, length=32, response=8)
    arms = report.plain["arms"]
    assert arms.keys() == {OURS, THEIRS}
    # A process with MLX and a model uses more memory than this, and trains fewer tokens per second than that.
    assert all(
        arm["peak_bytes"]["median"] > 5e7 and 0 < arm["tokens_per_second"]["median"] < 1e7 for arm in arms.values()
    )
    speeds = [arms[arm]["tokens_per_second"]["median"] for arm in (OURS, THEIRS)]
    assert report.plain["ratios"][f"{OURS}/{THEIRS}"]["median"] == pytest.approx(speeds[0] / speeds[1])
    assert report.plain["settings"]["response_tokens_per_step"] == 16
    check_published(report, tmp_path)


def test_both_trainers_are_fed_and_learn_the_same_tokens(models: tuple[Path, Path]) -> None:
    task = Task(OURS, str(models[1]), steps=1, batch=2, length=32, response=8, rank=4, scale=2.0)
    examples = [random_example(seed, 97, task) for seed in range(2)]
    ours = collate(examples)
    theirs, spans = next(iterate_batches(masked(examples, task), 2, task.length + 1))
    assert ours.count == ours.tokens.size == 64
    assert sorted(as_rows(ours.tokens)) == sorted(as_rows(theirs[:, :-1]))
    _, learnt = default_loss(load_model(models[1]).model, theirs, spans)
    assert learnt.item() == ours.weight.sum().item() == 16
    first = min(at % task.length for at, weight in zip(as_ints(ours.at), as_floats(ours.weight), strict=True) if weight)
    assert first == spans[0, 0].item() - 1, "what predicts the first response token is the token before it"


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_train_reports_why_a_child_failed(
    settings: Settings, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real: bool
) -> None:
    if not real:
        # Saves the imports of a training child.
        fails = "import json; raise FileNotFoundError(json.loads(input())['draft'])"
        monkeypatch.setattr(train, "python_command", lambda *words: [sys.executable, "-c", fails])
    with pytest.raises(RedraftError, match=r"ours failed: .*nowhere"):
        run_train(settings, (models[0], tmp_path / "nowhere"), steps=1, turns=1, batch=1, length=32)
    with pytest.raises(RedraftError, match="response"):
        run_train(settings, models, length=32, response=32)
