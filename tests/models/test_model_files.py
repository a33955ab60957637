"""Files of models that are missing, cut off, damaged, or no more than a pointer: one line says which, and what is wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.core import ModelError
from service.models.model_files import check_files
from service.models.pair import load_model, load_pair, unread_pair
from service.models.weights import bytes_in_memory

MakeModel = Callable[..., Path]
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def rename(folder: Path, name: str) -> None:
    weights(folder).rename(folder / name)


def link_to_nothing(folder: Path) -> None:
    weights(folder).unlink()
    weights(folder).symlink_to("../../blobs/0123")


def cut(size: int) -> Callable[[Path], object]:
    return lambda folder: weights(folder).write_bytes(weights(folder).read_bytes()[:size])


def headed(header: object) -> Callable[[Path], object]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return lambda folder: weights(folder).write_bytes(struct.pack("<Q", len(text)) + text + b"0" * 8)


def tensor(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


def index(*names: str) -> Callable[[Path], object]:
    listed = json.dumps({"weight_map": dict(zip("abc", names, strict=False))})
    return lambda folder: (folder / "model.safetensors.index.json").write_text(listed)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "pointer": (
        lambda folder: weights(folder).write_text(POINTER),
        "model.safetensors is a Git LFS pointer, not the file",
    ),
    "empty": (lambda folder: weights(folder).write_bytes(b""), "model.safetensors is empty"),
    "cut in its length": (cut(5), "model.safetensors is cut off: it has 5 bytes"),
    "cut in its header": (cut(100), "model.safetensors is cut off: it has 100 bytes, too few for its header"),
    "cut in its data": (
        lambda folder: cut(weights(folder).stat().st_size - 1)(folder),
        "is cut off: it has .* bytes and should",
    ),
    "a page": (
        lambda folder: weights(folder).write_text("<!DOCTYPE html><html>"),
        "model.safetensors is not a safetensors file",
    ),
    "no JSON": (headed(b"{not"), "is not a safetensors file: its header cannot be read"),
    "no places": (headed({"a": 1}), "its header does not say where a is"),
    "other sizes": (headed(tensor(shape=[3])), "is damaged: its header contradicts itself about a"),
    "backwards": (headed(tensor(shape=[0], data_offsets=[8, 0])), "is damaged: its header contradicts itself about a"),
    "link to nothing": (link_to_nothing, "model.safetensors is a link to a file that is not there"),
    "a folder": (
        lambda folder: (weights(folder).unlink(), weights(folder).mkdir()),
        "model.safetensors cannot be read: Is a",
    ),
    "no weights": (lambda folder: weights(folder).unlink(), "holds no safetensors weights"),
    "a shard is missing": (
        lambda folder: rename(folder, "model-00001-of-00002.safetensors"),
        "lacks model-00002-of-00002.safetensors: the model is partial",
    ),
    "a file of the index is missing": (
        index("model.safetensors", "model-b.safetensors"),
        "lacks model-b.safetensors: the model",
    ),
    "pointer for a tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text(POINTER),
        "tokenizer.json is a Git LFS",
    ),
    "pointer for a configuration": (
        lambda folder: (folder / "config.json").write_text(POINTER),
        "config.json is a Git LFS",
    ),
    "a configuration is cut": (
        lambda folder: (folder / "config.json").write_text('{"model_type": '),
        "config.json cannot be read as JSON: Expecting value",
    ),
    "a list for a configuration": (
        lambda folder: (folder / "config.json").write_text("[]"),
        "/config.json is no JSON object",
    ),
    "a configuration of the tokenizer is none": (
        lambda folder: (folder / "tokenizer_config.json").write_text("null"),
        "tokenizer_config.json is no JSON object",
    ),
    "a configuration in another encoding": (
        lambda folder: (folder / "special_tokens_map.json").write_bytes(b"\xff\xfe{}"),
        "special_tokens_map.json cannot be read as JSON",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), r"holds no tokenizer \(tokenizer.json\)"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_files_are_named(make_model: MakeModel, kind: str) -> None:
    """By what reads sizes, by what loads, and by what only looks whether a pair can be served; in one line, and alike."""
    folder, (damage, message) = make_model("model"), DAMAGE[kind]
    check_files(folder)
    damage(folder)
    said: set[str] = set()
    for use in (check_files, load_model, lambda folder: unread_pair(folder, None)):
        with pytest.raises(ModelError, match=message) as raised:
            use(folder)
        said.add(str(raised.value))
    assert len(said) == 1 and str(folder) in (line := said.pop()) and "\n" not in line
    if "tokenizer" not in kind and "configuration" not in kind:
        with pytest.raises(ModelError, match=message):
            bytes_in_memory(folder, widen=True)


def test_an_index_of_other_files_says_nothing(make_model: MakeModel) -> None:
    """Of shards that were merged, or of the model that was converted."""
    folder = make_model("merged")
    index("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")(folder)
    check_files(folder)
    (folder / "notes.txt").touch()
    (folder / "notes.json").touch()
    assert load_model(folder).fingerprint


def edited(**model: object) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["model"].update(model)


def with_hole(content: dict[str, Any]) -> None:
    content["decoder"] = {"type": "Sequence", "decoders": []}
    content["decoder"]["decoders"] = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    content["model"]["vocab"] = {piece: id + 3 * (id > 100) for piece, id in content["model"]["vocab"].items()}
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < 100]


UNREADABLE: dict[str, Callable[[dict[str, Any]], object]] = {
    "model": edited(type="Nope"),
    "merges": edited(merges=[{"a": 1}]),
    "vocabulary": edited(vocab=[1, 2]),
    "hole": with_hole,
    "nothing": lambda content: content.clear(),
    "no tokens": lambda content: (content["model"].update(vocab={}), content.update(added_tokens=[])),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_tokenizer_that_cannot_be_read_is_named(make_model: MakeModel, kind: str) -> None:
    good, folder = make_model("good"), make_model("bad")
    content = json.loads((folder / "tokenizer.json").read_text())
    UNREADABLE[kind](content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    if kind == "no tokens":
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    for use in (lambda: load_pair(folder, None), lambda: load_pair(good, folder), lambda: unread_pair(good, folder)):
        with pytest.raises(ModelError, match=f"the tokenizer of {folder} (cannot be read: .|has no tokens)") as raised:
            use()
        assert "\n" not in str(raised.value)


def test_what_mlx_lm_says_at_length_is_one_line(make_model: MakeModel) -> None:
    folder = make_model("model", num_hidden_layers=2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 40}))
    with pytest.raises(ModelError, match="cannot be loaded by mlx-lm: Missing") as raised:
        load_model(folder)
    assert len(str(raised.value)) < 600 and "\n" not in str(raised.value)


def test_a_damaged_draft_is_named_by_its_folder(make_model: MakeModel) -> None:
    good, draft = make_model("good"), make_model("draft")
    weights(draft).write_text(POINTER)
    for use in (load_pair, unread_pair):
        with pytest.raises(ModelError, match=f"{weights(draft)} is a Git LFS pointer"):
            use(good, draft)
