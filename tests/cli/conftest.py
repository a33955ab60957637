from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Generator

import pytest

from service import server
from service.cli import console, main, serving
from service.settings import Settings
from tests.support.command_line import Outcome, Redraft


@pytest.fixture
def restored_process() -> Generator[None]:
    """`serve` narrows the umask, and takes over the log."""
    before = os.umask(0o022)
    os.umask(before)
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    os.umask(before)
    root.setLevel(level)
    root.handlers[:] = handlers
    logging.captureWarnings(False)


@pytest.fixture
def settings_served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings of every server that `serve` would have started."""
    found: list[Settings] = []

    def run(settings: Settings, on_ready: object) -> int:
        found.append(settings)
        return 0

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(server, "run_server", run)
    monkeypatch.setattr(serving, "_exit", leave)
    return found


@pytest.fixture
def redraft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Redraft:
    """redraft("cases", "list", …) -> the outcome of the command line, run in this process."""
    for shown in (console.out, console.err):
        monkeypatch.setattr(shown, "_width", 240)

    def run(*words: object, stdin: str = "") -> Outcome:
        monkeypatch.setattr(sys, "argv", ["redraft", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        found = capsys.readouterr()
        status = ended.value.code or 0
        assert isinstance(status, int)
        return Outcome(status, found.out, found.err)

    return run
