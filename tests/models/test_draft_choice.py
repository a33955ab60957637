"""Which draft a target gets where none is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from service.app import resolve_models
from service.core import ModelError, PairError
from service.models.catalog import DRAFTS
from service.models.draft_choice import (
    FAMILIES,
    LARGEST,
    Choice,
    choices,
    family_draft,
    find_draft,
    made_drafts,
    own_name,
    write_made_for,
)
from service.models.fingerprint import model_fingerprint
from service.models.pair import check_fit, load_pair
from service.settings import load_settings
from tests.models.conftest import byte_vocabulary
from tests.support.hub_cache import cache_model, use_hub_cache
from tests.support.hub_downloads import COMMIT, hub_of

MakeModel = Callable[..., Path]
QWEN3 = {"model_type": "qwen3", "head_dim": 8}


@pytest.mark.parametrize(
    ("target", "model_type", "draft"),
    [
        ("mlx-community/Qwen3-8B-4bit", "qwen3", "mlx-community/Qwen3-0.6B-4bit"),
        ("mlx-community/Qwen3-1.7B-bf16", "qwen3", "mlx-community/Qwen3-0.6B-4bit"),
        ("lmstudio-community/Qwen3-4B-Instruct-2507-MLX-8bit", "qwen3", "mlx-community/Qwen3-0.6B-4bit"),
        ("mlx-community/Qwen3-30B-A3B-4bit-DWQ", "qwen3_moe", "mlx-community/Qwen3-0.6B-4bit"),
        ("mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit", "qwen3_moe", "mlx-community/Qwen3-0.6B-4bit"),
        ("mlx-community/Qwen3-Next-80B-A3B-Instruct-4bit", "qwen3_next", "mlx-community/Qwen3-0.6B-4bit"),
        ("mlx-community/Qwen3.5-27B-4bit", "qwen3_5", "mlx-community/Qwen3.5-0.8B-4bit"),
        ("mlx-community/Qwen3.6-35B-A3B-4bit", "qwen3_5_moe", "mlx-community/Qwen3.5-0.8B-4bit"),
        ("mlx-community/Qwen2.5-7B-Instruct-4bit", "qwen2", "mlx-community/Qwen2.5-0.5B-Instruct-4bit"),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", "qwen2", "mlx-community/Qwen2.5-Coder-0.5B-Instruct-4bit"),
        (
            "mlx-community/DeepSeek-R1-Distill-Qwen-32B-4bit",
            "qwen2",
            "mlx-community/DeepSeek-R1-Distill-Qwen-1.5B-4bit",
        ),
        ("mlx-community/Llama-3.2-3B-Instruct-4bit", "llama", "mlx-community/Llama-3.2-1B-Instruct-4bit"),
        ("mlx-community/Meta-Llama-3.1-8B-Instruct-4bit", "llama", "mlx-community/Llama-3.2-1B-Instruct-4bit"),
        ("mlx-community/Llama-3.3-70B-Instruct-8bit", "llama", "mlx-community/Llama-3.2-1B-Instruct-4bit"),
        ("mlx-community/gemma-3-1b-it-4bit", "gemma3_text", "mlx-community/gemma-3-270m-it-4bit"),
        ("mlx-community/gemma-3-4b-it-qat-4bit", "gemma3", "mlx-community/gemma-3-270m-it-4bit"),
        ("mlx-community/gemma-3-12b-it-qat-4bit", "gemma3", "mlx-community/gemma-3-1b-it-4bit"),
        ("google/gemma-3-27b-it", "gemma3", "mlx-community/gemma-3-1b-it-4bit"),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "llama", "mlx-community/SmolLM2-135M-Instruct"),
        ("HuggingFaceTB/SmolLM2-360M-Instruct", "llama", "mlx-community/SmolLM2-135M-Instruct"),
        ("models/qwen3-14b-4bit", "qwen3", "mlx-community/Qwen3-0.6B-4bit"),
    ],
)
def test_a_target_gets_the_small_model_of_its_family(target: str, model_type: str, draft: str) -> None:
    for config in (None, {"model_type": model_type}):
        found = family_draft(target, config)
        assert found is not None
        assert found[1].repositories[0] == draft


@pytest.mark.parametrize(
    "target",
    [
        "mlx-community/Qwen3-0.6B-4bit",
        "mlx-community/Qwen3-8B-Base-4bit",
        "mlx-community/Qwen3-VL-8B-Instruct-4bit",
        "mlx-community/Qwen3-Embedding-8B-4bit",
        "mlx-community/Qwen2.5-7B-4bit",
        "mlx-community/Qwen2.5-VL-7B-Instruct-4bit",
        "mlx-community/QwQ-32B-4bit",
        "mlx-community/DeepSeek-R1-0528-Qwen3-8B-4bit",
        "mlx-community/Meta-Llama-3-8B-Instruct-4bit",
        "mlx-community/Llama-3.2-1B-Instruct-4bit",
        "mlx-community/Hermes-3-Llama-3.1-8B-4bit",
        "mlx-community/gemma-3-270m-it-4bit",
        "mlx-community/gemma-3n-E4B-it-4bit",
        "mlx-community/SmolLM2-135M-Instruct",
        "mlx-community/Mistral-Small-24B-Instruct-2501-4bit",
        "my-model",
        "",
        "/",
    ],
)
def test_others_get_none(target: str) -> None:
    assert family_draft(target) is None


def test_a_name_alone_does_not_make_a_family() -> None:
    assert family_draft("org/Qwen3-8B-4bit", {"model_type": "llama"}) is None
    assert family_draft("org/Qwen3-8B-4bit", {}) is None


def test_drafts_are_members_of_their_family_and_get_none_of_their_own_size() -> None:
    for family in FAMILIES:
        assert [small.billions for small in family.small] == sorted(small.billions for small in family.small)
        for small in family.small:
            for repository in small.repositories:
                match = family.names.match(own_name(repository))
                assert match is not None
                assert float(match["size"]) * (1 if match["unit"] in "bB" else 1e-3) == pytest.approx(small.billions)
                found = family_draft(repository)
                assert found is None or found[1].billions <= LARGEST * small.billions


def test_the_document_names_what_is_fetched() -> None:
    text = (Path(__file__).parents[2] / "docs" / "pairs.md").read_text(encoding="utf-8")
    fetched = re.findall(r"^\|.*\| `(\S+)` \|$", text, re.MULTILINE)
    assert sorted(fetched) == sorted(small.repositories[0] for family in FAMILIES for small in family.small)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("mlx-community/Qwen3-8B-4bit", "Qwen3-8B-4bit"),
        ("/somewhere/Qwen3-8B-4bit/", "Qwen3-8B-4bit"),
        ("hub/models--mlx-community--Qwen3-8B-4bit/snapshots/0123456789abcdef", "Qwen3-8B-4bit"),
        ("smollm2-135m", "smollm2-135m"),
    ],
)
def test_a_models_own_name(target: str, name: str) -> None:
    assert own_name(target) == name


def test_a_folder_is_called_by_its_name_wherever_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Qwen3-8B").mkdir()
    monkeypatch.chdir(tmp_path / "Qwen3-8B")
    assert own_name(".") == "Qwen3-8B"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_hub_cache(tmp_path / "hub", monkeypatch)


def test_a_cached_conversion_goes_before_one_that_has_to_be_fetched(
    tmp_path: Path, make_model: MakeModel, hub: Path
) -> None:
    target = make_model("Qwen3-8B-4bit", **QWEN3)
    name = "mlx-community/Qwen3-0.6B-bf16"
    assert [each.name for each in choices(str(target), target, tmp_path)] == ["mlx-community/Qwen3-0.6B-4bit"]
    snapshot = cache_model(hub, name, make_model("small", num_hidden_layers=1, **QWEN3))
    assert [each.name for each in choices(str(target), target, tmp_path)] == [name]
    said: list[str] = []
    assert find_draft(str(target), target, tmp_path, said.append) == snapshot
    assert said[-1].startswith(f"draft: {name}, the small model of its family, Qwen3")
    (snapshot / "model.safetensors").unlink()
    assert [each.name for each in choices(str(target), target, tmp_path)] == ["mlx-community/Qwen3-0.6B-4bit"]


def test_a_found_draft_that_does_not_fit_is_left_out_and_a_named_one_is_an_error(
    tmp_path: Path, make_model: MakeModel, hub: Path
) -> None:
    vocabulary = byte_vocabulary()
    other = vocabulary | {"a": vocabulary["b"], "b": vocabulary["a"]}
    target = make_model("Qwen3-8B-4bit", **QWEN3)
    draft = cache_model(hub, "mlx-community/Qwen3-0.6B-4bit", make_model("small", vocabulary=other, **QWEN3))
    said: list[str] = []
    settings = load_settings(None, {"home": str(tmp_path / "home"), "models.target": str(target)})
    assert resolve_models(settings, said.append).draft is None
    assert (
        "mlx-community/Qwen3-0.6B-4bit (the small model of its family, Qwen3) is left out: target and draft map"
        in said[-2]
    )
    assert said[-1].endswith(f"redraft make-draft --target {target}")
    with pytest.raises(PairError, match="map tokens to different ids"):
        load_pair(target, draft)
    with pytest.raises(PairError, match="map tokens to different ids"):
        check_fit(target, draft)


def test_a_draft_that_cannot_be_fetched_is_left_out(tmp_path: Path, make_model: MakeModel, hub: Path) -> None:
    target = make_model("Qwen3-8B-4bit", **QWEN3)
    said: list[str] = []
    assert find_draft(str(target), target, tmp_path, said.append) is None
    assert said[0] == "fetching mlx-community/Qwen3-0.6B-4bit from the hub"
    assert "is left out: mlx-community/Qwen3-0.6B-4bit cannot be had from the hub" in said[1]
    assert (
        said[2]
        == f"no draft model for {target}: serving without one. To make one: redraft make-draft --target {target}"
    )


FIND = """
import sys
from pathlib import Path
from service.models.draft_choice import find_draft
for target in sys.argv[2:]:
    print(find_draft(target, Path(target), Path(sys.argv[1]), print))
"""


def test_a_draft_is_fetched_from_the_hub_with_nothing_that_could_run(tmp_path: Path, make_model: MakeModel) -> None:
    """In a child process, since the hub's client reads its environment at import."""
    targets = [make_model("Qwen3-8B-4bit", **QWEN3), make_model("Qwen2.5-7B-Instruct", model_type="qwen2")]
    small = make_model("small", num_hidden_layers=1, **QWEN3)
    files = {file.name: file.read_bytes() for file in small.iterdir()} | {"modeling.py": b"print('no')"}
    with hub_of({"mlx-community/Qwen3-0.6B-4bit": files}) as (address, downloaded):
        mine = {"HF_ENDPOINT": address, "HF_HUB_CACHE": str(tmp_path / "hub"), "NO_PROXY": "*", "no_proxy": "*"}
        others = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        words = [sys.executable, "-c", FIND, str(tmp_path), *map(str, targets)]
        child = subprocess.run(words, env=others | mine, capture_output=True, text=True, check=True, timeout=120)
    said = child.stdout.splitlines()
    snapshot = tmp_path / "hub" / "models--mlx-community--Qwen3-0.6B-4bit" / "snapshots" / COMMIT
    assert said[0] == "fetching mlx-community/Qwen3-0.6B-4bit from the hub"
    assert said[1].startswith("draft: mlx-community/Qwen3-0.6B-4bit, the small model of its family, Qwen3 (")
    assert said[2] == str(snapshot)
    fetched = {path.name for path in snapshot.iterdir()}
    assert fetched == files.keys() - {"modeling.py"}
    assert sorted(downloaded) == sorted(f"mlx-community/Qwen3-0.6B-4bit/{name}" for name in fetched)
    missing = "mlx-community/Qwen2.5-0.5B-Instruct-4bit"
    assert said[3] == f"fetching {missing} from the hub"
    assert said[4].startswith(
        f"the draft {missing} (the small model of its family, Qwen2.5) is left out: {missing} cannot"
    )
    assert said[-1] == "None"


def test_no_draft_is_looked_for_where_none_is_wanted_or_one_is_named(
    tmp_path: Path, make_model: MakeModel, hub: Path
) -> None:
    target, draft = make_model("Qwen3-8B-4bit", **QWEN3), make_model("mine", seed=1, **QWEN3)
    cache_model(hub, "mlx-community/Qwen3-0.6B-4bit", make_model("small", **QWEN3))
    for named, expected in (("none", None), (str(draft), draft)):
        flags = {"home": str(tmp_path / "home"), "models.target": str(target), "models.draft": named}
        said: list[str] = []
        assert resolve_models(load_settings(None, flags), said.append).draft == expected
        assert not said


def made(home: Path, folder: Path, target: str, age: float) -> Path:
    """A draft in the home folder, made from the target with this fingerprint, so many seconds ago."""
    final = home / DRAFTS / folder.name
    final.parent.mkdir(exist_ok=True)
    folder.rename(final)
    write_made_for(final, target)
    stamp = final / "redraft.json"
    written = stamp.stat().st_mtime - age
    os.utime(stamp, (written, written))
    return final


def test_the_newest_draft_that_was_made_from_this_target_goes_first(
    tmp_path: Path, make_model: MakeModel, hub: Path
) -> None:
    target, home = make_model("Qwen3-8B-4bit", seed=1, **QWEN3), tmp_path
    mine = model_fingerprint(target)
    old = made(home, make_model("old", **QWEN3), mine, 60.0)
    new = made(home, make_model("new", **QWEN3), mine, 30.0)
    made(home, make_model("other", **QWEN3), "of another target", 0.0)
    (home / DRAFTS / "no-draft").mkdir()
    (home / DRAFTS / "no-draft" / "redraft.json").write_text("[]")
    removed = home / DRAFTS / ".new.making-removed"
    removed.mkdir()
    write_made_for(removed, mine)
    assert made_drafts(target, home) == [new, old]
    found = [(each.name, each.why) for each in choices(str(target), target, home)]
    assert found[:2] == [(str(new), "made from this target"), (str(old), "made from this target")]
    assert found[2][0] == "mlx-community/Qwen3-0.6B-4bit"
    assert find_draft(str(target), target, home, lambda step: None) == new


def test_what_was_made_goes_before_what_ships(tmp_path: Path, make_model: MakeModel) -> None:
    target = make_model("target")
    ships = Choice("smollm2-135m-draft", "ships with redraft")
    assert choices("smollm2-135m", target, tmp_path) == [ships]
    mine = made(tmp_path, make_model("mine"), model_fingerprint(target), 0.0)
    assert choices("smollm2-135m", target, tmp_path) == [Choice(str(mine), "made from this target"), ships]


def test_the_next_one_serves_where_the_first_does_not_fit(tmp_path: Path, make_model: MakeModel, hub: Path) -> None:
    target = make_model("Qwen3-8B-4bit", **QWEN3)
    made(tmp_path, make_model("broken", vocab_size=100, **QWEN3), model_fingerprint(target), 0.0)
    snapshot = cache_model(hub, "mlx-community/Qwen3-0.6B-4bit", make_model("small", **QWEN3))
    said: list[str] = []
    assert find_draft(str(target), target, tmp_path, said.append) == snapshot
    assert "broken (made from this target) is left out: the draft's logits cover 100 tokens" in said[0]


def test_a_target_that_cannot_be_read_is_an_error(tmp_path: Path, make_model: MakeModel) -> None:
    target = make_model("Qwen3-8B-4bit", **QWEN3)
    (target / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        choices(str(target), target, tmp_path)


def test_a_fit_is_checked_without_weights(tmp_path: Path, make_model: MakeModel) -> None:
    target, draft = make_model("target", **QWEN3), make_model("draft", num_hidden_layers=1)
    check_fit(target, draft)
    with pytest.raises(PairError, match=r"draft's logits cover 100 tokens"):
        check_fit(target, make_model("narrow", vocab_size=100))
    (draft / "tokenizer.json").unlink()
    with pytest.raises(ModelError):
        check_fit(target, draft)


def test_a_made_draft_says_so_in_its_folder(tmp_path: Path) -> None:
    write_made_for(tmp_path, "abc")
    assert json.loads((tmp_path / "redraft.json").read_text()) == {"target": "abc"}
