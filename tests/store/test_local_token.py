"""The file with the token of a home folder: for its owner alone, written whole, and not trusted where others could have."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service.core import StoreError
from service.store.access import local_token
from service.store.access.local_token import FILE, make_token, read_token


def test_it_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    home = tmp_path / "a" / "home"
    assert read_token(home) is None
    umask = os.umask(0)
    try:
        token = make_token(home)
    finally:
        os.umask(umask)
    assert re.fullmatch(r"rd-[\w-]{43}", token)
    assert stat.S_IMODE((home / FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert [path.name for path in home.iterdir()] == [FILE]
    assert make_token(home) == read_token(home) == token
    assert make_token(tmp_path) != token


def _readable(path: Path) -> None:
    path.chmod(0o644)


def _writable(path: Path) -> None:
    path.chmod(0o620)


def _linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _empty(path: Path) -> None:
    path.write_text("")


def _short(path: Path) -> None:
    path.write_text("rd-1\n")


def _binary(path: Path) -> None:
    path.write_bytes(b"\xff\x00" * 30)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("spoil", [_readable, _writable, _linked, _empty, _short, _binary, _pipe])
def test_one_that_others_may_know_or_that_is_none_is_replaced(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    before = make_token(tmp_path)
    spoil(tmp_path / FILE)
    assert read_token(tmp_path) is None
    after = make_token(tmp_path)
    assert after != before and read_token(tmp_path) == after
    assert stat.S_IMODE((tmp_path / FILE).lstat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_one_of_another_user_is_not_read(tmp_path: Path) -> None:
    token = make_token(tmp_path)
    os.chown(tmp_path / FILE, 65534, -1)
    assert read_token(tmp_path) is None
    assert make_token(tmp_path) != token


def test_servers_that_start_together_agree(tmp_path: Path) -> None:
    for round in range(20):
        home, together = tmp_path / str(round), threading.Barrier(8)

        def start(home: Path = home, together: threading.Barrier = together) -> str:
            together.wait(30)
            return make_token(home)

        with ThreadPoolExecutor(8) as threads:
            made = {future.result(60) for future in [threads.submit(start) for _ in range(8)]}
        assert made == {read_token(home)}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="token cannot be written"):
        make_token(tmp_path / "file")


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local_token.os, "replace", fail)
    with pytest.raises(StoreError, match="No space left"):
        make_token(tmp_path)
    assert list(tmp_path.iterdir()) == []
