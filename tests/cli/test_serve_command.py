"""`redraft serve MODEL`: the words that people type, and that a wrong name is refused before anything is made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.cli import names
from service.core import RedraftError
from service.models.catalog import DRAFTS
from service.models.draft_choice import write_made_for
from service.settings import Settings, load_settings
from tests.support.command_line import TREE, Redraft, commands, one_sentence
from tests.support.hub_cache import cache_model, use_hub_cache
from tests.support.hub_downloads import hub_of
from tests.support.model_folders import save_model
from tests.support.oracle import tiny_llama
from tests.support.tiny_server import write_pair


@pytest.mark.usefixtures("restored_process")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("{target}",), {}),
        (("--target", "{target}"), {}),
        (("--model", "{target}"), {}),
        (("-m", "{target}"), {}),
        (("{target}", "--model", "{target}"), {}),
        (("--port", "9000", "{target}"), {"server.port": 9000}),
        (("{target}", "--draft-model", "none"), {"models.draft": "none"}),
        (("{target}", "--alias", "a", "--alias", "b"), {"server.model_aliases": ["a", "b"]}),
        (("{target}", "--served-model-name", "a"), {"server.model_aliases": ["a"]}),
        (("{target}", "-a", "a"), {"server.model_aliases": ["a"]}),
        (("{target}", "--log-level", "error"), {"server.log_level": "error"}),
        (("{target}", "--max-context", "512"), {"engine.max_context": 512}),
        (("{target}", "--max-model-len", "512"), {"engine.max_context": 512}),
        (("-m", "{target}", "-c", "512"), {"engine.max_context": 512}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_server_is_started_with_the_words_that_people_type(
    words: tuple[str, ...],
    expected: dict[str, object],
    tmp_path: Path,
    redraft: Redraft,
    settings_served: list[Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "home"))
    target, _ = write_pair(tmp_path)
    done = redraft("serve", *(word.format(target=target) for word in words))
    assert done.status == 0, done.err
    (settings,) = settings_served
    found = {name: getattr(getattr(settings, name.split(".")[0]), name.split(".")[1]) for name in expected}
    assert (settings.models.target, found) == (str(target), expected)


def test_two_models_are_a_usage_error(redraft: Redraft) -> None:
    for command in ("serve", "doctor", "chat"):
        done = redraft(command, "one", "--target", "other")
        assert done.status == 2 and "two models are named, one and other" in " ".join(done.err.split())


def test_every_command_has_its_help_as_h(capsys: pytest.CaptureFixture[str]) -> None:
    for path, _ in commands(TREE):
        shown: list[str] = []
        for flag in ("-h", "--help"):
            with pytest.raises(SystemExit) as ended:
                TREE.main([*path, flag], prog_name="redraft")
            assert ended.value.code == 0, path
            shown.append(capsys.readouterr().out)
        assert shown[0] == shown[1] and "Usage:" in shown[0]


def test_a_former_name_is_answered_and_not_shown(redraft: Redraft) -> None:
    assert "Usage: redraft practice " in redraft("practise", "--help").out
    assert "practise" not in redraft("--help").out


# ------------------------------------------------------------------------------------------------------------- names


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, without the hub."""
    return use_hub_cache(tmp_path / "hub", monkeypatch)


@pytest.mark.usefixtures("restored_process", "hub")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nope",), "no model nope: give a name of the catalogue (smollm2-135m, "),
        (("smolm2-135m",), "; did you mean smollm2-135m"),
        (("Qwen3-8B-4bit",), "; did you mean mlx-community/Qwen3-8B-4bit?"),
        (("/no/such/folder",), "no model /no/such/folder"),
        (("https://huggingface.co/org/Model-4bit/tree/main",), "; did you mean org/Model-4bit?"),
        (("models/model.Q4_K_M.gguf",), "is a GGUF file, which is not supported"),
        (("model.gguf",), "is a GGUF file, which is not supported"),
        (("{empty}",), "it holds no config.json"),
        (("org/unknown",), "org/unknown is not on this disk, and HF_HUB_OFFLINE prevents downloading it"),
        (("{target}", "--draft", "nope"), "no model nope"),
        (("{target}", "--draft", "org/unknown"), "org/unknown is not on this disk"),
        (("smollm2-135m", "--config", "{pinned}"), "a revision can be pinned for hub names only"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("command", ["serve", "trainer"])
def test_a_wrong_name_is_one_sentence_and_leaves_nothing(
    command: str,
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    redraft: Redraft,
    settings_served: list[Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home, empty, pinned = tmp_path / "home", tmp_path / "empty", tmp_path / "pinned.toml"
    monkeypatch.setenv("REDRAFT_HOME", str(home))
    empty.mkdir()
    pinned.write_text('[models]\nrevision = "abc"\n')
    target, _ = write_pair(tmp_path)
    flags = ["--port", "0"] if command == "serve" else ["--target"]
    done = redraft(command, *flags, *(word.format(empty=empty, pinned=pinned, target=target) for word in words))
    one_sentence(done)
    assert (done.status, message in done.err) == (1, True), done.err
    assert settings_served == [] and not home.exists()


def test_what_may_have_been_meant(tmp_path: Path, hub: Path) -> None:
    made = save_model(tiny_llama(0), tmp_path / DRAFTS / "a-draft")
    write_made_for(made, "a target")
    cache_model(hub, "org/Some-Model-4bit", made)

    def near(name: str) -> list[str]:
        return names.near_names(name, tmp_path)

    assert near("some-model-4bit") == near("other/Some-Model-4bit") == near("Some-Modl-4bit") == ["org/Some-Model-4bit"]
    assert near("Llama-3.2-3B-Instruct-4bit") == ["mlx-community/Llama-3.2-3B-Instruct-4bit"]
    assert near("smollm2-135") == ["smollm2-135m"]
    assert near("a-draft") == near("entirely-different") == near("") == near("/") == []


CHECK = """
import sys
from pathlib import Path
from service.cli.names import check_model
from service.core import ModelError
for name in sys.argv[2:]:
    try:
        check_model(name, Path(sys.argv[1]))
    except ModelError as error:
        print(error)
    else:
        print("fine")
"""


def test_the_hub_is_asked_for_what_is_not_here_and_nothing_is_fetched(tmp_path: Path) -> None:
    """In a child process, since the hub's client reads its environment at import."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    with hub_of({"org/there": {"config.json": b"{}"}}) as (address, downloaded):
        mine = {"HF_ENDPOINT": address, "HF_HUB_CACHE": str(tmp_path / "hub"), "NO_PROXY": "*", "no_proxy": "*"}
        words = [sys.executable, "-c", CHECK, str(tmp_path / "home"), "org/there", "org/missing"]
        done = subprocess.run(words, env=others | mine, capture_output=True, text=True, check=True, timeout=120)
    there, missing = done.stdout.splitlines()
    assert there == "fine" and downloaded == []
    assert missing.startswith("no model org/missing: neither a folder nor on the hub")
    mine["HF_ENDPOINT"] = "http://127.0.0.1:1"
    unreachable = subprocess.run(words, env=others | mine, capture_output=True, text=True, check=True, timeout=120)
    assert unreachable.stdout.startswith("org/there cannot be had from the hub (")
    assert not (tmp_path / "home").exists()


def test_a_command_that_loads_models_suggests_names_too(redraft: Redraft) -> None:
    for words in (("generate", "hi", "--target", "smolm2-135m"), ("models", "get", "smolm2-135m")):
        done = redraft(*words)
        one_sentence(done)
        assert done.err.rstrip().endswith("; did you mean smollm2-135m?")
    with pytest.raises(RedraftError):
        names.check_models(load_settings(None, {"models.target": "smolm2-135m"}))
