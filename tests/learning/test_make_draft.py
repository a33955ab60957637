"""`make-draft` end to end with tiny models: an EAGLE head for a tiny target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from service.core import ModelError, TrainingFailed
from service.learning.make.distil import Distillation, TextBatch, freeze_shared
from service.learning.make.draft import Recipe, make_draft
from service.learning.make.eagle_head import default_feature_layers, init_eagle_head
from service.learning.make.target_text import TargetText
from service.learning.practice_text import Kind, Piece, PracticeText
from service.models import eagle, vocabulary
from service.models.pair import load_model, load_pair
from tests.support.model_folders import save_model
from tests.support.oracle import tiny_llama
from tests.support.typed import layers_of

LONG = Recipe(
    layers=None, kind="eagle", tokens=3000, length=48, rows=16, epochs=8, batch=8, held_out=8, vocabulary=32, turn=12
)
RECIPE = replace(LONG, tokens=1300, epochs=4, learning_rate=5e-3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tiny_llama(1, layers=6), tmp_path_factory.mktemp("making") / "target")


@pytest.fixture(scope="module")
def bound(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[eagle.Model, eagle.Model]:
    """An untrained head and its target."""
    leader = load_model(target)
    folder = tmp_path_factory.mktemp("head")
    init_eagle_head(leader, None, folder)
    draft = load_model(folder).model
    eagle.bind(draft, leader.model)
    return draft, leader.model  # pyright: ignore[reportReturnType]


def test_a_head_is_made_loads_and_can_be_gone_on_from(target: Path, tmp_path: Path) -> None:
    first, package = tmp_path / "first", tmp_path / "package"
    report = make_draft(target, first, RECIPE, package=package, text_file=tmp_path / "text.npz")
    assert report is not None
    assert report.layers == (1, 2)
    assert report.agreement > report.agreement_before + 0.1
    assert report.by_step[0] == report.agreement
    assert len(report.by_step) == 4
    pair = load_pair(target, first)
    assert pair.draft is not None
    assert isinstance(pair.draft.model, eagle.Model)
    assert len(vocabulary.read(first) or []) == 32
    # The folder holds only the head's own weights; the rest are the target's, bit for bit.
    shipped = mx.load(str(package / "layers.safetensors"))
    assert isinstance(shipped, dict)
    assert {array.dtype for array in shipped.values()} == {mx.bfloat16}
    assert shipped.keys() == {name for name in leaves(pair.draft.model) if name not in SHARED}
    ours = dict(tree_flatten(pair.target.model.parameters()))
    for name in SHARED:
        assert mx.array_equal(dict(tree_flatten(pair.draft.model.parameters()))[name], ours[name]).item()

    once = replace(RECIPE, epochs=1)
    again = make_draft(target, tmp_path / "again", once, start=first, text_file=tmp_path / "text.npz")
    assert again is not None
    assert again.agreement_before == pytest.approx(report.agreement, abs=0.02)
    written = TargetText.load(tmp_path / "text.npz")
    for kind in Kind:
        PracticeText(tmp_path, "practice").save(Piece(1, kind, written), 1, 0)
    practised = make_draft(target, tmp_path / "practised", once, start=first, text_file=tmp_path / "practice")
    assert practised is not None and practised.tokens == 2 * written.tokens.size
    with pytest.raises(ModelError, match="contains no practice text"):
        make_draft(target, tmp_path / "other", RECIPE, start=first, text_file=tmp_path)
    with pytest.raises(ModelError, match=r"reads layers \[1, 2\] of its target, not \[1, 3\]"):
        make_draft(target, tmp_path / "other", replace(RECIPE, layers=(1, -3)), start=first)
    with pytest.raises(ModelError, match="other shapes"):
        make_draft(target, tmp_path / "other", replace(RECIPE, kind="layers"), start=first)


@pytest.mark.parametrize("kind", ["layers", "eagle"])
def test_a_quantised_target_gets_a_draft_whose_own_layers_are_not(tmp_path: Path, kind: str) -> None:
    made = tiny_llama(1, hidden=64, layers=6)
    nn.quantize(made, group_size=32, bits=4)
    target = save_model(made, tmp_path / "target", quantization={"group_size": 32, "bits": 4})
    recipe = replace(RECIPE, kind=kind, layers=(0, -1) if kind == "layers" else None, tokens=600, epochs=1)
    report = make_draft(target, tmp_path / "draft", recipe, text_file=tmp_path / "folder" / "text")
    assert report is not None and report.agreement > 0
    pair = load_pair(target, tmp_path / "draft")
    assert pair.draft is not None
    kinds = {type(module) for block in layers_of(pair.draft.model) for _, module in block.named_modules()}
    assert nn.Linear in kinds and nn.QuantizedLinear not in kinds
    assert (tmp_path / "folder" / "text.npz").is_file()


@pytest.mark.parametrize("kind", ["layers", pytest.param("eagle", marks=pytest.mark.nightly)])
def test_a_batch_is_computed_in_parts_where_memory_is_short(
    kind: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft learns as much: parts of a batch make one update."""
    recipe = replace(RECIPE, kind=kind, layers=(0, -1) if kind == "layers" else None, tokens=800, epochs=2)
    sizes: list[int] = []
    loss_of = Distillation.__call__

    def noting(loss: Distillation, draft: nn.Module, batch: TextBatch) -> mx.array:
        sizes.append(len(batch.tokens))
        return loss_of(loss, draft, batch)

    monkeypatch.setattr(Distillation, "__call__", noting)
    whole = make_draft(target, tmp_path / "whole", recipe, text_file=tmp_path / "text")
    assert whole is not None and set(sizes) == {recipe.batch}
    updates = len(sizes)
    sizes.clear()
    # So many that they are nearly all of it.
    monkeypatch.setattr("service.learning.make.draft.LOGITS_COPIES", 10**5)
    free = 2**29 + 2**27 + recipe.batch // 2 * 10**5 * recipe.length * 97 * 4
    monkeypatch.setattr("service.engine.device.device_free_bytes", lambda: free)
    done: list[int] = []
    parts = make_draft(
        target,
        tmp_path / "parts",
        recipe,
        text_file=tmp_path / "text",
        report=lambda stage, step, *_: done.append(step) if stage == "distilling" else None,
    )
    assert parts is not None and set(sizes) == {recipe.batch // 2} and len(sizes) == 2 * updates == 2 * done[-1]
    assert parts.agreement == pytest.approx(whole.agreement, abs=0.03) and parts.agreement > parts.agreement_before
    monkeypatch.setattr("service.engine.device.device_free_bytes", lambda: 2**29)
    stages: list[str] = []
    with pytest.raises(TrainingFailed, match=r"distilling takes .* and 0\.5 GiB are free: use a smaller --length"):
        make_draft(target, tmp_path / "none", recipe, report=lambda stage, *_: stages.append(stage))
    assert stages == [] and not (tmp_path / "none").exists()


@pytest.mark.nightly
def test_half_precision_learns_too(target: Path, tmp_path: Path) -> None:
    report = make_draft(target, tmp_path / "half", replace(LONG, dtype="bfloat16", blend=True))
    assert report is not None
    assert report.agreement > report.agreement_before
    weights = mx.load(str(tmp_path / "half" / "model.safetensors"))
    assert isinstance(weights, dict)
    assert {array.dtype for array in weights.values()} == {mx.float32}


SHARED = {"model.embed_tokens.weight", "lm_head.weight"}


def leaves(model: eagle.Model) -> set[str]:
    return {name for name, _ in tree_flatten(model.parameters())}


def test_everything_but_embeddings_and_head_is_trained(bound: tuple[eagle.Model, eagle.Model]) -> None:
    draft = bound[0]
    freeze_shared(draft)
    trained = {name for name, _ in tree_flatten(draft.trainable_parameters())}
    assert trained == leaves(draft) - SHARED
    assert {"project.weight", "model.layers.0.fuse.weight", "model.norm.weight"} <= trained


@pytest.mark.parametrize("blend", [False, True])
def test_the_loss_is_the_mean_of_its_steps(bound: tuple[eagle.Model, eagle.Model], blend: bool) -> None:
    draft, leader = bound
    tokens = np.random.default_rng(0).integers(3, 97, (2, 13)).astype(np.int32)
    written = np.ones((2, 12), dtype=np.float32)
    written[0, :5] = 0.0
    inputs = mx.array(tokens[:, :-1])
    p = probabilities(leader(inputs))
    expected = []
    for step, state in enumerate(draft.model.unrolled(inputs, draft.features(inputs), 4)):
        q = probabilities(draft.logits(state))
        counted = written * (np.arange(12) >= step)
        kl = float((np.sum(p * np.log(p / q), axis=-1) * counted).sum() / counted.sum())
        apart = float((np.abs(p - q).sum(axis=-1) * counted).sum() / counted.sum() / 2)
        weight = np.exp(-3.0 * (1.0 - apart)) if blend else 1.0
        expected.append(weight * kl + (1.0 - weight) * apart)
    loss = Distillation(leader, mx.float32, blend=blend)(draft, TextBatch(tokens, mx.array(written)))
    assert loss.item() == pytest.approx(np.average(expected, weights=[1, 0.8, 0.64, 0.512]), rel=1e-4)


def probabilities(logits: mx.array) -> np.ndarray:
    return np.array(mx.softmax(logits, axis=-1), dtype=np.float64)


@pytest.mark.parametrize(("depth", "layers"), [(30, [1, 14, 26]), (6, [1, 2]), (2, [0, 1]), (1, [0])])
def test_the_default_feature_layers_fit_any_depth(depth: int, layers: list[int]) -> None:
    assert default_feature_layers(depth) == layers
