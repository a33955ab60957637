"""What an operator chose about practice: where it counts, and its file."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from service.core import Conflict, Unavailable
from service.lifecycle.practice_choice import FILE, PracticeChoice
from service.settings import Settings, load_settings


def chosen(settings: Settings, home: Path) -> PracticeChoice:
    return PracticeChoice(settings.training, home)


def test_a_choice_outlives_a_restart_in_a_file_for_its_owner_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    before = os.umask(0)
    try:
        for on in (True, False, True):
            choice = chosen(load_settings(), home)
            choice.make(on)
            assert (choice.on, choice.open) == (on, False)
            again = chosen(load_settings(), home)
            assert (again.on, again.open) == (on, False)
    finally:
        os.umask(before)
    assert [path.name for path in home.iterdir()] == [FILE]
    assert (home.stat().st_mode & 0o777, (home / FILE).stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("source", ["file", "environment", "flag"])
def test_what_the_configuration_sets_wins(
    tmp_path: Path, source: str, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen(load_settings(), tmp_path).make(not on)
    config = tmp_path / "settings.toml"
    config.write_text(f"[training]\npractice = {str(on).lower()}\n" if source == "file" else "")
    if source == "environment":
        monkeypatch.setenv("REDRAFT_TRAINING__PRACTICE", str(on).lower())
    flags = {"training.practice": on} if source == "flag" else {}
    choice = chosen(load_settings(config, flags), tmp_path)
    assert (choice.configured, choice.open, choice.on) == (True, False, on)
    with pytest.raises(Conflict, match=re.escape("training.practice is set in the configuration")):
        choice.make(not on)


def test_other_settings_of_the_section_leave_it_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "settings.toml"
    config.write_text("[training]\nrank = 8\n")
    monkeypatch.setenv("REDRAFT_TRAINING__EPOCHS", "1")
    # Compose files set variables to nothing where nothing is said.
    monkeypatch.setenv("REDRAFT_TRAINING__PRACTICE", "")
    choice = chosen(load_settings(config, {"training.replay": 0.1}), tmp_path)
    assert (choice.configured, choice.open, choice.on) == (False, True, False)


@pytest.mark.parametrize("content", [b"", b'{"on": tr', b'{"on": 1}', b'{"on": "true"}', b"[true]", b"{}", b"\xff"])
def test_a_damaged_file_is_no_choice(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE).write_bytes(content)
    choice = chosen(load_settings(), tmp_path)
    assert (choice.open, choice.on) == (True, False)
    assert f"{tmp_path / FILE} cannot be read or is damaged" in caplog.text
    choice.make(True)
    assert chosen(load_settings(), tmp_path).on


def test_a_choice_that_cannot_be_written_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = chosen(load_settings(), tmp_path)
    choice.make(True)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(Unavailable, match="cannot be written: No space left on device"):
            choice.make(False)
    assert choice.on and chosen(load_settings(), tmp_path).on
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
