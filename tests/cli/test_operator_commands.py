"""The commands of an operator: status, runs, settings and failure cases as text; JSON on stdout, examples, completion."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

from service.api import Doors, build_startup_api
from service.cli.console import printable
from service.cli.root import app
from service.core import BARE_DRAFT, FailureCase, PracticeState, Progress, Round, RunState, TrainingRun, Trigger
from service.models.fingerprint import tokenizer_fingerprint
from service.models.pair import load_model
from service.settings import Settings, load_settings
from service.store.stores import Stores, open_stores
from tests.support.command_line import TREE, Redraft, cells, commands, one_sentence
from tests.support.echo_engine import TOKEN, EchoEngine, EchoServer, make_run
from tests.support.store_rows import ADAPTERS, LOST, WHO, WON, case, generation, promote
from tests.support.tiny_server import write_pair
from tests.support.waiting import until

LEAVES = [path for path, command in commands(TREE) if not getattr(command, "commands", {})]
HOSTILE = "\x1b[2J\u202eevil\x07\x9b31m\n"
"""Clears the screen, turns the direction of writing, rings, and colours."""


# ------------------------------------------------------------------------------------------------------ every command


def resolved(words: list[str]) -> tuple[str, ...]:
    """The path of the command that a command line calls, its options parsed; nothing is run. Raises click's errors."""
    context, path, command, arguments = None, [], TREE, words
    name: str | None = "redraft"
    while True:
        context = command.make_context(name, list(arguments), parent=context)
        if not getattr(command, "commands", {}):
            context.close()
            return tuple(path)
        rest: list[str] = [*context._protected_args, *context.args]
        name, command, arguments = command.resolve_command(context, rest)  # pyright: ignore[reportAttributeAccessIssue]
        assert name is not None
        path.append(name)


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_command_has_examples_that_parse(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).output
    _, title, block = shown.partition("Examples:")
    assert title, f"no examples of {' '.join(path)}"
    examples = [line.strip() for line in block.splitlines() if line.strip()]
    assert examples
    for example in examples:
        words = shlex.split(example)
        assert words[0] == "redraft", "it fits into a line of a terminal"
        assert resolved(words[1:]) == path


def test_an_example_that_does_not_parse_would_be_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        resolved(["runs", "list", "--nonsense"])
    with pytest.raises(Exception, match="No such command"):
        resolved(["runs", "nonsense"])


def test_the_version_is_shown(redraft: Redraft) -> None:
    done = redraft("--version")
    assert (done.status, done.out, done.err) == (0, f"redraft {version('redraft')}\n", "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_and_options(redraft: Redraft) -> None:
    script = redraft("--show-completion", "bash")
    assert script.status == 0
    folder = Path(sys.executable).parent
    assert (folder / "redraft").is_file(), "the command that the package installs"

    def completed(*words: str) -> set[str]:
        line = f"COMP_WORDS=({shlex.join(words)} ''); COMP_CWORD={len(words) - 1}; _redraft_completion redraft"
        done = subprocess.run(
            ["bash", "-c", f'{script.out}\n{line}\nprintf "%s\\n" "${{COMPREPLY[@]}}"'],
            env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return set(done.stdout.split())

    assert completed("redraft", "ru") == {"runs"}
    assert completed("redraft", "runs", "list", "--be") == {"--before"}
    done = redraft("--show-completion", "tcsh")
    assert done.status == 2 and "tcsh" in done.err


def test_what_a_terminal_would_act_on_is_an_escape() -> None:
    assert printable(HOSTILE) == "\\x1b[2J\\u202eevil\\x07\\x9b31m\\n"
    assert printable("naïve 数 'x' :smile: [/b]") == "naïve 数 'x' :smile: [/b]"


# ------------------------------------------------------------------------------------------------------------ the log


class Home:
    """A home folder with a database and a pair whose tokenizer has one token for every byte."""

    def __init__(self, root: Path) -> None:
        self.pair = write_pair(root / "pair")
        self.config = root / "settings.toml"
        models = f"[models]\ntarget = {json.dumps(str(self.pair[0]))}\ndraft = {json.dumps(str(self.pair[1]))}\n"
        store = f"[store]\nadapters = {json.dumps(str(ADAPTERS))}\n"
        self.config.write_text(f"home = {json.dumps(str(root / 'home'))}\n{models}{store}")
        self.stores: Stores = open_stores(load_settings(self.config), create=True)
        self.tokenizer = load_model(self.pair[0]).tokenizer

    def tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text))

    def record(self, text: str, position: int, drafted: str, **more: Any) -> None:
        """An answer with one failure case: there the draft proposed the first token of another text."""
        output = self.tokens(text)
        found = FailureCase(position, self.tokens(drafted)[0], output[position], 0.125, 0.5, 1.5, False)
        who = replace(WHO, tokenizer=more.pop("tokenizer", tokenizer_fingerprint(self.pair[0])))
        made = generation(tokens=self.tokens("prompt: "), output=output, cases=(found,), who=who, **more)
        rounds = (Round(BARE_DRAFT, 0, 1, 0, len(output)),)
        self.stores.generations.add([replace(made, rounds=rounds)]).result(60)

    def claim(self) -> TrainingRun:
        self.stores.generations.add([generation(cases=[case(0)])]).result(60)
        active = self.stores.adapters.active(WHO.target, WHO.draft)
        parent = BARE_DRAFT if active is None else active.id
        run = self.stores.runs.claim(trigger=Trigger.MANUAL, who=WHO, parent=parent, limit=9)
        assert run is not None
        return run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Two promoted adapters, a rejected run and one under way; then two failure cases, the newer of another tokenizer."""
    made = Home(tmp_path_factory.mktemp("home"))
    runs, stores = made.stores.runs, made.stores
    first = promote(runs, stores.adapters, made.claim())
    promote(runs, stores.adapters, made.claim())
    lost = made.claim()
    runs.move(lost.id, lost.fencing, RunState.TRAINING)
    runs.move(lost.id, lost.fencing, RunState.SCORING)
    runs.reject(lost.id, lost.fencing, None, LOST)
    going = made.claim()
    runs.move(going.id, going.fencing, RunState.TRAINING)
    runs.progress(going.id, going.fencing, Progress(3, 12, 0.5, 1.0, 900.0, 5.0, "on battery"))
    assert first.id == 1
    made.record(f"a{HOSTILE}é!", 1, "Z", domain=f"do\x9bmain{chr(0x202E)}")
    made.record("other", 2, "Z", tokenizer="e" * 64)
    yield made
    made.stores.close()


def shown(redraft: Redraft, home: Home, *words: object) -> list[list[str]]:
    done = redraft(*words, "--config", home.config)
    assert (done.status, done.err) == (0, ""), done
    assert not any(each in done.out for each in "\x1b\x07\x9b\u202e")
    return cells(done.out)


def plain(redraft: Redraft, *words: object) -> dict[str, Any]:
    """The JSON of `--json -`, which has stdout for itself."""
    done = redraft(*words, "--json", "-")
    assert (done.status, done.err) == (0, ""), done
    return json.loads(done.out)


def test_failure_cases_are_shown_as_text(home: Home, redraft: Redraft) -> None:
    other, mine, *_ = (row for row in shown(redraft, home, "cases", "list", "--text"))
    assert mine[1:5] == ["do\\x9bmain\\u202e", '"prompt: a"', '"Z"', '"\\x1b"']
    number, tokens = int(mine[0]), home.tokens("Z\x1b")
    assert other[2] == "" and other[3:5] == [str(home.tokens("Z")[0]), str(home.tokens("h")[0])], "another tokenizer's"
    rows = {row[0]: row[1] for row in shown(redraft, home, "cases", "show", number)}
    assert rows["text before"] == '"prompt: a"'
    assert rows[f"drafted (token {tokens[0]})"] == '"Z"'
    assert rows[f"target (token {tokens[1]})"] == '"\\x1b"'
    # 8 tokens, each a byte: the direction's mark has three, of which the last are cut off nowhere.
    assert rows["text after"] == '"[2J\\u202eev"'
    assert rows["probability of the drafted token: target, draft"] == "0.1250, 0.5000"
    config = ("--config", home.config)
    found = plain(redraft, "cases", "show", number, *config)
    assert found["text"] == {"before": "prompt: a", "drafted": "Z", "target": "\x1b", "after": "[2J\u202eev"}
    assert (found["id"], found["position"], found["domain"]) == (number, 1, "do\x9bmain\u202e")
    listed = plain(redraft, "cases", "list", "--text", *config)["cases"]
    assert listed[1] == found | {"text": listed[1]["text"]} and listed[1]["text"] == found["text"]
    assert listed[0]["text"] is None
    assert "text" not in plain(redraft, "cases", "list", *config)["cases"][0]
    gone = redraft("cases", "show", 999, *config)
    one_sentence(gone)
    assert "no failure case 999" in gone.err


def test_parts_of_characters_are_escapes(home: Home, redraft: Redraft) -> None:
    home.record("é!", 1, "Z")
    row = shown(redraft, home, "cases", "list", "--text", "--limit", 1)[0]
    assert row[2:5] == ['"prompt: \\xc3"', '"Z"', '"\\xa9"']


def test_without_the_tokenizer_figures_are_shown_and_the_reason(
    home: Home, redraft: Redraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFT_MODELS__TARGET", "somebody/some-model")
    done = redraft("cases", "show", 1, "--config", home.config)
    assert done.status == 0
    assert (
        "the tokenizer of somebody/some-model is not on this disk: "
        "download it with `redraft models get somebody/some-model`"
    ) in done.err
    assert {row[0]: row[1] for row in cells(done.out)}["text before"] == ""
    one_sentence(redraft("cases", "list", "--text", "--config", home.config))


def test_runs_are_listed_and_shown(home: Home, redraft: Redraft) -> None:
    rows = shown(redraft, home, "runs", "list")
    assert [row[:3] for row in rows] == [
        ["4", "training", "manual"],
        ["3", "rejected", "manual"],
        ["2", "promoted", "manual"],
        ["1", "promoted", "manual"],
    ]
    assert [row[4] for row in rows] == ["2", "2", "1", "bare"], "what each was trained on top of"
    assert [row[8] for row in rows] == ["", LOST.reason, WON.reason, WON.reason]
    assert [row[0] for row in shown(redraft, home, "runs", "list", "--limit", 1, "--before", 3)] == ["2"]
    going = {row[0]: row[1] for row in shown(redraft, home, "runs", "show", 4)}
    assert going["progress"] == "step 3 of 12, loss 0.500 nats, 900 tokens/s, paused: on battery"
    assert (going["state"], going["ended"], going["on top of adapter"]) == ("training", "", "2")
    lost = {row[0]: row[1] for row in shown(redraft, home, "runs", "show", 3)}
    assert lost["predicted gain (90 % interval)"] == "+0.0% (-5.0% to +5.0%)"
    assert lost["outcome"] == LOST.reason
    won = {row[0]: row[1] for row in shown(redraft, home, "runs", "show", 1)}
    assert won["gain in code"] == "+10.0% (+5.0% to +15.0%)"
    gone = redraft("runs", "show", 99, "--config", home.config)
    one_sentence(gone)
    assert "no training run 99" in gone.err


def test_the_bare_draft_has_one_name(home: Home, redraft: Redraft) -> None:
    assert [(row[0], row[2]) for row in shown(redraft, home, "adapters", "list")] == [("2", "1"), ("1", "bare")]
    with EchoServer().served() as url:
        for name in ("bare", "0"):
            done = redraft("adapters", "activate", name, "--url", url)
            assert (done.status, done.out) == (0, "the bare draft serves now\n")
        refused = redraft("adapters", "rollback", "--expected", "bare", "--url", url)
        assert refused.status == 1


def test_json_is_a_file_or_all_of_stdout(home: Home, tmp_path: Path, redraft: Redraft) -> None:
    config = ("--config", home.config)
    for words in (
        ("adapters", "list"),
        ("cases", "list"),
        ("cases", "list", "--text"),
        ("cases", "show", 1),
        ("cases", "stats"),
        ("cases", "quarantined"),
        ("runs", "list"),
        ("runs", "show", 1),
        ("config", "show"),
    ):
        found = plain(redraft, *words, *config)
        table = redraft(*words, *config, "--json", tmp_path / "a" / "found.json")
        assert "━━" in table.out and "{" not in table.out.splitlines()[0], words
        assert json.loads((tmp_path / "a" / "found.json").read_text()) == found
        assert "━━" in redraft(*words, *config).out, "the next command prints again"
    assert [run["id"] for run in plain(redraft, "runs", "list", *config)["runs"]] == [4, 3, 2, 1]
    assert plain(redraft, "runs", "show", 4, *config)["progress"]["paused"] == "on battery"
    assert [(each["id"], each["parent"]) for each in plain(redraft, "adapters", "list", *config)["adapters"]] == [
        (2, 1),
        (1, 0),
    ]
    for path, command in commands(TREE):
        if path[-1:] in {("list",), ("show",), ("status",)}:
            assert any("--json" in parameter.opts for parameter in command.params), path


# ------------------------------------------------------------------------------------------------------------ settings


def settings_of(redraft: Redraft, *words: object) -> dict[str, tuple[object, str]]:
    return {
        each["name"]: (each["value"], each["from"]) for each in plain(redraft, "config", "show", *words)["settings"]
    }


def test_settings_are_shown_with_their_origins(
    tmp_path: Path, redraft: Redraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path))
    found = settings_of(redraft)
    assert found["home"] == (str(tmp_path), "environment")
    assert {name: origin for name, (_, origin) in found.items() if origin != "default"} == {"home": "environment"}
    defaults = Settings()
    assert found["engine.num_draft_tokens"] == (defaults.engine.num_draft_tokens, "default")
    assert found["server.allowed_hosts"] == (defaults.server.allowed_hosts, "default")
    assert found["store.url"] == (None, "default")
    assert len(found) == 1 + sum(len(type(section).model_fields) for name, section in defaults if name != "home")
    config = tmp_path / "settings.toml"
    config.write_text("[engine]\nmax_rows = 3\nmax_waiting = 4\n[server]\nport = 1000\n[models]\ntarget = 'file'\n")
    monkeypatch.setenv("REDRAFT_SERVER__PORT", "2000")
    monkeypatch.setenv("REDRAFT_ENGINE__MAX_ROWS", "5")
    monkeypatch.setenv("REDRAFT_ENGINE__PREFIX_CACHE_MB", "")
    found = settings_of(redraft, "--config", config, "--port", 3000, "--draft", "none", "--no-train")
    assert found["engine.max_waiting"] == (4, "file") and found["models.target"] == ("file", "file")
    assert found["engine.max_rows"] == (5, "environment")
    assert found["server.port"] == (3000, "flag") and found["models.draft"] == ("none", "flag")
    assert found["training.run_here"] == (False, "flag") and settings_of(redraft)["training.run_here"] == (
        True,
        "default",
    )
    assert found["engine.prefix_cache_mb"] == (None, "default"), "an empty variable is none"
    assert list(settings_of(redraft, "server.port", "gate")) == [
        "gate." + name for name in type(defaults.gate).model_fields
    ] + ["server.port"]
    rows = {row[0]: row[1:] for row in cells(redraft("config", "show", "--config", config).out)}
    assert rows["engine.max_rows"] == ["5", "environment"] and rows["models.draft"] == ["", "default"]
    assert rows["server.allowed_hosts"][0].startswith('["localhost", "127.0.0.1"')


def test_passwords_are_not_shown(tmp_path: Path, redraft: Redraft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path))
    url = "postgresql://ada:s3cr-t@db.example:5432/log?password=s3cr-t&sslpassword=s3cr-t&sslmode=require"
    for done in (
        redraft("config", "show", "--database", url),
        redraft("config", "show", "--database", url, "--json", "-"),
        redraft("config", "show", "store.url", "--database", "postgresql://ada:s3cr-t@x@y/log"),
        redraft("config", "show", "--database", "mysql://ada:s3cr-t@db.example/log"),
    ):
        assert "s3cr-t" not in done.out + done.err
    (setting,) = settings_of(redraft, "store.url", "--database", url).values()
    assert setting == ("postgresql+psycopg://ada:***@db.example:5432/log?sslmode=require", "flag")
    assert settings_of(redraft, "store.url", "--database", "sqlite:////a%20b/c.db") == {
        "store.url": ("sqlite:////a%20b/c.db", "flag")
    }


@pytest.mark.parametrize(
    ("words", "variable", "message"),
    [
        (("engine.speed",), None, "there is no setting engine.speed"),
        (("eng",), None, "there is no setting eng"),
        ((), "REDRAFT_ENGINE__SPEED", "engine.speed"),
        ((), "REDRAFT_SEVER__PORT", "REDRAFT_SEVER__PORT: there is no such section"),
        (("--port", "99999"), None, "server.port"),
    ],
)
def test_unknown_settings_are_refused(
    words: tuple[str, ...], variable: str | None, message: str, redraft: Redraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    done = redraft("config", "show", *words)
    assert done.status in {1, 2} and done.out == ""
    assert message in done.err


# -------------------------------------------------------------------------------------------------------------- status


def test_a_server_s_state_is_one_screen(redraft: Redraft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFT_API_KEY", TOKEN)
    server = EchoServer(engine=EchoEngine(pause=0.05))
    verdicts = [
        replace(make_run(number, RunState.REJECTED), verdict=replace(LOST, reason=HOSTILE)) for number in range(1, 6)
    ]
    server.operator.known_runs += [*verdicts, replace(make_run(6, RunState.TIMED_OUT), error="too slow")]
    server.operator.known_runs += [make_run(7, progress=Progress(3, 12, paused="busy"))]
    server.metrics.observe([Round(3, 0, 4, 3, 4), Round(3, 0, 0, 0, 1)], 0.1)
    with server.served() as url, httpx.Client(base_url=url, timeout=60) as http:
        with http.stream("POST", "/generate", json={"prompt": "x" * 500, "max_tokens": 500, "stream": True}):
            until(lambda: server.engine.requests() != [])
            found = plain(redraft, "status", "--url", url)
            done = redraft("status", "--url", url)
        until(lambda: server.engine.requests() == [])
        assert plain(redraft, "status", "--url", url)["requests"] == {"running": 0, "waiting": 0}
    assert (found["ready"], found["reason"], found["url"]) == (True, None, url)
    assert (found["model"], found["adapter"]) == ("echo", 3)
    assert found["requests"] == {"running": 1, "waiting": 0}
    assert (found["acceptance_rate"], found["tokens_per_call"]) == (0.75, 2.5)
    assert found["run"]["id"] == 7 and [run["id"] for run in found["verdicts"]] == [5, 4, 3]
    assert done.status == 0
    rows = {row[0]: row[1] for row in cells(done.out)}
    assert rows["last run"] == "run 6: timed out: too slow; its texts were given back"
    assert rows["ready"] == "yes" and rows["model"] == "echo" and rows["adapter"] == "3"
    assert rows["requests"] == "1 running, 0 waiting"
    assert rows["your draft"].startswith("2.44 → 2.59 tokens a call, +6.1 %")
    assert rows["acceptance rate"].startswith("0.750") and rows["tokens per target call"].startswith("2.50")
    assert rows["training run"] == "run 7: training, step 3 of 12, paused: busy"
    assert rows["verdict of run 5"] == f"rejected: {printable(HOSTILE)}"


def test_practice_by_itself_is_turned_on_and_off(redraft: Redraft) -> None:
    server = EchoServer()
    with server.served() as url:

        def state() -> str:
            rows = {row[0]: row[1] for row in cells(redraft("status", "--url", url).out)}
            return rows["practice by itself"]

        assert state() == "off"
        for word, text in (("--on", "on"), ("--off", "off")):
            done = redraft("practice", word, "--url", url)
            assert (done.status, done.out, done.err) == (0, f"practice by itself is {text}\n", "")
            assert state() == text and server.operator.known_runs == []
        server.operator.practice_state = PracticeState(True, "training.practice is set", "requests are being answered")
        assert state() == "on, waits: requests are being answered"
        refused = redraft("practice", "--off", "--url", url)
        one_sentence(refused)
        assert "training.practice is set" in refused.err
        assert plain(redraft, "status", "--url", url)["practice"]["on"] is True


def test_status_says_what_the_next_run_waits_for_and_what_the_adapter_may_lose(redraft: Redraft) -> None:
    with EchoServer().served() as url:
        rows = {row[0]: row[1] for row in cells(redraft("status", "--url", url).out)}
        found = plain(redraft, "status", "--url", url)["learning"]
    assert rows["next run"].startswith("12 of 400 failure cases (3 of 120 minutes in 24 hours; 1 refused since")
    assert rows["next gate"] == "tests at 0.0068 (0.025 after a promotion), on 12 of 38 held-out prompts"
    assert rows["against the base draft"] == "at worst -0.4% (-1.2% to +0.5%) on golden set"
    assert found["held_out"] == 12


def test_a_server_that_is_not_ready_says_why(redraft: Redraft) -> None:
    server = EchoServer()
    server.engine.dead = "no progress for 61 s"
    with server.served() as url:
        done = redraft("status", "--url", url)
        assert done.status == 1 and done.err == ""
        rows = {row[0]: row[1] for row in cells(done.out)}
        assert rows["ready"] == "no: no progress for 61 s" and rows["training run"] == "none under way"
        assert rows["acceptance rate"] == "", "nothing was drafted"
        done = redraft("status", "--url", url, "--json", "-")
        assert done.status == 1
        assert (json.loads(done.out)["ready"], json.loads(done.out)["reason"]) == (False, "no progress for 61 s")


class Starting(EchoServer):
    """A server whose models are being loaded."""

    @property
    def app(self) -> FastAPI:
        return build_startup_api(
            stage=lambda: "loading",
            metrics=self.metrics,
            doors=Doors(self.keeper, self.allowed_hosts),
        )


def test_a_server_that_starts_says_so(redraft: Redraft) -> None:
    with Starting().served() as url:
        done = redraft("status", "--url", url)
    assert (done.status, done.err) == (1, "")
    rows = {row[0]: row[1] for row in cells(done.out)}
    assert rows["ready"] == "no: the server is starting: loading"
    assert (rows["model"], rows["adapter"], rows["requests"]) == ("", "", "")


def test_where_no_server_answers_status_fails(redraft: Redraft) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for words in ((), ("--json", "-")):
        done = redraft("status", "--url", f"http://127.0.0.1:{port}", *words)
        one_sentence(done)
        assert done.status == 1 and "no server answers" in done.err
