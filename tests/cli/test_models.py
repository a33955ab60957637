"""`redraft models`, and which draft a command gets where none is named."""

import json
import re
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from typer.testing import CliRunner, Result

from service import server as server_module
from service.app import resolve_models
from service.cli import console
from service.cli.case_text import TextReader
from service.cli.root import app
from service.core import BadRequest, Conflict, ModelError, NotFound, PairError, RedraftError, StoreError
from service.models import machine
from service.models.catalog import CONVERTED, DRAFTS, entries
from service.models.draft_choice import made_for, write_made_for
from service.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from service.models.weights import bytes_in_memory
from service.settings import load_settings
from service.store.stores import open_stores
from tests.support.hub_cache import cache_model, use_hub_cache
from tests.support.model_folders import save_model
from tests.support.oracle import tiny_llama
from tests.support.tiny_server import generate, in_process_server, register_adapters, tiny_server, write_pair

Run = Callable[..., Result]
TARGET, DRAFT = "mlx-community/Llama-3.1-8B-Instruct-4bit", "mlx-community/Llama-3.2-1B-Instruct-4bit"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_hub_cache(tmp_path / "hub", monkeypatch)


@pytest.fixture
def redraft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """redraft("models", "list", …) -> what came of the command line, whose home is tmp_path / "home"."""
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "home"))
    for shown in (console.out, console.err):
        monkeypatch.setattr(shown, "_width", 400)
    runner = CliRunner()
    return lambda *words, answer=None: runner.invoke(app, [str(word) for word in words], input=answer)


@pytest.fixture(scope="module", autouse=True)
def probed_once() -> Generator[None]:
    """What doctor measures in a process of its own is measured once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_probe", cache(machine._probe))
        yield


def rows(result: Result) -> dict[str, list[str]]:
    """The rows of a printed table by their first cell."""
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("│")]
    return {(cells := [cell.strip() for cell in line.strip("│").split("│")])[0]: cells[1:] for line in lines}


def mib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def test_the_list_has_the_catalogue_and_this_disk_with_the_draft_of_each(
    tmp_path: Path, hub: Path, redraft: Run
) -> None:
    empty = rows(redraft("models", "list"))
    assert empty.keys() == {entry.name for entry in entries()}
    for entry in entries():
        missing = "" if entry.installed else ", which is not installed"
        assert empty[entry.name] == [f"{entry.source}{missing}", "", "", entry.draft or ""]

    big = save_model(tiny_llama(0, vocabulary=40_000, layers=2), tmp_path / "big")
    target = cache_model(hub, TARGET, big)
    cache_model(hub, DRAFT, big)
    made = save_model(tiny_llama(0), tmp_path / "home" / DRAFTS / "mine")
    write_made_for(made, "another target")
    converted = save_model(tiny_llama(0), tmp_path / "home" / CONVERTED / "smollm2-135m")
    (converted / "redraft.json").write_text('{"made_from": "1 a 2"}')

    out = tmp_path / "models.json"
    shown = rows(redraft("models", "list", "--json", out))
    size = sum(path.stat().st_size for path in big.iterdir())
    memory = bytes_in_memory(big, widen=mx.default_device().type == mx.cpu)
    assert size > 2**23, "it is seen in GiB"
    assert shown[TARGET] == ["hub cache", mib(size), mib(memory), DRAFT]
    assert shown[DRAFT][3] == ""
    assert shown[str(made)][0] == "made here" and shown[str(made)][3] == ""
    assert shown["smollm2-135m"][0] == "converted here"
    assert shown["smollm2-135m"][3] == (entries()[0].draft or "")
    found = {each["name"]: each for each in json.loads(out.read_text())["models"]}
    assert found.keys() == shown.keys()
    assert (found[TARGET]["size"], found[TARGET]["memory"]) == (size, memory)

    write_made_for(made, model_fingerprint(target))
    assert rows(redraft("models", "list"))[TARGET][3] == str(made)


def test_removing_asks_first(tmp_path: Path, hub: Path, redraft: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tiny_llama(0), tmp_path / "home" / DRAFTS / "mine")
    write_made_for(folder, "a target")
    refused = redraft("models", "remove", "mine", answer="y\n")
    assert isinstance(refused.exception, BadRequest), "nobody can be asked without a terminal"
    assert str(refused.exception).startswith(f"remove {folder} (") and "--yes" in str(refused.exception)
    monkeypatch.setattr(console, "at_terminal", lambda: True)
    for answer in ("n\n", ""):
        done = redraft("models", "remove", "mine", answer=answer)
        assert (done.exit_code, folder.exists()) == (1, True)
        assert f"remove {folder} (" in done.output.replace("\n", "") and "made here)? [y/N]" in done.output
    assert redraft("models", "remove", "mine", answer="y\n").exit_code == 0
    assert not folder.exists()

    cache_model(hub, "org/model", save_model(tiny_llama(0), tmp_path / "model"))
    done = redraft("models", "remove", "org/model", "--yes")
    assert (done.exit_code, list(hub.glob("models--*"))) == (0, [])
    assert done.stdout.startswith("org/model removed, ") and "?" not in done.output


@pytest.mark.parametrize("name", ["org/none", "none", "{tmp}", "--", "a\nb"])
def test_a_name_of_nothing_is_refused(name: str, tmp_path: Path, hub: Path, redraft: Run) -> None:
    done = redraft("models", "remove", "--yes", "--", name.format(tmp=tmp_path))
    assert isinstance(done.exception, NotFound), done.output


def test_what_an_active_adapter_needs_stays(tmp_path: Path, hub: Path, redraft: Run) -> None:
    pair = write_pair(tmp_path / "pair")
    server = tiny_server(tmp_path, pair)
    made = register_adapters(server, pair, 1)
    cache_model(hub, DRAFT, pair[1])
    remove = ("models", "remove", DRAFT, "--yes", "--config", server.config)
    refused = redraft(*remove)
    assert isinstance(refused.exception, Conflict), refused.output
    assert str(refused.exception).startswith(f"adapter {made[0].id} serves with {DRAFT} as its draft")
    assert list(hub.glob("models--*"))
    forced = redraft(*remove, "--force")
    assert forced.exit_code == 0 and not list(hub.glob("models--*"))
    cache_model(hub, DRAFT, pair[1])

    stores = open_stores(load_settings(server.config))
    stores.adapters.activate(0, made[0].target or "", made[0].draft)
    stores.close()
    assert redraft(*remove).exit_code == 0
    assert not list(hub.glob("models--*"))

    cache_model(hub, DRAFT, pair[1])
    (server.folder / "redraft.db").write_bytes(b"no database at all")
    assert isinstance(redraft(*remove).exception, StoreError), "what cannot be asked may need it"
    assert list(hub.glob("models--*"))


def test_a_server_drafts_with_the_small_model_of_its_family(
    tmp_path: Path, hub: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = write_pair(tmp_path / "pair")
    cache_model(hub, TARGET, target)
    server = in_process_server(tmp_path, (Path(TARGET), draft), models={"draft": None})

    def drafted() -> int:
        with caplog.at_level("INFO"):
            server.start()
        try:
            return generate(server, "abc", max_tokens=24)["timings"]["draft_n"]
        finally:
            server.stop()

    assert drafted() == 0
    assert f"no draft model for {TARGET}: serving without one. To make one: redraft make-draft" in caplog.text
    cache_model(hub, DRAFT, draft)
    assert drafted() > 0
    assert f"draft: {DRAFT}, the small model of its family, Llama 3.1 to 3.3" in caplog.text


def test_doctor_says_which_draft_it_would_be(tmp_path: Path, hub: Path, redraft: Run) -> None:
    target, draft = write_pair(tmp_path / "pair")
    cache_model(hub, TARGET, target)
    out = tmp_path / "doctor.json"

    def shown(*words: str) -> tuple[str, int]:
        found = rows(redraft("doctor", "--target", TARGET, *words, "--json", out))
        return found["draft"][0], json.loads(out.read_text())["needed"]

    why = "the small model of its family, Llama 3.1 to 3.3"
    alone = bytes_in_memory(target, widen=mx.default_device().type == mx.cpu)
    assert shown() == (f"{DRAFT}, {why}; it is fetched at the first start", alone)
    cache_model(hub, DRAFT, draft)
    assert shown() == (f"{DRAFT}, {why}", 2 * alone)
    assert shown("--draft", "none") == ("none, as set", alone)
    assert shown("--draft", str(draft)) == (str(draft), 2 * alone)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize("kind", ["pointer", "configuration", "list", "link"])
def test_a_damaged_model_hides_no_other(kind: str, tmp_path: Path, hub: Path, redraft: Run) -> None:
    target, damaged = write_pair(tmp_path / "pair")
    cache_model(hub, "org/good", target)
    spoilt = damaged / ("config.json" if kind in ("configuration", "list") else "model.safetensors")
    spoilt.write_text("[]" if kind == "list" else POINTER)
    snapshot = cache_model(hub, "org/damaged", damaged)
    file = snapshot / spoilt.name
    if kind == "link":
        file.resolve().unlink()
    what = {"link": "a link to a file that is not there", "list": "no JSON object"}
    says = f"{file} is {what.get(kind, 'a Git LFS pointer')}"
    out = tmp_path / "models.json"
    listed = redraft("models", "list", "--json", out)
    assert rows(listed)["org/good"][2] == mib(bytes_in_memory(target, widen=mx.default_device().type == mx.cpu))
    assert rows(listed)["org/damaged"][2] == ""
    assert f"! org/damaged cannot be served: {says}" in listed.stdout
    assert [each["name"] for each in json.loads(out.read_text())["models"] if each["problem"]] == ["org/damaged"]
    for name in ("org/damaged", snapshot):
        doctor = redraft("doctor", "--target", name, "--draft", "none")
        assert (doctor.exit_code, doctor.stdout.count(says)) == (1, 1), doctor.output
        assert "not known" in doctor.stdout
    assert redraft("models", "remove", "org/damaged", "--yes", "--force").exit_code == 0
    assert "org/damaged" not in rows(redraft("models", "list"))


@pytest.mark.parametrize("kind", ["files", "tokenizer", "weights"])
def test_a_damaged_draft_that_was_found_is_left_out(
    kind: str,
    tmp_path: Path,
    hub: Path,
    redraft: Run,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By `serve` with a warning, by `doctor` too; one that is named is not."""
    target, draft = write_pair(tmp_path / "pair")
    made = tmp_path / "home" / DRAFTS / "mine"
    made.parent.mkdir(parents=True)
    draft.rename(made)
    write_made_for(made, model_fingerprint(target))
    if kind == "files":
        (made / "model.safetensors").write_text(POINTER)
        says = f"{made / 'model.safetensors'} is a Git LFS pointer"
    elif kind == "tokenizer":
        content = json.loads((made / "tokenizer.json").read_text())
        content["model"]["merges"] = [{"a": 1}]
        (made / "tokenizer.json").write_text(json.dumps(content))
        says = f"the tokenizer of {made} cannot be read"
    else:
        says = "the draft (llama) gives other results in a batch than alone"

        def check(model: nn.Module, role: str) -> None:
            if role == "draft":
                raise PairError(says)

        monkeypatch.setattr(server_module, "check_rows", check)
    server = in_process_server(tmp_path, (target, draft), models={"target": str(target), "draft": None})
    with caplog.at_level("INFO"):
        server.start()
    try:
        assert generate(server, "abc", max_tokens=8)["timings"]["draft_n"] == 0
    finally:
        server.stop()
    assert "is left out" in caplog.text and says in caplog.text
    if kind != "weights":
        doctor = redraft("doctor", "--target", target)
        assert doctor.exit_code == 0 and says in doctor.stdout and "left out" in doctor.stdout, doctor.output
    named = in_process_server(tmp_path / "named", (target, made))
    with pytest.raises(ModelError, match=re.escape(says)):
        named.start()
    named.stop()


def test_doctor_looks_at_the_revision_that_is_served(
    tmp_path: Path, hub: Path, redraft: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the target is pinned. What `main` is of it, another model here, says nothing."""
    target, draft = write_pair(tmp_path / "pair")
    cache_model(hub, TARGET, save_model(tiny_llama(0, vocabulary=40_000, layers=2), tmp_path / "newer"))
    cache_model(hub, DRAFT, draft)
    monkeypatch.setenv("REDRAFT_MODELS__REVISION", "older")
    out = tmp_path / "doctor.json"

    def needed(*words: str) -> int | None:
        rows(redraft("doctor", "--target", TARGET, *words, "--json", out))
        return json.loads(out.read_text())["needed"]

    assert needed("--draft", "none") is None
    pinned = cache_model(hub, TARGET, target, revision="older")
    alone = bytes_in_memory(target, widen=mx.default_device().type == mx.cpu)
    assert needed("--draft", "none") == alone
    assert needed("--draft", DRAFT) == 2 * alone
    made = save_model(tiny_llama(0), tmp_path / "home" / DRAFTS / "mine")
    write_made_for(made, model_fingerprint(pinned))
    assert rows(redraft("doctor", "--target", TARGET))["draft"] == [f"{made}, made from this target"]
    refused = redraft("doctor", "--target", "smollm2-135m", "--draft", "none")
    assert "a revision can be pinned for hub names only" in refused.output
    assert refused.exit_code == 1


def test_recorded_tokens_are_read_by_the_tokenizer_of_the_revision_that_is_served(tmp_path: Path, hub: Path) -> None:
    target, _ = write_pair(tmp_path / "pair")
    pinned = cache_model(hub, TARGET, target, revision="older")
    settings = load_settings(None, {"models.target": TARGET, "models.revision": "older"})
    recorded = tokenizer_fingerprint(pinned)
    assert TextReader(settings).text((65, 66), recorded) is not None
    (target / "chat_template.jinja").write_text("{{ messages }}")
    cache_model(hub, TARGET, target)
    assert TextReader(settings).text((65, 66), recorded) is not None
    assert TextReader(load_settings(None, {"models.target": TARGET})).text((65, 66), recorded) is None
    with pytest.raises(RedraftError, match=f"the tokenizer of {TARGET} is not on this disk"):
        TextReader(load_settings(None, {"models.target": TARGET, "models.revision": "another"}))


@pytest.mark.parametrize(("kind", "name"), [("layers", "some-target-draft"), ("eagle", "some-target-eagle")])
def test_a_draft_that_was_made_is_found_by_its_target(
    kind: str, name: str, tmp_path: Path, hub: Path, redraft: Run
) -> None:
    target = save_model(tiny_llama(1, layers=4), tmp_path / "some-target")
    settings = ("--tokens", "300", "--length", "40", "--rows", "4", "--batch", "4", "--held-out", "2", "--epochs", "1")
    made = redraft("make-draft", "--target", target, "--kind", kind, *settings)
    assert made.exit_code == 0, made.output
    folder = tmp_path / "home" / DRAFTS / name
    assert made_for(folder) == model_fingerprint(target)
    assert folder.parent.parent.stat().st_mode & 0o077 == 0
    found = rows(redraft("doctor", "--target", target))["draft"]
    assert found == [f"{folder}, made from this target"]
    assert resolve_models(load_settings(None, {"models.target": str(target)})).draft == folder
    again = redraft("make-draft", "--target", target, "--kind", kind, *settings)
    assert "already exists" in str(again.exception)


def test_getting_a_target_names_its_draft(tmp_path: Path, hub: Path, redraft: Run) -> None:
    snapshot = cache_model(hub, TARGET, write_pair(tmp_path / "pair")[0])
    done = redraft("models", "get", TARGET)
    assert done.exit_code == 0
    assert done.stdout == f"{snapshot}\n"
    assert f"its draft: {DRAFT}, the small model of its family" in done.stderr
    fetch = f"fetch it too: redraft models get {DRAFT}"
    assert done.stderr.splitlines()[-1] == fetch
    cache_model(hub, DRAFT, tmp_path / "pair" / "draft")
    assert fetch not in redraft("models", "get", TARGET).stderr
