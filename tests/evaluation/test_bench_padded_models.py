"""Padded models: they say what their source says and have the size that was asked for."""

import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from service.core import BadRequest, ModelError
from service.evaluation.bench import padded_models
from service.evaluation.bench.padded_models import Shape, pad, padded_pair
from service.models.eagle import Model as Head
from service.models.pair import load_pair
from tests.support.eagle_models import plain_llama, tiny_head
from tests.support.model_folders import save_model
from tests.support.tiny_server import write_pair

WIDE = Shape(hidden=192, layers=5, heads=12, kv_heads=8, feed_forward=256)


def logits(folder: Path) -> mx.array:
    """(40, V) of one text, in float32."""
    model: Any = load_model(folder)[0]
    model.set_dtype(mx.float32)
    return cast("mx.array", model(mx.arange(40)[None]))[0]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write_pair(tmp_path / "pair")


@pytest.mark.parametrize("bits", [None, 8])
def test_a_padded_model_says_what_its_source_says(pair: tuple[Path, Path], tmp_path: Path, bits: int | None) -> None:
    config = json.loads((pair[0] / "config.json").read_text())
    ratio = config["num_attention_heads"] // config["num_key_value_heads"]
    wide = Shape(WIDE.hidden, WIDE.layers, 8 * ratio, 8, WIDE.feed_forward)
    pad(pair[0], tmp_path / "wide", wide, deeper=True, bits=bits)
    made = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert (made["hidden_size"], made["num_hidden_layers"], made["num_key_value_heads"]) == (192, 5, 8)
    assert ("quantization" in made) == (bits is not None)
    source, padded = logits(pair[0]), logits(tmp_path / "wide")
    assert source.shape == padded.shape
    assert np.allclose(np.array(padded), np.array(source), atol=0.05 * np.abs(np.array(source)).max())


def test_a_padded_head_reads_what_its_source_reads(tmp_path: Path) -> None:
    target = plain_llama(0)
    head = tiny_head(target, 1)
    folders = save_model(target, tmp_path / "target"), save_model(head, tmp_path / "head")
    args = target.args
    assert args.num_key_value_heads is not None
    heads = args.num_attention_heads // args.num_key_value_heads * 4
    wide = Shape(3 * args.hidden_size, args.num_hidden_layers + 2, heads, 4, 2 * args.intermediate_size)
    padded = tmp_path / "wide target", tmp_path / "wide head"
    for i, folder in enumerate(folders):
        pad(folder, padded[i], wide, deeper=i == 0)

    def steps(folders: tuple[Path, Path]) -> list[mx.array]:
        """Logits (40, V) of the first two steps of a round at every place of one text."""
        pair = load_pair(*folders)
        assert pair.draft is not None
        model = cast("Head", pair.draft.model)
        tokens = mx.arange(40)[None]
        return [model.logits(hidden)[0] for hidden in model.model.unrolled(tokens, model.features(tokens), 2)]

    for mine, theirs in zip(steps(padded), steps(folders), strict=True):
        assert np.allclose(np.array(mine), np.array(theirs), atol=0.05 * np.abs(np.array(theirs)).max())


def test_a_pair_is_padded_once_and_the_draft_keeps_its_layers(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((pair[0] / "config.json").read_text())
    ratio = config["num_attention_heads"] // config["num_key_value_heads"]
    monkeypatch.setitem(padded_models.SHAPES, "8b", Shape(192, config["num_hidden_layers"] + 2, 8 * ratio, 8, 256))
    target, draft = padded_pair(pair, tmp_path, "8b")
    layers = [json.loads((folder / "config.json").read_text())["num_hidden_layers"] for folder in (target, draft)]
    assert layers == [config["num_hidden_layers"] + 2, config["num_hidden_layers"]]
    stamp = (target / "model.safetensors").stat().st_mtime_ns
    assert padded_pair(pair, tmp_path, "8b") == (target, draft)
    assert (target / "model.safetensors").stat().st_mtime_ns == stamp
    assert padded_pair(pair, tmp_path, "8b", 4)[0] != target


def test_what_cannot_be_padded_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no shape '9b'"):
        padded_pair(pair, tmp_path, "9b")
    with pytest.raises(ModelError, match="cannot be padded"):
        pad(pair[0], tmp_path / "odd", Shape(192, 5, 7, 3, 256), deeper=True)
    with pytest.raises(ModelError, match="do not fit"):
        pad(pair[0], tmp_path / "odd", Shape(8, 5, 12, 8, 256), deeper=True)
    config = pair[0] / "config.json"
    for change in ({"model_type": "qwen3"}, {"quantization": {"bits": 4, "group_size": 64}}):
        before = config.read_text()
        config.write_text(json.dumps(json.loads(before) | change))
        with pytest.raises(ModelError, match="no Llama, or quantised"):
            pad(pair[0], tmp_path / "odd", WIDE, deeper=True)
        config.write_text(before)
    assert not (tmp_path / "odd").exists()
