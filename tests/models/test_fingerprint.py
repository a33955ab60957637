"""Fingerprints depend only on the content."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from service.core import ModelError
from service.models.fingerprint import model_fingerprint, tokenizer_fingerprint, vocabulary_fingerprint

MakeModel = Callable[..., Path]


def test_formatting_and_place_do_not_matter(tmp_path: Path, make_model: MakeModel) -> None:
    folder = make_model("a")
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        content = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps(dict(reversed(content.items())), indent=7))
    (copy / "README.md").write_text("notes")
    assert model_fingerprint(folder) == model_fingerprint(copy)
    assert tokenizer_fingerprint(folder) == tokenizer_fingerprint(copy)


def test_one_bit_of_a_weight_and_one_setting_matter(make_model: MakeModel) -> None:
    folder = make_model("a")
    before = model_fingerprint(folder)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    changed = model_fingerprint(folder)
    assert changed != before
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 20000.0}))
    assert model_fingerprint(folder) not in {before, changed}


@pytest.mark.parametrize("place", [9, 40_000_000, 2**30 - 1], ids=["header", "middle", "end"])
def test_large_files_are_sampled_from_end_to_end(tmp_path: Path, place: int) -> None:
    """A sparse file of 1 GiB; a change as wide as the gap between two samples is always seen."""
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.write((64).to_bytes(8, "little") + b" " * 64)
        file.truncate(2**30)
    before = model_fingerprint(tmp_path)
    with weights.open("r+b") as file:
        file.seek(place)
        file.write(b"x" * min(2**30 // 255, 2**30 - place))
    assert model_fingerprint(tmp_path) != before
    with weights.open("r+b") as file:
        file.truncate(2**30 + 1)
    assert model_fingerprint(tmp_path) != before


def test_the_chat_template_is_part_of_the_tokenizer(make_model: MakeModel) -> None:
    plain, other = make_model("a"), make_model("b", template="{{ messages[0]['content'] }}")
    assert tokenizer_fingerprint(plain) != tokenizer_fingerprint(other)


def test_a_vocabulary_is_its_map_not_its_size_or_order() -> None:
    assert vocabulary_fingerprint({"a": 0, "b": 1}) == vocabulary_fingerprint({"b": 1, "a": 0})
    assert vocabulary_fingerprint({"a": 0, "b": 1}) != vocabulary_fingerprint({"a": 1, "b": 0})


def test_missing_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        model_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="safetensors"):
        model_fingerprint(tmp_path)
    with pytest.raises(ModelError, match="tokenizer"):
        tokenizer_fingerprint(tmp_path)
