"""Every command, run in this process: its output, and that bad input gives one sentence and a non-zero status."""

import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from service.cli.root import app
from service.core import (
    BARE_DRAFT,
    AdapterRef,
    Erased,
    FailureCase,
    FinishReason,
    Generation,
    Prompt,
    Provenance,
    RunState,
    Sampling,
    Selection,
    TrainingRun,
    Trigger,
    Verdict,
)
from service.engine import device
from service.evaluation.server_process import LocalServer
from service.models import machine
from service.models.arrays import named_arrays
from service.models.pair import load_model
from service.models.text import TextEncoder
from service.models.weights import bytes_in_memory
from service.settings import load_settings
from service.store.database import REVISION, revision
from service.store.log.generations import split_of
from service.store.processes.members import Members
from service.store.registry.lineage import Lineage
from service.store.stores import open_stores
from tests.support.command_line import TREE, Outcome, Redraft, cells, commands, one_sentence
from tests.support.databases import PostgresDatabases
from tests.support.oracle import naive
from tests.support.tiny_server import generate, prompts, register_adapters, tiny_server, write_pair
from tests.support.typed import layers_of
from tests.support.waiting import until


def child(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "service.cli", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )


# ------------------------------------------------------------------------------------------------- without a server


@pytest.mark.parametrize(
    ("path", "command"),
    commands(TREE),
    ids=lambda value: " ".join(value) or "redraft" if isinstance(value, tuple) else "",
)
def test_help_names_every_option_and_describes_the_command(
    path: tuple[str, ...], command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        TREE.main([*path, "--help"], prog_name="redraft")
    assert ended.value.code == 0
    text = " ".join(re.sub(r"[^\w\s./-]", " ", capsys.readouterr().out).split())
    assert command.help
    assert " ".join(re.sub(r"[^\w\s./-]", " ", command.help).split()[:4]) in text
    for parameter in command.params:
        assert parameter.opts[0] in text
    for name in getattr(command, "commands", {}):
        assert name in text


@pytest.fixture(scope="module", autouse=True)
def probed_once() -> Generator[None]:
    """What doctor measures in a process of its own is measured once: nothing about the machine changes from test to test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_probe", cache(machine._probe))
        yield


def test_doctor_describes_this_machine(tmp_path: Path, redraft: Redraft) -> None:
    config = tmp_path / "settings.toml"
    config.write_text(f"home = {json.dumps(str(tmp_path / 'home'))}\n")
    done = redraft("doctor", "--config", config, "--json", tmp_path / "new" / "doctor.json")
    assert done.err == ""
    shown = {row[0]: row[1] for row in cells(done.out)}
    found = json.loads((tmp_path / "new" / "doctor.json").read_text())
    assert shown["device"] == found["device"]
    assert shown["device"] in {"cpu", "metal", "cuda"}
    assert shown["precision"] == found["precision"] == ("float32" if found["device"] == "cpu" else "as stored")
    for name in ("redraft", "mlx", "mlx-lm"):
        assert shown[f"version of {name}"] == found["versions"][name] == version(name)
    assert shown["cores"] == str(os.cpu_count())
    assert shown["database"] == found["database"] == f"{tmp_path / 'home' / 'redraft.db'}, not set up yet"
    alone = redraft("doctor", "--config", config, "--json", "-")
    assert (alone.status, json.loads(alone.out)["versions"]) == (done.status, found["versions"]), (
        "nothing else on stdout"
    )
    assert (done.status == 0) == (found["problems"] == [])
    assert ("nothing is wrong" in done.out) == (found["problems"] == found["warnings"] == [])
    assert not (tmp_path / "home").exists(), "looking changes nothing"


@pytest.mark.parametrize("drafting", [True, False], ids=["draft", "none"])
def test_doctor_says_what_models_at_hand_take(drafting: bool, tmp_path: Path, redraft: Redraft) -> None:
    target, draft = write_pair(tmp_path / "pair")
    out, config = tmp_path / "doctor.json", tmp_path / "settings.toml"
    config.write_text("[engine]\nprefix_cache_mb = 3\n")
    words = ["--target", target, "--draft", draft if drafting else "none", "--config", config, "--json", out]
    done = redraft("doctor", *words)
    assert done.status == 0, done.err
    memory, shown = json.loads(out.read_text())["memory"], {row[0]: row[1] for row in cells(done.out)}
    models = [load_model(folder) for folder in (target, *([draft] if drafting else []))]
    assert memory["weights"] == bytes_in_memory(target, widen=True) + (
        bytes_in_memory(draft, widen=True) if drafting else 0
    )
    # Four bytes for keys and values of every head and layer.
    layers = sum(len(layers_of(each.model)) for each in models)
    config = json.loads((target / "config.json").read_text())
    width = config["num_key_value_heads"] * (config["hidden_size"] // config["num_attention_heads"])
    assert memory["kv_per_token"] == layers * 8 * width
    assert memory["prefix"] == 3 * 2**20 and 0 < memory["total_free"] < psutil.virtual_memory().total
    assert (memory["training"] > 2**28) == drafting
    outlook = memory["training_outlook"]
    assert (outlook is not None) == drafting
    if drafting:
        assert outlook["fits"] and outlook["peak_bytes"] == memory["training"] and outlook["minutes"] > 0
        assert shown["how a run trains"].startswith(f"{outlook['batch']} x {outlook['length']} tokens at a time")
    assert 0 < memory["cache_limit"] <= device.cache_limit() and memory["activations"] > 0
    # Every matrix of the draft's blocks, for the adapter that drafts and for the next one.
    arrays = [each for block in layers_of(models[1].model) for _, each in named_arrays(block)] if drafting else []
    assert memory["adapters"] == 2 * sum(each.size * 4 for each in arrays if each.ndim == 2)
    # A run takes what is free when it starts, and cached prefixes what rows leave.
    left = memory["total_free"] - sum(memory[name] for name in ("weights", "activations", "adapters", "cache_limit"))
    assert memory["kv"] == int(0.95 * left) and memory["row"] > 0
    fit = int(shown["tokens that fit for each of 1 requests"].replace(",", ""))
    # Growing takes as much again, up to a part of the layers.
    assert 0.9 * memory["kv"] < fit * (memory["kv_per_token"] + memory["scores_per_token"]) + 2**27 < 1.1 * memory["kv"]
    config_of_less = tmp_path / "less.toml"
    config_of_less.write_text("[engine]\nprefix_cache_mb = 3\nkv_budget_mb = 8\n")
    done = redraft("doctor", *words[:4], "--config", config_of_less)
    shown = {row[0]: row[1] for row in cells(done.out)}
    assert shown["requests and cached prefixes, at most"] == "8192.0 KiB"
    assert int(shown["tokens that fit for each of 1 requests"].replace(",", "")) <= 2**23 // memory["kv_per_token"]


def test_doctor_says_what_a_machine_of_another_size_gets_of_models_that_are_not_here(redraft: Redraft) -> None:
    pair = ("--target", "mlx-community/Qwen3-8B-4bit", "--draft", "mlx-community/Qwen3-0.6B-4bit")
    found = json.loads(redraft("doctor", *pair, "--memory", "16GiB", "--free", "5GiB", "--json", "-").out)
    # Keys and values of 8 heads of 128 in 36 and in 28 layers, 2 bytes each.
    assert found["token_bytes"] == (36 + 28) * 2 * 8 * 128 * 2
    assert found["free_bytes"] == 5 * 2**30 and 4.5 < found["weights_bytes"] / 2**30 < 4.7
    taken = sum(found[f"{name}_bytes"] for name in ("cache", "activation", "adapter"))
    assert found["budget_bytes"] == int(0.95 * (found["free_bytes"] - taken))
    row = found["row_bytes"] + found["growth_bytes"]
    assert found["context"] == (found["budget_bytes"] - row) // found["token_bytes"] // 128 * 128
    assert found["context"] >= 12_000, "with adapters"
    training = found["training"]
    assert training.keys() == {"fits", "batch", "length", "recompute", "peak_bytes", "minutes"}
    assert training["fits"] and training["length"] >= 256 and training["peak_bytes"] <= found["idle_bytes"]
    faster = redraft("doctor", *pair, "--memory", "16GiB", "--free", "5GiB", "--tflops", "8", "--json", "-").out
    assert json.loads(faster)["training"]["minutes"] == pytest.approx(training["minutes"] / 2)
    middle = json.loads(redraft("doctor", *pair, "--memory", "24GiB", "--json", "-").out)
    assert middle["training"]["fits"] and middle["training"]["length"] == 512
    larger = json.loads(redraft("doctor", *pair, "--memory", "64GiB", "--json", "-").out)
    assert larger["context"] == 40_960 and larger["rows_of_4096"] > found["rows_of_4096"] >= 1
    hybrid = ("--target", "mlx-community/Qwen3.5-9B-4bit", "--draft", "mlx-community/Qwen3.5-0.8B-4bit")
    states = json.loads(redraft("doctor", *hybrid, "--memory", "16GiB", "--json", "-").out)
    assert states["row_bytes"] > 3 * (24 * 32 + 18 * 16) * 128 * 128 * 4, "states in float32, three at a time"
    none = redraft("doctor", *pair, "--memory", "8GiB")
    assert none.status == 1 and "0 MiB are left for keys and values" in none.out
    unknown = redraft("doctor", "--target", "some/model", "--draft", "none", "--memory", "16GiB")
    assert unknown.status == 1 and "the sizes of some/model are not known" in unknown.err
    assert redraft("doctor", *pair, "--memory", "large").status == 2


def test_doctor_plans_from_a_config_alone_what_it_plans_with_weights(tmp_path: Path, redraft: Redraft) -> None:
    folders = write_pair(tmp_path / "pair")
    words = ("--memory", "8GiB", "--free", "1GiB", "--device", "cpu", "--json", "-")
    whole = json.loads(redraft("doctor", "--target", folders[0], "--draft", folders[1], *words).out)
    for folder in folders:
        (folder / "model.safetensors").unlink()
    config = json.loads(redraft("doctor", "--target", folders[0], "--draft", folders[1], *words).out)
    # Whether embeddings of both are equal, and count once, is not known without weights.
    assert 0 <= config.pop("weights_bytes") - whole.pop("weights_bytes") < 2**20
    assert config == whole


@pytest.mark.parametrize("command", ["doctor", "serve"])
@pytest.mark.usefixtures("restored_process")
def test_a_rope_that_mlx_lm_cannot_apply_is_refused_before_serving(
    command: str, tmp_path: Path, redraft: Redraft
) -> None:
    target, _ = write_pair(tmp_path)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"rope_parameters": {"rope_type": "spiral"}}))
    settings = tmp_path / "settings.toml"
    settings.write_text(f"home = {json.dumps(str(tmp_path / 'home'))}\n")
    port = ["--port", "0"] if command == "serve" else []
    done = redraft(command, "--config", settings, "--target", target, "--draft", "none", *port)
    assert done.status == 1
    assert "cannot be loaded by mlx-lm: Unsupported RoPE type spiral" in (done.out + done.err).replace("\n", " ")
    assert "nothing is wrong" not in done.out


def test_doctor_says_nothing_of_memory_where_a_model_is_not_at_hand(tmp_path: Path, redraft: Redraft) -> None:
    out = tmp_path / "doctor.json"
    done = redraft("doctor", "--target", "somebody/some-model", "--draft", "none", "--json", out)
    assert "memory" not in json.loads(out.read_text()) and done.err == ""


@pytest.mark.parametrize(
    "drafting", [pytest.param(True, id="draft"), pytest.param(False, id="none", marks=pytest.mark.nightly)]
)
def test_doctor_times_calls_and_rounds(
    drafting: bool, tmp_path: Path, redraft: Redraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.evaluation.bench.doctor_speed.QUEUE_SECONDS", 0.0)
    target, draft = write_pair(tmp_path / "pair")
    config, out = tmp_path / "settings.toml", tmp_path / "doctor.json"
    models = {"target": str(target), "draft": str(draft) if drafting else "none"}
    lines = [f"{name} = {json.dumps(value)}" for name, value in models.items()]
    config.write_text("\n".join([f"home = {json.dumps(str(tmp_path / 'home'))}", "[models]", *lines]))
    done = redraft("doctor", "--speed", "--config", config, "--json", out)
    assert done.status == 0, done.err
    found = json.loads(out.read_text())
    assert found["device"] in {"cpu", "metal", "cuda"}, "with what doctor says anyway"
    speed = found["speed"]
    assert speed["call_ms"].keys() == {"1", "4", "16"}
    for curve in speed["call_ms"].values():
        assert list(curve) == [str(n) for n in range(1, 17)] and min(curve.values()) > 0.0
    assert speed["step_ms"].keys() == ({"1", "4", "16"} if drafting else set())
    assert speed["overhead_ms"].keys() == ({"plain", "drafted"} if drafting else {"plain"})
    assert list(speed["pays_from"]) == (["1", "2", "3", "4", "6", "8"] if drafting else [])
    shown = {row[0]: row[1:] for row in cells(done.out)}
    for rows, at in (("1", 0), ("16", 2)):
        assert shown["target, 5 tokens a row"][at].startswith(f"{speed['call_ms'][rows]['5']:.2f} (")
    assert shown["a round beyond its calls, plain"] == [f"{speed['overhead_ms']['plain']:.2f} ms"]
    assert ("draft step" in shown) is drafting


def on_postgres(tmp_path: Path, url: str) -> Path:
    """Settings with a password in the URL."""
    config = tmp_path / "settings.toml"
    url = url.replace("postgresql+psycopg://redraft@", "postgres://redraft:s3cr-t@")
    config.write_text(f"home = {json.dumps(str(tmp_path))}\n[store]\nurl = {json.dumps(url)}\n")
    return config


def test_a_database_in_postgresql_is_set_up_and_used(
    tmp_path: Path, redraft: Redraft, postgres_databases: PostgresDatabases
) -> None:
    url = postgres_databases.server.tcp_url(postgres_databases.bare(tmp_path))
    config = on_postgres(tmp_path, url)
    before = redraft("cases", "stats", "--config", config)
    assert (before.status, before.err) == (1, "redraft: the database has not been set up: run `redraft db upgrade`\n")
    for _ in range(2):
        done = redraft("db", "upgrade", "--config", config)
        assert (done.status, done.out) == (0, f"the database is at revision {REVISION}\n")
    shown = {row[0]: row[1] for row in cells(redraft("doctor", "--config", config).out)}["database"]
    assert shown == f"{url.replace('redraft@', 'redraft:***@')}, at revision {REVISION}"
    put_aside(config)
    assert cells(redraft("cases", "stats", "--config", config).out)[0] == ["requests recorded", "3"]
    assert [row[0] for row in cells(redraft("cases", "quarantined", "--config", config).out)] == [
        "adapter 1 rolled back",
        "crashes",
    ]
    purged = redraft("data", "erase", "--everything", "--yes", "--config", config).out
    assert purged == "3 generations deleted\nadapters that learnt them: 1\n"
    postgres_databases.clear()


def test_a_database_that_does_not_answer_is_a_problem(tmp_path: Path, redraft: Redraft) -> None:
    config = on_postgres(tmp_path, "postgresql+psycopg://redraft@127.0.0.1:1/redraft")
    done = redraft("doctor", "--config", config)
    assert done.status == 1
    assert "! the database cannot be read: " in done.out and "refused" in done.out
    refused = redraft("db", "upgrade", "--config", config)
    one_sentence(refused)
    assert "s3cr-t" not in done.out + done.err + refused.err


def test_the_database_is_created_once(tmp_path: Path, redraft: Redraft) -> None:
    config = tmp_path / "settings.toml"
    config.write_text(f"home = {json.dumps(str(tmp_path / 'a home'))}\n")
    before = redraft("cases", "stats", "--config", config)
    assert (before.status, before.err) == (1, "redraft: the database has not been set up: run `redraft db upgrade`\n")
    assert not (tmp_path / "a home").exists()
    for _ in range(2):
        done = redraft("db", "upgrade", "--config", config)
        assert (done.status, done.out) == (0, f"the database is at revision {REVISION}\n")
        assert revision(f"sqlite:///{tmp_path / 'a home' / 'redraft.db'}") == REVISION
    stats = redraft("cases", "stats", "--config", config)
    assert stats.status == 0
    assert {count for _, count in cells(stats.out)} == {"0"}


def put_aside(config: Path) -> int:
    """Quarantine two cases through the rollback of a run's adapter, and one through crashes. Returns the run."""
    stores = open_stores(load_settings(config))
    runs, who = stores.runs, Provenance("target", "tokenizer", "draft")
    words = [name for name in (f"question {i}" for i in range(99)) if split_of(name) == "train"]

    def claimed(cases: int) -> TrainingRun:
        found = tuple(FailureCase(at, 1, 2, 0.5, 0.5, 1.0, False) for at in range(cases))
        prompt = Prompt((1, 2), Sampling(), first_user=words[cases])
        made = Generation(
            words[cases], prompt, (3, cases), FinishReason.LENGTH, (), found, (0.0,) * 2, (0.0,) * 2, None, who,
            datetime.now(UTC),
        )  # fmt: skip
        stores.generations.add([made]).result()
        run = runs.claim(trigger=Trigger.CASES, who=who, parent=BARE_DRAFT, limit=9)
        assert run is not None
        return run

    learnt = claimed(2)
    ref = stores.adapters.add(
        run_id=learnt.id,
        fencing=learnt.fencing,
        folder=stores.adapters.root / "a",
        sha256="",
        rank=1,
        scale=1.0,
        keys=[],
        draft=who.draft,
        parent=BARE_DRAFT,
    )
    for state in (RunState.TRAINING, RunState.SCORING, RunState.STAGING):
        runs.move(learnt.id, learnt.fencing, state)
    verdict = Verdict(True, "", 9, 9, 0.1, 0.1, 0.1)
    runs.promote(learnt.id, learnt.fencing, ref.id, verdict)
    stores.adapters.roll_back(ref.id, BARE_DRAFT, verdict)
    bad = claimed(1)
    runs.move(bad.id, bad.fencing, RunState.CRASHED)
    good = claimed(3)
    for state in (RunState.TRAINING, RunState.SCORING):
        runs.move(good.id, good.fencing, state)
    runs.reject(good.id, good.fencing, None, verdict)
    bad = runs.claim(trigger=Trigger.CASES, who=who, parent=BARE_DRAFT, limit=9)
    assert bad is not None
    runs.move(bad.id, bad.fencing, RunState.CRASHED)
    stores.close()
    return learnt.id


def test_quarantined_cases_are_shown_and_released(tmp_path: Path, redraft: Redraft) -> None:
    config = tmp_path / "settings.toml"
    config.write_text(f"home = {json.dumps(str(tmp_path))}\n")
    assert redraft("db", "upgrade", "--config", config).status == 0
    run = put_aside(config)

    def shown() -> list[list[str]]:
        done = redraft("cases", "quarantined", "--config", config)
        assert (done.status, done.err) == (0, "")
        return cells(done.out)

    crashed = ["crashes", "", "1", "1"]
    assert shown() == [["adapter 1 rolled back", str(run), "2", "1"], crashed]
    done = redraft("cases", "release", "--run", 99, "--config", config)
    one_sentence(done)
    assert (done.status, done.err) == (1, "redraft: no training run 99\n")
    done = redraft("cases", "release", "--run", run, "--config", config)
    assert (done.status, done.out) == (0, "2 failure cases released\n")
    assert shown() == [crashed]
    for count in (1, 0):
        done = redraft("cases", "release", "--config", config)
        assert (done.status, done.out) == (0, f"{count} failure cases released\n")
    assert shown() == []


def test_without_a_server_files_are_erased_with_the_rows(tmp_path: Path, redraft: Redraft) -> None:
    config, home, prefixes = tmp_path / "settings.toml", tmp_path / "home", tmp_path / "prefixes"
    config.write_text(f"home = {json.dumps(str(home))}\n[engine]\nprefix_cache_dir = {json.dumps(str(prefixes))}\n")
    assert redraft("db", "upgrade", "--config", config).status == 0
    put_aside(config)
    targets = home / "targets" / "of a target"
    files = [targets / "a.npz", targets / "b.part", prefixes / "prefix-a.safetensors"]
    for path in (*files, prefixes / "notes.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("what somebody said")
    asked = ("data", "erase", "--yes", "--config", config)
    done = redraft(*asked, "--id", "nobody's", "--id", "question 99")
    assert (done.status, done.out) == (0, "0 generations deleted\n")
    assert not any(path.exists() for path in files), "nobody knows whose they are"
    assert (prefixes / "notes.txt").exists()
    done = redraft(*asked, "--everything", "--retire-adapters")
    words = "3 generations deleted\nadapters that learnt them: 1\nadapters that are revoked: 1\n"
    assert (done.status, done.out) == (0, words)
    (shown,) = cells(redraft("adapters", "list", "--config", config).out)
    assert (shown[0], shown[1], shown[4]) == ("1", "revoked", "1")
    stores = open_stores(load_settings(config))
    Members(stores.database).join()  # a server may start
    stores.close()
    done = redraft(*asked, "--everything", "--url", "http://127.0.0.1:1")
    assert (done.status, done.out) == (0, "0 generations deleted\n"), "a process that ended serves no more"


def test_an_erasure_by_a_command_is_open_until_its_rows_are_gone(
    tmp_path: Path, redraft: Redraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that starts meanwhile sees it."""
    config, asked = tmp_path / "settings.toml", list[Selection]()
    config.write_text(f"home = {json.dumps(str(tmp_path / 'home'))}\n")
    assert redraft("db", "upgrade", "--config", config).status == 0
    erase = Lineage.erase

    def seen(self: Lineage, selection: Selection, *, retire_adapters: bool = False) -> Erased:
        asked.extend(each for _, each in stores.erasures.asked())
        return erase(self, selection, retire_adapters=retire_adapters)

    stores = open_stores(load_settings(config))
    monkeypatch.setattr(Lineage, "erase", seen)
    assert redraft("data", "erase", "--yes", "--config", config, "--id", "one").status == 0
    assert asked == [Selection(ids=frozenset({"one"}))]
    assert stores.erasures.asked() == [], "it is over"
    stores.close()


# ---------------------------------------------------------------------------------------------------- with a tiny server


@dataclass(frozen=True)
class Served:
    """A server of a tiny pair that has answered 14 requests and knows two adapters, the second of them active."""

    server: LocalServer
    pair: tuple[Path, Path]
    adapters: list[AdapterRef]

    @property
    def config(self) -> Path:
        return self.server.config


def stored(server: LocalServer) -> int:
    stores = open_stores(load_settings(server.config))
    try:
        return stores.generations.stats().generations
    finally:
        stores.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    root = tmp_path_factory.mktemp("served")
    pair = write_pair(root)
    server = tiny_server(root, pair)
    made = register_adapters(server, pair, 2)
    server.start()
    try:
        for i, line in enumerate(prompts(14, seed=3)):
            generate(server, line.prompt, domain="odd" if i % 2 else "even", client="someone" if i < 4 else "other")
        until(lambda: stored(server) == 14)
        yield Served(server, pair, made)
    finally:
        status = server.stop()
    assert status == 0


def recorded(redraft: Redraft, served: Served) -> dict[str, int]:
    done = redraft("cases", "stats", "--config", served.config)
    assert (done.status, done.err) == (0, "")
    return {name: int(count) for name, count in cells(done.out)}


def test_adapters_are_listed_switched_and_rolled_back(served: Served, redraft: Redraft) -> None:
    first, second = served.adapters
    url = ("--url", served.server.url)

    def states() -> dict[str, str]:
        done = redraft("adapters", "list", "--config", served.config)
        assert (done.status, done.err) == (0, "")
        return {row[0]: row[1] for row in cells(done.out)}

    assert states() == {str(second.id): "active", str(first.id): "retired"}
    done = redraft("adapters", "activate", first.id, *url)
    assert (done.status, done.out) == (0, f"adapter {first.id} serves now\n")
    assert served.server.get("/adapters")["active"] == first.id
    assert states() == {str(second.id): "retired", str(first.id): "active"}
    done = redraft("adapters", "rollback", "--expected", second.id, *url)
    assert done.status == 1 and f"adapter {first.id} is serving, not {second.id}" in done.err
    done = redraft("adapters", "rollback", "--expected", first.id, *url)
    assert (done.status, done.out) == (0, "the bare draft serves now\n")
    assert served.server.get("/adapters")["active"] == 0
    assert states() == {str(second.id): "retired", str(first.id): "rolled_back"}
    for words, message in (
        (("activate", 99), "no adapter 99"),
        (("rollback",), ""),
    ):
        done = redraft("adapters", *words, *url)
        assert done.status == 1
        assert message in done.err
        one_sentence(done)
    assert redraft("adapters", "activate", second.id, *url).out == f"adapter {second.id} serves now\n"


def test_the_state_of_a_server_is_shown(served: Served, redraft: Redraft) -> None:
    url = ("--url", served.server.url, "--json", "-")
    # Requests are counted for the user whose home folder has the server's token.
    assert json.loads(redraft("status", *url).out)["requests"] is None
    done = redraft("status", *url, "--config", served.config)
    found = json.loads(done.out)
    assert (done.status, done.err, found["ready"]) == (0, "", True)
    assert found["model"] == served.pair[0].name and found["adapter"] == served.server.get("/adapters")["active"]
    assert found["requests"] == {"running": 0, "waiting": 0}
    assert 0 < found["acceptance_rate"] < 1 < found["tokens_per_call"] < 8


def test_training_is_followed_to_its_end(served: Served, redraft: Redraft, monkeypatch: pytest.MonkeyPatch) -> None:
    url = ("--url", served.server.url)
    with monkeypatch.context() as patch:
        # The same key returns the same run, which is then followed.
        patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=1))
        started = redraft("train", "--no-wait", *url)
        assert started.status == 0, started.err
        number = re.fullmatch(r"run (\d+): (claimed|training) \n", started.out)
        assert number is not None
        patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=2))
        again = redraft("train", *url)
        assert again.status == 1, "one run at a time"
        one_sentence(again)
        patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=1))
        done = redraft("train", *url)
    assert done.status == 0, done.err
    found = re.fullmatch(r"run (\d+): (promoted|rejected) (.+)\n", done.out)
    assert found is not None, done.out
    assert found[1] == number[1]
    run = served.server.get(f"/train/{found[1]}")
    assert (run["state"], run["verdict"]["reason"]) == (found[2], found[3])


def test_an_adapter_is_exported_without_the_server(served: Served, redraft: Redraft, tmp_path: Path) -> None:
    ref = served.adapters[0]
    done = redraft("adapters", "export", ref.id, tmp_path / "out", "--config", served.config)
    assert (done.status, done.out, done.err) == (0, f"adapter {ref.id} written to {tmp_path / 'out'}\n", "")
    for name in ("adapter_config.json", "adapters.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (ref.folder / name).read_bytes()


def test_an_answer_goes_to_stdout_and_its_figures_to_stderr(served: Served, redraft: Redraft) -> None:
    target = load_model(served.pair[0])
    asked = TextEncoder(target.tokenizer).encode_chat([{"role": "user", "content": "abc"}]).tokens
    ends = frozenset(target.tokenizer.eos_token_ids)
    for flags, sampling in (
        ((), Sampling(max_tokens=12)),
        (("--temperature", "0.8", "--seed", "4"), Sampling(temperature=0.8, seed=4, max_tokens=12)),
    ):
        tokens = naive(target.model, asked, sampling, ends)
        text = target.tokenizer.decode([token for token in tokens if token not in ends])
        done = redraft("generate", "abc", "--max-tokens", 12, "--config", served.config, *flags)
        assert done.status == 0
        assert done.out == f"{text}\n"
        assert f"{len(tokens)} tokens, " in done.err
        assert "tokens per target call" in done.err


def test_a_chat_continues_until_an_empty_line(served: Served) -> None:
    words = ["chat", "--max-tokens", "6", "--config", str(served.config)]
    done = CliRunner().invoke(app, words, input="abc\nx\n\n")
    assert done.exit_code == 0
    assert done.output.count("you") >= 3
    assert done.output.count("acceptance so far") == 2


def test_cases_are_listed_and_purged(served: Served, redraft: Redraft) -> None:
    config = ("--config", served.config)
    before = recorded(redraft, served)
    assert before["generations"] >= 14
    assert before["generations of even"] + before["generations of odd"] == before["generations"]
    listed = cells(redraft("cases", "list", "--limit", 5, *config).out)
    assert len(listed) == 5
    assert {row[2] for row in listed} <= {"even", "odd"}
    assert all(0 <= float(row[6]) <= 1 and 0 <= float(row[7]) <= 1 for row in listed)
    rest = cells(redraft("cases", "list", "--limit", 10_000, "--offset", 5, *config).out)
    assert len(rest) == before["failure cases"] - 5

    check_export(redraft, served)
    url = ("--url", served.server.url)

    def deleted(done: Outcome, count: int) -> bool:
        """Adapters that learnt them may be named below."""
        return done.status == 0 and done.out.splitlines()[0] == f"{count} generations deleted"

    done = redraft("data", "erase", "--yes", "--client", "someone", "--before", "2001-01-01", *config, *url)
    assert (done.status, done.out) == (0, "0 generations deleted\n")
    done = redraft("data", "erase", "--yes", "--client", "someone", *config, "--url", "http://127.0.0.1:1")
    assert "no server answers" in done.err and recorded(redraft, served) == before, "a server has the database"
    done = redraft("data", "erase", "--yes", "--client", "someone", *config, *url)
    assert deleted(done, 4)
    odd = recorded(redraft, served)["generations of odd"]
    done = redraft("data", "erase", "--yes", "--domain", "odd", *config, *url)
    assert deleted(done, odd)
    left = recorded(redraft, served)
    assert left["generations"] == left["generations of even"] == before["generations"] - 4 - odd
    done = redraft("data", "erase", "--yes", "--keep", 1, *config)
    assert (done.status, done.out) == (0, f"{left['generations'] - 1} generations deleted\n")
    done = redraft("data", "erase", "--yes", "--everything", *config, *url)
    assert deleted(done, 1)
    assert set(recorded(redraft, served).values()) == {0}


def check_export(redraft: Redraft, served: Served) -> None:
    before, file = recorded(redraft, served), served.config.with_name("copy.jsonl")
    done = redraft("data", "export", "--client", "someone", "--out", file, "--config", served.config)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert done.status == 0 and "4 generations written" in done.err
    assert len(lines) == 4 and {line["client"] for line in lines} == {"someone"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for line in lines:
        assert line["prompt"] and line["prompt_tokens"] and len(line["answer_tokens"]) > 0
        assert line["answer"] is not None and line["finish_reason"] in {"stop", "length"}
    done = redraft("data", "export", "--everything", "--out", "-", "--config", served.config)
    assert len(done.out.splitlines()) == before["generations"]
    assert recorded(redraft, served) == before


def test_agreement_is_measured_and_written_as_json(served: Served, redraft: Redraft, tmp_path: Path) -> None:
    lines = [{"id": line.id, "domain": line.domain, "prompt": line.prompt} for line in prompts(3, seed=1)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ("eval", "agreement", "--prompts", tmp_path / "prompts.jsonl", "--config", served.config)
    done = redraft(*asked, "--limit", 2, "--json", tmp_path / "found.json")
    assert done.status == 0
    shown = {row[0]: row[1] for row in cells(done.out)}
    found = json.loads((tmp_path / "found.json").read_text())
    assert shown["prompts"] == "2"
    assert shown["agreement with the target's greedy text"] == f"{found['agreement']:.4f}"
    assert 0 < found["agreement"] < 1
    assert redraft(*asked, "--adapter", served.adapters[0].id, "--json", tmp_path / "other.json").status == 0
    assert json.loads((tmp_path / "other.json").read_text())["agreement"] != found["agreement"]


def test_markup_in_a_domain_does_not_break_the_tables(served: Served, redraft: Redraft) -> None:
    """Square brackets are markup for the library that prints the tables."""
    for name in ("[/b]", "[red]"):
        generate(served.server, "abcdefgh", domain=name, client="brackets")
        try:
            until(lambda name=name: f"generations of {name}" in recorded(redraft, served))
            listed = redraft("cases", "list", "--config", served.config)
            assert {row[2] for row in cells(listed.out)} >= {name}
        finally:
            redraft(
                "data", "erase", "--yes", "--client", "brackets", "--config", served.config, "--url", served.server.url
            )


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("models", "get", "nothing-here"), "no model nothing-here"),
        (("generate", "hi", "--target", "/no/such/folder"), "no model /no/such/folder"),
        (("generate", "hi", "--target", "{empty}"), "is no model folder"),
        (("make-draft", "--target", "nothing-here", "--out", "{empty}/draft"), "no model nothing-here"),
        (("models", "get", "[/x]"), "no model [/x]"),
        (("models", "get", "[bold]x"), "no model [bold]x"),
        (("eval", "agreement", "--prompts", "/no/such.jsonl"), "cannot read the prompts in /no/such.jsonl"),
        (
            ("eval", "cycle", "--train", "/no/such.jsonl", "--train-limit", "1", "--test", "/no/such.jsonl"),
            "/no/such.jsonl",
        ),
        (("train", "--url", "http://127.0.0.1:1"), "no server answers at http://127.0.0.1:1"),
        (("adapters", "activate", "1", "--url", "http://127.0.0.1:1"), "no server answers"),
        (("adapters", "rollback", "--url", "nonsense"), "no server answers at nonsense"),
        (("adapters", "list"), "run `redraft db upgrade`"),
        (("adapters", "export", "1", "{empty}/out"), "run `redraft db upgrade`"),
        (("data", "erase", "--everything"), "run `redraft db upgrade`"),
        (("cases", "release"), "run `redraft db upgrade`"),
        (("serve", "--port", "70000"), "server.port"),
        (("serve", "--num-draft-tokens", "99"), "engine.num_draft_tokens"),
        (("doctor", "--json", "{file}/doctor.json"), "/file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_answered_with_one_sentence(
    words: tuple[str, ...], message: str, tmp_path: Path, redraft: Redraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "home"))
    places = {"empty": tmp_path / "empty", "file": tmp_path / "file"}
    places["empty"].mkdir()
    places["file"].write_text("no folder")
    done = redraft(*(word.format_map(places) for word in words))
    one_sentence(Outcome(done.status, "", done.err) if words[0] == "doctor" else done)
    assert message in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nonsense",), "No such command"),
        (("data", "erase"), "give one of --keep"),
        (("data", "export", "--out", "-"), "give one or more of"),
        (("data", "export", "--out", "-", "--id", "a", "--everything"), "give one or more of"),
        (("data", "erase", "--keep", "1", "--everything"), "give one of --keep"),
        (("data", "erase", "--id", "a", "--everything"), "give one of --keep"),
        (("data", "erase", "--before", "yesterday"), "--before"),
        (("cases", "list", "--limit", "0"), "--limit"),
        (("cases", "release", "--run", "0"), "--run"),
        (("adapters", "activate", "x"), "'x' is not a version"),
        (("adapters", "rollback", "--expected", "-1"), "'-1' is not a version"),
        (("eval", "agreement", "--prompts", "a", "--adapter", "none"), "'none' is not a version"),
        (("make-draft", "--target", "a", "--out", "b", "--layers", "a,b"), "separated by commas"),
        (("make-draft", "--target", "a", "--out", "b", "--dtype", "int8"), "float32 or bfloat16"),
        (("generate", "hi", "--temperature", "-1"), "--temperature"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_arguments_are_a_usage_error(words: tuple[str, ...], message: str, redraft: Redraft) -> None:
    done = redraft(*words)
    assert done.status == 2
    assert done.out == ""
    assert message in done.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such configuration file"),
        (b"[models\ntarget = 1", "settings.toml"),
        (b"home = '\xff'", "settings.toml"),
        (b"[engine]\nmax_rows = 0\n[servers]\nport = 1", "engine.max_rows"),
        (b"[store]\nurl = 'nonsense'", "database"),
        (b"[store]\nurl = 'sqlite:///:memory:'", "the database must be a file"),
        (b"[store]\nrecord = false", "training.enabled needs store.record"),
    ],
    ids=["missing", "malformed", "no text", "out of range", "no URL", "in memory", "contradiction"],
)
def test_a_bad_configuration_file_is_answered_with_one_sentence(
    content: bytes | None, message: str, tmp_path: Path, redraft: Redraft
) -> None:
    config = tmp_path / "settings.toml"
    if content is not None:
        config.write_bytes(content)
    done = redraft("cases", "stats", "--config", config)
    one_sentence(done)
    assert message in done.err


def test_every_problem_of_a_configuration_is_named(tmp_path: Path, redraft: Redraft) -> None:
    config = tmp_path / "settings.toml"
    config.write_text("[engine]\nmax_rows = 0\nspeed = 3\n[gate]\nbootstrap = 'many'\n")
    done = redraft("cases", "stats", "--config", config)
    one_sentence(done)
    for name in ("engine.max_rows", "engine.speed", "gate.bootstrap"):
        assert name in done.err


@contextmanager
def another_server(status: int, body: bytes) -> Generator[str]:
    """Another HTTP server at the expected address."""

    class Answer(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_POST(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()
            thread.join(60)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b"<html>not here</html>"),
        pytest.param(200, b"<html>hello</html>", marks=pytest.mark.nightly),
        pytest.param(500, b'{"detail": "broken"}', marks=pytest.mark.nightly),
        (200, b"[]"),
    ],
)
@pytest.mark.parametrize("words", [("train",), ("adapters", "rollback")], ids=["train", "rollback"])
def test_a_different_server_at_the_address_is_recognised(
    words: tuple[str, ...], status: int, body: bytes, redraft: Redraft
) -> None:
    with another_server(status, body) as url:
        done = redraft(*words, "--url", url)
    one_sentence(done)
    assert url in done.err


def test_an_export_that_cannot_be_written_is_answered_with_one_sentence(
    served: Served, tmp_path: Path, redraft: Redraft
) -> None:
    (tmp_path / "file").write_text("no folder")
    done = redraft("adapters", "export", served.adapters[0].id, tmp_path / "file" / "out", "--config", served.config)
    one_sentence(done)


@pytest.mark.usefixtures("restored_process")
def test_a_port_in_use_ends_the_server(tmp_path: Path, redraft: Redraft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "home"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = redraft("serve", "--port", port)
    assert done.status == 1
    assert done.out == ""
    last = done.err.splitlines()[-1]
    assert last.startswith("redraft: ")
    assert str(port) in last
    assert "in use" in last
    assert not (tmp_path / "home" / "redraft.db").exists(), "nothing was opened"


def test_a_server_of_an_unknown_model_ends_with_one_sentence(tmp_path: Path) -> None:
    done = child("serve", "--target", "nothing-here", "--port", "0", REDRAFT_HOME=str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("redraft: no model nothing-here")


def test_the_server_prints_its_address_and_is_ready(served: Served) -> None:
    assert f"redraft serves at {served.server.url}" in served.server.log.read_text()
    assert httpx.get(f"{served.server.url}/health/ready", timeout=60).status_code == 200
