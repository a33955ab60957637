"""What `redraft serve` asks at a terminal once it listens: whether the target may practice."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from service.cli import practice_question
from service.core import Conflict
from service.lifecycle.practice_choice import FILE, PracticeChoice
from service.settings import TrainingSettings, load_settings
from tests.support.command_line import Redraft
from tests.support.terminal import CTRL_C, at_a_terminal
from tests.support.tiny_server import tiny_server, write_pair

PROMPT = "May it practice? [y/N]"
TERMINAL = "print('at a terminal:', console.at_terminal(), flush=True)"
BACKGROUND = f"""
import os
from service.cli import console
{TERMINAL}
if os.fork() == 0:
    os.setpgid(0, 0)
    {TERMINAL}
    os._exit(0)
os.wait()
"""
MOVED = """
import os
from service.cli import console
from service.cli.practice_question import tolerate_background
tolerate_background()
if os.fork() == 0:
    os.setpgid(0, 0)
    print('said:', console.agrees('Well?'), flush=True)
    os._exit(0)
child, status = os.waitpid(-1, os.WUNTRACED)
os._exit(os.WIFSTOPPED(status))
"""


@dataclass
class Started:
    """What a server at a terminal told while its question was open."""

    models: list[str]
    refused: str
    status: int
    text: str
    home: Path


def serve_at_a_terminal(tmp_path: Path, typed: bytes, ended: str) -> Started:
    """`serve` at a terminal: while the question is open the server is asked; then `typed` is the answer, and Ctrl-C ends the
    server once `ended` is shown."""
    target, draft = write_pair(tmp_path)
    server = tiny_server(tmp_path, (target, draft), training={"enabled": True})
    found: list[httpx.Response] = []

    def answer(shown: str) -> bytes:
        long = {"prompt": "x" * 100, "max_tokens": 8}
        found.append(httpx.get(f"{server.url}/v1/models"))
        found.append(httpx.post(f"{server.url}/generate", json=long))
        return typed

    words = [
        "serve",
        target,
        "--draft-model",
        draft,
        "--alias",
        "gpt-x",
        "--max-context",
        64,
        "--config",
        server.config,
    ]
    steps = [(PROMPT, answer), *([(ended, lambda shown: CTRL_C)] if ended else [])]
    status, text = at_a_terminal(["-m", "service.cli", *map(str, words)], {}, more=steps)
    models = [each["id"] for each in found[0].json()["data"]]
    return Started(models, found[1].text, status, text, tmp_path / "home")


def test_it_is_asked_once_the_server_listens_and_the_answer_counts_at_once(tmp_path: Path) -> None:
    done = serve_at_a_terminal(tmp_path, b"perhaps\nYES\n", "practice turned on")
    said = " ".join(done.text.split())
    assert done.status == 0, done.text
    assert 0 <= done.text.find("redraft serves at") < done.text.find("60 minutes a day") < done.text.find(PROMPT)
    assert done.text.count(PROMPT) == 2, "perhaps is no answer"
    assert "at most 60 minutes a day, never on battery, and at most 2 GB" in said
    assert "training.practice" in said and "the page" in said
    choice = PracticeChoice(TrainingSettings(), done.home)
    assert (choice.open, choice.on) == (False, True)
    # A new database is no news, nor are the steps to it.
    assert "alembic" not in done.text and "Running upgrade" not in done.text
    assert done.models[0] == "gpt-x" and "target" in done.models
    assert "64" in done.refused and "context" in done.refused


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("typed", "ended", "stored"),
    [
        pytest.param(b"\n", "practice turned off", False, id="return"),
        pytest.param(CTRL_C, "", None, id="ctrl-c"),
    ],
)
def test_no_answer_is_no_and_an_end_is_none(tmp_path: Path, typed: bytes, ended: str, stored: bool | None) -> None:
    done = serve_at_a_terminal(tmp_path, typed, ended)
    assert done.status == 0 and done.text.count(PROMPT) == 1
    choice = PracticeChoice(TrainingSettings(), done.home)
    assert (choice.open, choice.on) == (stored is None, bool(stored))


@pytest.fixture
def taken() -> Iterator[int]:
    """A port in use: a server ends there before it loads anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_process_that_was_moved_to_the_background_goes_on_without_an_answer() -> None:
    """Where a read from the terminal would stop it, as it does without `tolerate_background`."""
    status, text = at_a_terminal(["-c", MOVED], {})
    assert (status, "said: None" in text) == (0, True), text


def test_nobody_is_asked_in_the_background_of_a_terminal() -> None:
    _, text = at_a_terminal(["-c", BACKGROUND], {})
    assert text.split("\r\n")[:2] == ["at a terminal: True", "at a terminal: False"]


@pytest.mark.parametrize("number", ["SIGINT", "SIGQUIT", "SIGHUP"])
def test_a_terminal_s_signals_are_not_ignored_there(number: str) -> None:
    """Whatever these tests were started with, as by a script in its background."""
    before = signal.signal(signal.Signals[number], signal.SIG_IGN)
    try:
        code = f"import signal; print(signal.getsignal(signal.{number}) is signal.SIG_IGN)"
        assert at_a_terminal(["-c", code], {}) == (0, "False\r\n")
    finally:
        signal.signal(signal.Signals[number], before)


def test_the_prompt_shows_where_stderr_is_a_file() -> None:
    away = "import os; os.dup2(os.open(os.devnull, os.O_WRONLY), 2); from service.cli import console"
    words = ["-c", f"{away}; print('said:', console.agrees('Well?'))"]
    status, text = at_a_terminal(words, {}, prompt="Well? [y/N]: ", keys=b"y\n")
    assert status == 0 and "said: True" in text


@pytest.mark.usefixtures("restored_process")
def test_nobody_is_asked_without_a_terminal(
    tmp_path: Path, redraft: Redraft, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path))
    done = redraft("serve", "--port", taken, stdin="y\n")
    assert done.out == "" and "in use" in done.err
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ({}, True),
        ({"models.draft": "some-draft"}, True),
        ({"models.draft": "none"}, False),
        ({"models.target": "a-model-that-no-draft-is-known-for"}, False),
        ({"engine.num_draft_tokens": 0}, False),
        ({"training.run_here": False}, False),
        ({"training.enabled": False}, False),
        ({"training.practice": False}, False),
        ({"training.practice": True}, False),
    ],
)
def test_it_is_asked_where_practice_is_possible_and_not_configured(
    flags: dict[str, object], asked: bool, tmp_path: Path
) -> None:
    settings = load_settings(None, flags | {"home": str(tmp_path)})
    assert practice_question.is_open(settings) is asked
    if asked:
        PracticeChoice(settings.training, tmp_path).make(False)
        assert not practice_question.is_open(settings), "once"


def test_an_answer_that_cannot_be_kept_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(on: bool) -> None:
        raise Conflict("the server ends")

    monkeypatch.setattr(practice_question, "agrees", lambda question: True)
    practice_question.ask_about_practice(load_settings(), refuse)
    assert "the server ends" in capsys.readouterr().err


def test_battery_is_promised_only_where_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(practice_question, "agrees", lambda question: None)
    for pauses in (True, False):
        flags = {"home": str(tmp_path), "training.pause_on_battery": pauses, "training.practice_gb": 0.5}
        practice_question.ask_about_practice(load_settings(None, flags), print)
        text = " ".join(capsys.readouterr().out.split())
        assert ("never on battery" in text) is pauses and "0.5 GB" in text
