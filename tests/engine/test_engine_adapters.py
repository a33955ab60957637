"""Every tensor and setting of an adapter is checked before it is used."""

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import psutil
import pytest
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import load_adapters

from service.core import AdapterRef, AdapterRefused, AdapterState
from service.engine.adapters import load
from service.engine.folding import as_served
from service.engine.low_rank import LowRankQuantizedLinear
from service.learning import lora
from service.models import vocabulary
from service.models.fingerprint import folder_sha256
from service.models.heads import cut
from tests.support.oracle import tiny_llama
from tests.support.typed import layers_of, leaves, load_arrays

DRAFT = "d" * 64
TOKENS = mx.array([[5, 6, 7, 8]])


def make(folder: Path, quantised: bool = False) -> tuple[nn.Module, AdapterRef, mx.array]:
    """A bare draft, an adapter for it with random weights, and the logits of the two together as LoRA layers."""
    base, trained = tiny_llama(1, hidden=64), tiny_llama(1, hidden=64)
    if quantised:
        nn.quantize(base, group_size=32, bits=4)
        nn.quantize(trained, group_size=32, bits=4)
    shape = lora.wrap(trained, rank=4, scale=2.0, seed=0)
    noise = [
        (name, 0.1 * mx.random.normal(a.shape, key=mx.random.key(i)))
        for i, (name, a) in enumerate(leaves(trained.trainable_parameters()))
    ]
    trained.load_weights(noise, strict=False)
    lora.save(trained, shape, folder, draft=DRAFT, target="t" * 64)
    ref = AdapterRef(
        id=1,
        folder=folder,
        sha256=folder_sha256(folder),
        rank=shape.rank,
        scale=shape.scale,
        keys=tuple(shape.keys),
        draft=DRAFT,
        parent=0,
        run=None,
        state=AdapterState.CANDIDATE,
        created_at=datetime.now(UTC),
    )
    return base, ref, trained(TOKENS)


@pytest.mark.nightly
def test_loading_leaves_no_memory(tmp_path: Path) -> None:
    """MLX holds what random values are made of until they are computed: some 60 kB for each adapter of this size."""
    base, ref, _ = make(tmp_path / "a")

    def grown(times: int) -> int:
        before = psutil.Process().memory_info().rss
        for _ in range(times):
            load(base, ref, DRAFT)
        return psutil.Process().memory_info().rss - before

    grown(50)
    assert grown(250) < 250 * 10_000


@pytest.mark.parametrize("quantised", [False, True], ids=["folded", "quantised"])
def test_an_adapter_computes_what_was_trained_and_leaves_the_base_unchanged(tmp_path: Path, quantised: bool) -> None:
    base, ref, expected = make(tmp_path / "a", quantised)
    before = np.array(base(TOKENS))
    held = {name: id(array) for name, array in leaves(base.parameters())}
    draft = load(base, ref, DRAFT)
    assert np.allclose(np.array(draft.model(TOKENS)), np.array(expected), atol=1e-4)
    assert not np.allclose(np.array(expected), before, atol=1e-2), "the adapter does something"
    assert np.array_equal(np.array(base(TOKENS)), before)
    assert {name: id(array) for name, array in leaves(base.parameters())} == held
    kinds = {type(module) for module in layers_of(draft.model)[0].modules()}
    assert (LowRankQuantizedLinear if quantised else nn.Linear) in kinds and LoRALinear not in kinds
    assert type(draft.model.lm_head) is type(base.lm_head), "other tensors are unchanged"


@pytest.mark.parametrize("quantised", [False, True], ids=["folded", "quantised"])
def test_an_adapter_proposes_from_its_own_reduced_vocabulary_or_its_bases(tmp_path: Path, quantised: bool) -> None:
    base, ref, expected = make(tmp_path / "a", quantised)
    cut(base, [1, 2, 3])
    found = load(base, ref, DRAFT).model(TOKENS)
    assert np.isfinite(np.array(found)).sum() == 3 * TOKENS.size
    vocabulary.write([96, 4], ref.folder)
    found = load(base, replace(ref, sha256=folder_sha256(ref.folder)), DRAFT).model(TOKENS)
    assert mx.allclose(found[..., mx.array([4, 96])], expected[..., mx.array([4, 96])], atol=1e-4)
    assert np.isfinite(np.array(found)).sum() == 2 * TOKENS.size
    assert np.isfinite(np.array(base(TOKENS))).sum() == 3 * TOKENS.size


@pytest.mark.parametrize("ids", [None, [96, 4, 3]], ids=["whole", "cut"])
@pytest.mark.parametrize("kind", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("quantised", [False, True], ids=["folded", "quantised"])
def test_the_gate_scores_the_model_that_serves(
    tmp_path: Path, quantised: bool, kind: mx.Dtype, ids: list[int] | None
) -> None:
    base, ref, _ = make(tmp_path / "a", quantised)
    base.set_dtype(kind)
    if ids is not None:
        vocabulary.write(ids, ref.folder)
    serving = load(base, replace(ref, sha256=folder_sha256(ref.folder)), DRAFT).model
    lora.attach(base, ref.folder, DRAFT)
    apart = as_served(base, ids)
    assert mx.array_equal(apart(TOKENS), serving(TOKENS))
    if not (quantised and kind == mx.float32):
        assert not mx.array_equal(base(TOKENS), serving(TOKENS)), "rounded differently, so it must be what is scored"


def _config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        file = folder / "adapter_config.json"
        config = json.loads(file.read_text())
        change(config)
        file.write_text(json.dumps(config))

    return apply


def _weights(change: Callable[[dict[str, mx.array]], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        file = folder / "adapters.safetensors"
        weights = load_arrays(file)
        mx.eval(weights)
        change(weights)
        mx.save_safetensors(str(folder / "new.safetensors"), weights)
        (folder / "new.safetensors").rename(file)

    return apply


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / "adapters.safetensors").write_bytes(
        change((folder / "adapters.safetensors").read_bytes())
    )


def _overlapping(data: bytes) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    names = list(header)
    same = [n for n in names if header[n]["shape"] == header[names[0]]["shape"]]
    header[same[1]]["data_offsets"] = header[same[0]]["data_offsets"]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def _first(weights: dict[str, mx.array]) -> str:
    return min(weights)


CORRUPTIONS: dict[str, Callable[[Path], object]] = {
    "truncated header": _bytes(lambda data: data[:6]),
    "truncated body": _bytes(lambda data: data[:-64]),
    "trailing bytes": _bytes(lambda data: data + b"\0" * 16),
    "header beyond the limit": _bytes(lambda data: struct.pack("<Q", 2**40) + data[8:]),
    "header that is no JSON": _bytes(lambda data: data[:8] + b"?" * 40 + data[48:]),
    "overlapping tensors": _bytes(_overlapping),
    "missing tensor": _weights(lambda w: w.pop(_first(w))),
    "unknown tensor": _weights(lambda w: w.update(extra=mx.zeros((2, 2)))),
    "wrong shape": _weights(lambda w: w.update({_first(w): mx.zeros((3, 3))})),
    "wrong dtype": _weights(lambda w: w.update({_first(w): mx.zeros(w[_first(w)].shape, dtype=mx.int32)})),
    "NaN": _weights(lambda w: w.update({_first(w): w[_first(w)] * float("nan")})),
    "Inf": _weights(lambda w: w.update({_first(w): w[_first(w)] + float("inf")})),
    "wrong rank": _config(lambda c: c["lora_parameters"].update(rank=8)),
    "wrong scale": _config(lambda c: c["lora_parameters"].update(scale=20.0)),
    "dropout": _config(lambda c: c["lora_parameters"].update(dropout=0.1)),
    "wrong keys": _config(lambda c: c["lora_parameters"].update(keys=["self_attn.q_proj"])),
    "another base": _config(lambda c: c["redraft"].update(draft="e" * 64)),
    "no config": lambda folder: (folder / "adapter_config.json").unlink(),
    "config that is no JSON": lambda folder: (folder / "adapter_config.json").write_text("{"),
    "vocabulary of a larger model": lambda folder: vocabulary.write([5, 97], folder),
    "vocabulary that is no list": lambda folder: (folder / vocabulary.FILE).write_bytes(b"?" * 40),
    "no weights": lambda folder: (folder / "adapters.safetensors").unlink(),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.promise(7)
def test_damaged_adapters_are_refused(tmp_path: Path, kind: str) -> None:
    base, ref, _ = make(tmp_path / "a")
    before = np.array(base(TOKENS))
    CORRUPTIONS[kind](ref.folder)
    # The damaged folder's hash is registered, so that each check is tested without the hash check.
    with pytest.raises(AdapterRefused):
        load(base, replace(ref, sha256=folder_sha256(ref.folder)), DRAFT)
    assert np.array_equal(np.array(base(TOKENS)), before)


@pytest.mark.promise(7)
def test_altered_files_are_refused_by_their_hash(tmp_path: Path) -> None:
    base, ref, _ = make(tmp_path / "a")
    _weights(lambda w: w.update({_first(w): w[_first(w)] * 1.01}))(ref.folder)
    with pytest.raises(AdapterRefused, match="hash"):
        load(base, ref, DRAFT)


def test_mlx_lm_itself_rejects_an_unknown_tensor(tmp_path: Path) -> None:
    """The reason for the minimum version: older mlx-lm ignored unknown tensors."""
    base, ref, expected = make(tmp_path / "a")
    shutil.copytree(ref.folder, tmp_path / "b")
    assert np.allclose(np.array(load_adapters(base, str(ref.folder))(TOKENS)), np.array(expected), atol=1e-5)
    _weights(lambda w: w.update(extra=mx.zeros((2, 2))))(tmp_path / "b")
    with pytest.raises(ValueError, match="extra"):
        load_adapters(tiny_llama(1, hidden=64), str(tmp_path / "b"))
