"""The ablation at toy size, and its parts."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from service.core import BadRequest
from service.evaluation.ablate import run_ablate
from service.evaluation.outputs import generations
from service.evaluation.prompts import PromptLine
from service.evaluation.selection import position_losses, rejections_only, selected
from service.evaluation.variants import KEPT, Positions, Recipe, tables
from service.evaluation.wholeloss import WholeDivergence
from service.learning import lora
from service.learning.dataset import build, collate
from service.learning.loss import TargetDivergence
from service.learning.objectives import Objective
from service.models.pair import Pair, load_pair
from service.settings import Settings, TrainingSettings
from tests.support.tiny_server import prompts
from tests.support.typed import as_float, leaves

TINY: dict[str, Any] = {"epochs": 1, "rank": 4, "learning_rate": 1e-2, "replay": 0.0}


@pytest.fixture(scope="module")
def pair(models: tuple[Path, Path]) -> Pair:
    return load_pair(*models)


@pytest.fixture(scope="module")
def trained(settings: Settings) -> Settings:
    return settings.model_copy(update={"training": TrainingSettings(**TINY)})


def lines(count: int, seed: int) -> list[PromptLine]:
    return list(prompts(count, seed))


def test_tables_vary_one_thing_each() -> None:
    base = Recipe(TrainingSettings(), 200)
    made = {table.name: table for table in tables(base, 800)}
    assert list(made["loss"].rows) == [o.value for o in Objective] == list(made["loss_t1"].rows)
    assert {r.training.rank for r in made["rank"].rows.values()} == {4, 16, 64}
    assert {r.training.replay for r in made["replay"].rows.values()} == {0.0, 0.2, 0.4, 0.5}
    assert [r.cases for r in made["cases"].rows.values()] == [50, 200, 800]
    assert [r.cases for t in tables(base, 300, ["cases"]) for r in t.rows.values()] == [50, 200]
    assert [r.positions for r in made["positions"].rows.values()].count(Positions.ALL) == 3
    # All tables share one baseline recipe, which is trained once.
    for table in made.values():
        assert base in table.rows.values() or table.name == "loss_t1"
    assert [t.name for t in tables(base, 800, ["loss", "rank"])] == ["loss", "loss_t1", "rank"]
    with pytest.raises(BadRequest, match="colour"):
        tables(base, 800, ["colour"])


@pytest.mark.nightly
def test_ablation_results_are_yielded_as_they_are_measured(
    trained: Settings, models: tuple[Path, Path], tmp_path: Path
) -> None:
    outcomes = list(
        run_ablate(
            trained,
            models,
            None,
            lines(16, 0),
            {"held": lines(8, 1)},
            cases=12,
            only=["loss", "positions", "targets"],
            max_tokens=16,
        )
    )
    last = {outcome.table.name: outcome for outcome in outcomes}
    assert list(last) == ["loss", "loss_t1", "positions", "targets"]
    assert len(outcomes) == 6 + 6 + 5 + 2
    assert [len(outcome.rows) for outcome in outcomes[:6]] == [2, 3, 4, 5, 6, 7]
    for outcome in last.values():
        assert outcome.complete
        assert all(len(cells) == len(outcome.columns) for cells in outcome.cells())
        (static, *rows) = outcome.rows
        assert static.loss is None and all(row.seconds is not None and row.seconds > 0 for row in rows)
        json.dumps(outcome.plain())
    # A recipe has the same result in every table, and the draft is bare again afterwards.
    same = [
        next(r for r in last[t].rows if r.label == label)
        for t, label in (("loss", "jsd"), ("positions", "all"), ("targets", "top 32 and tail"))
    ]
    assert same[0].tests["held"] == same[1].tests["held"] == same[2].tests["held"]
    assert last["loss"].rows[0].tests == last["targets"].rows[0].tests
    # Training changed the scores, differently for each recipe.
    assert len({row.tests["held"] for row in last["loss_t1"].rows}) >= 5


def test_more_cases_than_prompts_are_refused(trained: Settings, models: tuple[Path, Path]) -> None:
    with pytest.raises(BadRequest, match="fewer"):
        next(run_ablate(trained, models, None, lines(3, 0), {"held": lines(3, 1)}, cases=4))


def test_sampled_texts_are_made_once_and_are_samples(pair: Pair, tmp_path: Path) -> None:
    asked = lines(12, 2)
    first = generations(pair, asked, tmp_path, temperature=1.0, max_tokens=12)
    assert [g.output for g in generations(pair, asked, tmp_path, temperature=1.0, max_tokens=12, rows=1)] == [
        g.output for g in first
    ]
    other = generations(pair, asked, tmp_path / "else", temperature=1.0, max_tokens=12, rows=5)
    assert sum(a.output == b.output for a, b in zip(first, other, strict=True)) >= 11, "rounding may decide one"
    greedy = generations(pair, asked, tmp_path, temperature=0.0, max_tokens=12)
    assert [g.output for g in greedy] != [g.output for g in first]
    for g in first:
        assert g.prompt.sampling.seed is None and g.targets is not None
        assert len(g.sampled_logprobs) == len(g.output) and max(g.sampled_logprobs) <= 0


def test_selection_takes_the_largest_gains(pair: Pair, tmp_path: Path) -> None:
    texts = generations(pair, lines(6, 3), tmp_path, temperature=0.0, max_tokens=12)
    examples = build(texts, max_length=256, reject_weight=2.0, vocabulary=pair.vocabulary).examples
    assert pair.draft is not None
    losses = position_losses(pair.draft.model, examples, 4)
    assert [len(each) for each in losses] == [e.positions for e in examples]
    alone = [as_float(TargetDivergence(pair.draft.model)(pair.draft.model, collate([e]))) for e in examples]
    assert [each.mean() for each in losses] == pytest.approx(alone, rel=1e-4)
    rng = np.random.default_rng(0)
    gains = [rng.normal(size=e.positions) for e in examples]
    chosen = selected(examples, gains, KEPT)
    weights, every = np.concatenate([e.weight for e in chosen]), np.concatenate(gains)
    assert weights.mean() == pytest.approx(KEPT, abs=0.03)
    assert every[weights == 1].min() >= every[weights == 0].max()
    assert all(e.weight.sum() == 0 for e in rejections_only(examples, 2.0)), "no cases, nothing to learn"


@pytest.mark.parametrize("objective", [Objective.KL, Objective.JSD])
def test_full_logits_equal_a_complete_top_k(pair: Pair, tmp_path: Path, objective: Objective) -> None:
    """If the stored top-k holds nearly all probability the two losses are equal, up to half precision."""
    texts = generations(pair, lines(6, 4), tmp_path, temperature=0.0, max_tokens=12)
    batch = collate(build(texts, max_length=256, reject_weight=1.0, vocabulary=pair.vocabulary).examples)
    assert pair.draft is not None
    draft = pair.draft.model
    stored = as_float(TargetDivergence(draft, objective)(draft, batch))
    whole = as_float(WholeDivergence(draft, pair.target.model, pair.vocabulary, objective)(draft, batch))
    assert stored <= whole + 1e-3, "merging the tail can only lower the divergence"
    assert WholeDivergence(draft, draft, pair.vocabulary, objective)(draft, batch).item() == pytest.approx(0, abs=1e-5)
    lora.wrap(draft, rank=2, scale=2.0, seed=0)
    try:
        loss = WholeDivergence(draft, pair.target.model, pair.vocabulary, objective)
        _, gradient = mx.value_and_grad(lambda tree: (draft.update(tree), loss(draft, batch))[1])(
            draft.trainable_parameters()
        )
        assert any(as_float(mx.abs(g).max()) > 0 for _, g in leaves(gradient))
    finally:
        lora.detach(draft)
