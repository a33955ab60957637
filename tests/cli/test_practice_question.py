"""What `redraft serve` asks at a terminal before anything is loaded: whether the target may practise."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.cli import serving
from service.lifecycle.practice_choice import FILE, PracticeChoice
from service.settings import TrainingSettings, load_settings
from tests.support.command_line import Redraft
from tests.support.terminal import CTRL_C, at_a_terminal

PROMPT = "May it practise? [y/N]"
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


@pytest.fixture
def taken() -> Iterator[int]:
    """A port in use: a server ends there before it loads anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("keys", "stored"),
    [
        pytest.param(b"perhaps\nYES\n", True, id="yes"),
        pytest.param(b"\n", False, id="return", marks=pytest.mark.nightly),
        pytest.param(CTRL_C, None, id="ctrl-c"),
        pytest.param(b"\x04", None, id="ctrl-d", marks=pytest.mark.nightly),
    ],
)
def test_the_answer_is_stored_and_asked_for_once(tmp_path: Path, taken: int, keys: bytes, stored: bool | None) -> None:
    home = tmp_path / "home"
    words, environment = ["-m", "service.cli", "serve", "--port", str(taken)], {"REDRAFT_HOME": str(home)}
    status, text = at_a_terminal(words, environment, prompt=PROMPT, keys=keys)
    assert text.count(PROMPT) == (2 if b"perhaps" in keys else 1)
    said = " ".join(text.split())
    assert "60 minutes a day at most, never on battery, and writes 2 GB at most" in said
    assert "training.practice" in said and "the page" in said
    # As Ctrl-C ends every command; all others went on to the port.
    # A shell reports an end by SIGINT as 130 too.
    assert status in ({130, -signal.SIGINT} if keys == CTRL_C else {1}) and ("in use" in text) is (status == 1)
    choice = PracticeChoice(TrainingSettings(), home)
    assert (choice.open, choice.on) == (stored is None, bool(stored))
    if stored:
        status, text = at_a_terminal(words, environment)
        assert PROMPT not in text and "in use" in text


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
    flags: dict[str, object], asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[str] = []

    def answer(question: str) -> bool:
        questions.append(question)
        return True

    monkeypatch.setattr(serving, "agrees", answer)
    settings = load_settings(None, flags | {"home": str(tmp_path)})
    for _ in range(2):
        serving._ask_about_practice(settings)
        assert len(questions) == asked, "once"
    assert (tmp_path / FILE).exists() is asked


def test_battery_is_promised_only_where_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "agrees", lambda question: None)
    for pauses in (True, False):
        flags = {"home": str(tmp_path), "training.pause_on_battery": pauses, "training.practice_gb": 0.5}
        serving._ask_about_practice(load_settings(None, flags))
        text = " ".join(capsys.readouterr().out.split())
        assert ("never on battery" in text) is pauses and "0.5 GB" in text
