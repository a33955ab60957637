"""`eval gate` at toy size."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.core import BadRequest, Generation
from service.evaluation.gate import COLUMNS, NOISES, Kind, cells, run_gate, shuffled
from service.learning.examples import unpack
from service.learning.lora import WEIGHTS
from service.settings import Settings
from tests.support.store_rows import generation, targets
from tests.support.tiny_server import prompts


def test_shuffled_targets_are_the_same_ones_elsewhere() -> None:
    made = [generation(output=range(n), collected=targets(n, seed=n)) for n in (3, 50, 7)]
    dealt = shuffled(made, seed=1)

    def rows(each: Sequence[Generation]) -> list[tuple[float, ...]]:
        stored = [unpack(g.targets) for g in each if g.targets is not None]
        return [(*i, *p, t) for ids, logprobs, tail in stored for i, p, t in zip(ids, logprobs, tail, strict=True)]

    assert sorted(rows(dealt)) == sorted(rows(made))
    assert rows(dealt) != rows(made)
    assert [replace(g, targets=None) for g in dealt] == [replace(g, targets=None) for g in made]
    assert [g.targets and g.targets.positions for g in dealt] == [3, 50, 7]


@pytest.mark.nightly
def test_the_gate_on_adapters_of_every_kind(quick: Settings, models: tuple[Path, Path], tmp_path: Path) -> None:
    learn, other = list(prompts(60, 1)), list(prompts(30, 2))
    sizes: dict[str, Any] = {"count": 1, "noisy": len(NOISES), "cases": 30, "max_tokens": 16}
    found = list(run_gate(quick, models, None, learn, other, tmp_path, **sizes))
    by_kind = {kind: [one for one in found if one.candidate.kind is kind] for kind in Kind}
    assert [len(each) for each in by_kind.values()] == [1, 1, len(NOISES)]
    assert all(one.verdict.promoted and (one.worth or 0) > 0 for one in by_kind[Kind.BETTER])
    assert not any(one.verdict.promoted for one in by_kind[Kind.SHUFFLED])
    noisy = by_kind[Kind.NOISY]
    assert abs(noisy[0].verdict.gain) <= 0.05, "1 % of noise changes next to nothing"
    assert len({one.verdict.gain for one in noisy}) > 1, "noise of another strength gives another result"
    assert all(len(row) == len(COLUMNS) for row in cells(found))

    # Adapters and verdicts are reused.
    before = [path.stat().st_mtime_ns for path in tmp_path.glob(f"*/adapters/*/{WEIGHTS}")]
    assert len(before) == 2
    sizes["noisy"] = 0
    again = list(run_gate(quick, models, None, learn, other, tmp_path, **sizes))
    assert [(one.worth, one.verdict.promoted) for one in again] == [
        (one.worth, one.verdict.promoted) for one in found[: len(again)]
    ]
    assert [path.stat().st_mtime_ns for path in tmp_path.glob(f"*/adapters/*/{WEIGHTS}")] == before


def test_the_gate_needs_texts_enough(quick: Settings, models: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="too few"):
        next(run_gate(quick, models, None, list(prompts(10, 1)), list(prompts(5, 2)), tmp_path, cases=30, max_tokens=8))


@pytest.mark.nightly
def test_a_candidate_whose_run_was_interrupted_is_trained_again(
    quick: Settings, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    learn, other = list(prompts(40, 1)), list(prompts(4, 2))
    sizes: dict[str, Any] = {"count": 1, "noisy": 0, "cases": 20, "max_tokens": 8}
    brief = quick.model_copy(update={"training": quick.training.model_copy(update={"epochs": 1})})
    with monkeypatch.context() as patch:
        patch.setattr("service.learning.job.perform", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(run_gate(brief, models, None, learn, other, tmp_path, **sizes))
    assert next(run_gate(brief, models, None, learn, other, tmp_path, **sizes)).worth is not None


@pytest.mark.nightly
@pytest.mark.promise(10)
def test_the_gate_decides_correctly_every_time(quick: Settings, models: tuple[Path, Path], tmp_path: Path) -> None:
    """20 better candidates are promoted, 20 with shuffled targets refused, and of 100 noisy ones no worthless one."""
    learn, other = list(prompts(60, 1)), list(prompts(60, 2))
    found = list(run_gate(quick, models, None, learn, other, tmp_path, count=20, noisy=100, cases=30, max_tokens=16))
    by_kind = {kind: [one for one in found if one.candidate.kind is kind] for kind in Kind}
    assert [len(each) for each in by_kind.values()] == [20, 20, 100]
    assert all(one.verdict.promoted for one in by_kind[Kind.BETTER])
    assert not any(one.verdict.promoted for one in by_kind[Kind.SHUFFLED])
    # With a nominal 5 % of false promotions, 10 of 100 occur once in forty nights.
    assert sum(one.verdict.promoted for one in by_kind[Kind.NOISY]) < 10
