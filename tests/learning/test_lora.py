"""Adapters: the layers they change, mlx-lm's format, and starting from a parent."""

import json
from datetime import UTC, datetime
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import load_adapters

from service.core import AdapterRef, AdapterState, TrainingFailed
from service.engine.adapters import load
from service.learning import lora
from service.learning.batches import Batch, collate
from service.learning.examples import build
from service.learning.losses import TargetDivergence
from service.learning.train import Optimiser, train
from service.models.fingerprint import folder_sha256
from tests.support.logged_texts import VOCABULARY, random_texts, with_targets
from tests.support.oracle import tiny_llama
from tests.support.typed import as_float, leaves, load_arrays

KEYS = {f"self_attn.{n}_proj" for n in "qkvo"} | {f"mlp.{n}_proj" for n in ("gate", "up", "down")}
PROBE = mx.array([[1, 5, 9, 2, 77, 30]])
FINGERPRINT = "d" * 64


def some_batch() -> Batch:
    texts = with_targets(tiny_llama(1), random_texts(4, seed=2))
    return collate(build(texts, max_length=128, vocabulary=VOCABULARY).examples)


def quantised(seed: int) -> nn.Module:
    model = tiny_llama(seed, hidden=64)
    nn.quantize(model, group_size=32, bits=4)
    return model


def trained(model: nn.Module, steps: int = 5, *, rank: int = 4, scale: float = 2.0, rate: float = 1e-2) -> lora.Shape:
    shape = lora.wrap(model, rank=rank, scale=scale, seed=0)
    batch = some_batch()
    train(model, [batch] * steps, loss_fn=TargetDivergence(model), optimiser=Optimiser(rate, steps))
    return shape


def written(folder: Path, **settings: float) -> nn.Module:
    """A trained model whose adapter is in `folder`."""
    model = tiny_llama(2)
    shape = trained(model, **settings)  # pyright: ignore[reportArgumentType]
    lora.save(model, shape, folder, draft=FINGERPRINT, target="t" * 64)
    return model


def test_lora_sits_on_every_linear_layer_of_the_blocks_and_nothing_else_trains() -> None:
    model = tiny_llama(2)
    before = {name: array.shape for name, array in leaves(model.parameters())}
    logits = model(PROBE)
    shape = lora.wrap(model, rank=4, scale=2.0, seed=0)
    assert set(shape.keys) == KEYS
    assert mx.array_equal(model(PROBE), logits).item()
    names = {name for name, _ in leaves(model.trainable_parameters())}
    assert names == {f"model.layers.{i}.{key}.lora_{x}" for i in range(2) for key in KEYS for x in "ab"}
    counted = lora.counts(model)
    assert counted.frozen == sum(mx.zeros(s).size for s in before.values())
    ins_and_outs = sum(sum(before[f"model.layers.{i}.{key}.weight"]) for i in range(2) for key in KEYS)
    assert counted.trainable == 4 * ins_and_outs


def test_a_draft_without_linear_layers_is_refused() -> None:
    class Bare(nn.Module):
        layers: list[nn.Module] = [nn.RMSNorm(8)]  # noqa: RUF012

    with pytest.raises(TrainingFailed, match="no linear layer"):
        lora.wrap(Bare(), rank=4, scale=2.0, seed=0)


def test_frozen_weights_do_not_move() -> None:
    model = tiny_llama(2)
    before = dict(leaves(model.parameters()))
    trained(model)
    after = dict(leaves(model.parameters()))
    for name, array in before.items():
        wrapped = name.replace(".weight", ".linear.weight")
        assert mx.array_equal(array, after[name if name in after else wrapped]).item(), name


def test_merged_and_unmerged_logits_are_equal() -> None:
    model = tiny_llama(2)
    bare = model(PROBE)
    trained(model)
    unmerged = model(PROBE)
    fused = [(n, m.fuse()) for n, m in model.named_modules() if isinstance(m, LoRALinear)]
    model.update_modules(tree_unflatten(fused))
    assert not mx.allclose(unmerged, bare, atol=1e-2).item()
    assert mx.allclose(model(PROBE), unmerged, atol=1e-4).item()


def test_mlx_lm_loads_a_saved_adapter(tmp_path: Path) -> None:
    model = written(tmp_path / "a")
    loaded = load_adapters(tiny_llama(2), str(tmp_path / "a"))
    loaded.eval()
    assert mx.array_equal(loaded(PROBE), model(PROBE)).item()
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["fine_tune_type"] == "lora"
    assert config["num_layers"] == 2
    assert config["lora_parameters"] == {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": sorted(KEYS)}


def test_the_engine_serves_a_saved_adapter(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    model = written(folder)
    ref = AdapterRef(
        1, folder, folder_sha256(folder), 4, 2.0, tuple(sorted(KEYS)), FINGERPRINT, 0, 1, AdapterState.CANDIDATE,
        datetime.now(UTC),
    )  # fmt: skip
    draft = load(tiny_llama(2), ref, FINGERPRINT)
    assert mx.allclose(draft.model(PROBE), model(PROBE), atol=1e-4).item()


def test_a_four_bit_base_trains_and_stays_four_bit(tmp_path: Path) -> None:
    model = quantised(2)
    before = dict(leaves(model.parameters()))
    shape = lora.wrap(model, rank=8, scale=2.0, seed=0)
    assert set(shape.keys) == KEYS
    batch, loss = some_batch(), TargetDivergence(model)
    report = train(model, [batch] * 30, loss_fn=loss, optimiser=Optimiser(1e-2, 30))
    assert report.loss < 0.7 * report.losses[0]
    gradients = dict(leaves(nn.value_and_grad(model, loss)(model, batch)[1]))
    assert all(as_float(mx.abs(g).max()) > 0 for name, g in gradients.items() if name.endswith("lora_b"))
    after = dict(leaves(model.parameters()))
    for name, array in before.items():
        leaf = name.rsplit(".", 1)
        wrapped = f"{leaf[0]}.linear.{leaf[1]}"
        assert mx.array_equal(array, after[name if name in after else wrapped]).item(), name
    lora.save(model, shape, tmp_path / "q", draft=FINGERPRINT, target="t" * 64)
    loaded = load_adapters(quantised(2), str(tmp_path / "q"))
    assert mx.array_equal(loaded(PROBE), model(PROBE)).item()


def test_an_adapter_file_says_what_it_is_of(tmp_path: Path) -> None:
    model = tiny_llama(2)
    shape = trained(model)
    lora.save(model, shape, tmp_path, draft=FINGERPRINT, target="t" * 64, run=7, parent=3)
    _, metadata = mx.load(str(tmp_path / "adapters.safetensors"), return_metadata=True)
    origin = {"draft": FINGERPRINT, "target": "t" * 64, "rank": str(shape.rank), "run": "7", "parent": "3"}
    assert metadata == {"format": "mlx"} | {f"redraft.{name}": value for name, value in origin.items()}


@pytest.mark.parametrize(("rank", "scale"), [(4, 2.0), (4, 0.5), (16, 2.0), (16, 8.0)])
def test_a_run_starts_from_its_parents_weights(tmp_path: Path, rank: int, scale: float) -> None:
    parent = written(tmp_path / "parent")
    child = tiny_llama(2)
    shape = lora.wrap(child, rank=rank, scale=scale, seed=9)
    bare = child(PROBE)
    lora.warm_start(child, shape, tmp_path / "parent", FINGERPRINT)
    assert not mx.allclose(child(PROBE), bare, atol=1e-2).item()
    assert mx.allclose(child(PROBE), parent(PROBE), atol=1e-4).item()
    report = train(child, [some_batch()] * 3, loss_fn=TargetDivergence(child), optimiser=Optimiser(1e-3, 3))
    assert report.loss < report.losses[0]


def corrupt_config(folder: Path, **changes: object) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_parent_that_does_not_fit_fails_the_run(tmp_path: Path) -> None:
    written(tmp_path / "ok", rank=8)

    def begin(folder: Path, rank: int = 8, draft: str = FINGERPRINT) -> None:
        child = tiny_llama(2)
        lora.warm_start(child, lora.wrap(child, rank=rank, scale=2.0, seed=9), folder, draft)

    begin(tmp_path / "ok")
    with pytest.raises(TrainingFailed, match="rank 8, above the requested 4"):
        begin(tmp_path / "ok", rank=4)
    with pytest.raises(TrainingFailed, match="another draft"):
        begin(tmp_path / "ok", draft="e" * 64)
    with pytest.raises(TrainingFailed, match="cannot be read"):
        begin(tmp_path / "missing")
    written(tmp_path / "cut", rank=8)
    weights = (tmp_path / "cut" / "adapters.safetensors").read_bytes()
    (tmp_path / "cut" / "adapters.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(TrainingFailed, match="cannot be read"):
        begin(tmp_path / "cut")
    written(tmp_path / "keys", rank=8)
    lora_parameters = {"rank": 8, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    corrupt_config(tmp_path / "keys", lora_parameters=lora_parameters)
    with pytest.raises(TrainingFailed, match="other layers"):
        begin(tmp_path / "keys")
    arrays = load_arrays(tmp_path / "ok" / "adapters.safetensors")
    name = next(iter(arrays))
    for label, changed in (
        ("nan", arrays | {name: arrays[name] * float("nan")}),
        ("less", {n: a for n, a in arrays.items() if n != name}),
        ("wide", arrays | {name: mx.zeros((3, 3))}),
    ):
        written(tmp_path / label, rank=8)
        (tmp_path / label / "adapters.safetensors").unlink()
        mx.save_safetensors(str(tmp_path / label / "adapters.safetensors"), changed)
        with pytest.raises(TrainingFailed, match="finite" if label == "nan" else "tensors of this draft"):
            begin(tmp_path / label)


def test_adapters_can_be_removed(tmp_path: Path) -> None:
    first = written(tmp_path / "a")
    model = tiny_llama(2)
    bare = model(PROBE)
    lora.attach(model, tmp_path / "a", FINGERPRINT)
    assert mx.array_equal(model(PROBE), first(PROBE)).item()
    lora.detach(model)
    assert mx.array_equal(model(PROBE), bare).item()
    lora.detach(model)
    lora.attach(model, tmp_path / "a", FINGERPRINT)
    assert mx.array_equal(model(PROBE), first(PROBE)).item()
