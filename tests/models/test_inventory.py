"""Models on this disk, and their removal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from service.core import ModelError, NotFound
from service.models.catalog import CONVERTED, DRAFTS
from service.models.draft_choice import write_made_for
from service.models.inventory import Origin, remove_model, stored_model, stored_models
from tests.support.hub_cache import cache_model, use_hub_cache

MakeModel = Callable[..., Path]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_hub_cache(tmp_path / "hub", monkeypatch)


@pytest.fixture
def home(tmp_path: Path, make_model: MakeModel, hub: Path) -> Path:
    """A home with a converted model, a draft that was made, and what is neither; two models in the hub's cache, one of them in
    two revisions."""
    home = tmp_path / "home"
    for kind, name in ((CONVERTED, "smollm2-135m"), (CONVERTED, "half"), (DRAFTS, "my-draft"), (DRAFTS, "unmarked")):
        (home / kind).mkdir(parents=True, exist_ok=True)
        make_model(name).rename(home / kind / name)
    (home / CONVERTED / "smollm2-135m" / "redraft.json").write_text('{"made_from": "1 a 2"}')
    (home / CONVERTED / ".smollm2-135m.lock").touch()
    write_made_for(home / DRAFTS / "my-draft", "abc")
    cache_model(hub, "org/b", make_model("b"))
    cache_model(hub, "org/b", make_model("b-old", seed=1), revision="v1")
    cache_model(hub, "org/a", make_model("a"))
    without_weights = make_model("tokenizer-alone")
    (without_weights / "model.safetensors").unlink()
    cache_model(hub, "org/tokenizer", without_weights)
    return home


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def test_what_is_on_this_disk(home: Path, hub: Path) -> None:
    found = stored_models(home)
    assert [(model.name, model.origin, model.is_draft) for model in found] == [
        ("smollm2-135m", Origin.CONVERTED, False),
        (str(home / DRAFTS / "my-draft"), Origin.MADE, True),
        ("org/a", Origin.HUB, False),
        ("org/b", Origin.HUB, False),
    ]
    for model in found[:2]:
        assert model.size == size_of(model.folders[0])
    a, b = found[2:]
    assert a.size == size_of(hub / "models--org--a" / "blobs")
    assert (len(b.revisions), len(b.folders)) == (2, 2)
    assert b.folders[0].name == (hub / "models--org--b" / "refs" / "main").read_text()
    assert json.loads((b.folders[0] / "config.json").read_text())["model_type"] == "llama"


def test_a_machine_without_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub_cache(tmp_path / "hub", monkeypatch).rmdir()
    assert stored_models(tmp_path / "home") == []


def test_a_made_draft_goes_and_nothing_else(home: Path) -> None:
    before = {model.name for model in stored_models(home)}
    for name in ("my-draft", "smollm2-135m"):
        model = stored_model(name, home)
        remove_model(model)
        assert not model.folders[0].exists()
        assert {each.name for each in stored_models(home)} == before - {model.name}
        before -= {model.name}
    assert [path.name for path in sorted((home / DRAFTS).iterdir())] == ["unmarked"]
    assert [path.name for path in sorted((home / CONVERTED).iterdir())] == [".smollm2-135m.lock", "half"]


def test_all_revisions_of_a_hub_model_go_with_their_blobs(home: Path, hub: Path) -> None:
    remove_model(stored_model("org/b", home))
    assert not (hub / "models--org--b").exists()
    assert [model.name for model in stored_models(home) if model.origin is Origin.HUB] == ["org/a"]
    assert size_of(hub / "models--org--a" / "blobs") > 0


def test_what_redraft_did_not_make_is_not_removed(home: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    for folder in (mine, home / DRAFTS / "unmarked", home):
        with pytest.raises(NotFound, match="is a folder that redraft did not make"):
            stored_model(str(folder), home)
    for name in ("org/c", "half", "unmarked", "../drafts/my-draft", "", ".", "org/tokenizer"):
        with pytest.raises(NotFound):
            stored_model(name, home)


def test_a_folder_that_went_meanwhile_is_one_sentence(home: Path) -> None:
    model = stored_model("my-draft", home)
    remove_model(model)
    with pytest.raises(ModelError, match="my-draft cannot be removed: "):
        remove_model(model)


def test_finding_out_imports_no_mlx() -> None:
    code = (
        "import sys, pathlib, service.models.inventory as i; i.stored_models(pathlib.Path('/nowhere')); "
        "sys.exit('mlx.core' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
