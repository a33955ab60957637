from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from service.core import StoreError
from service.models.fingerprint import folder_sha256
from service.store.artifacts import publish, sweep

FILES = {"adapters.safetensors": b"weights" * 100, "adapter_config.json": b"{}", "deep/er/notes.txt": b""}


def folder(path: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def test_the_hash_is_of_names_and_bytes(tmp_path: Path) -> None:
    made = folder(tmp_path / "a")
    backwards = folder(tmp_path / "b", dict(reversed(FILES.items())))
    assert folder_sha256(made) == folder_sha256(backwards)
    changes: list[dict[str, bytes]] = [
        {**FILES, "adapter_config.json": b"{} "},
        {**FILES, "adapter_config.json": b"[}"},
        {**FILES, "more": b""},
        {name: content for name, content in FILES.items() if name != "deep/er/notes.txt"},
        {"moved/" + name if name == "adapter_config.json" else name: content for name, content in FILES.items()},
        {**FILES, "adapters.safetensors": FILES["adapter_config.json"], "adapter_config.json": b"weights" * 100},
        {"adapters.safetensors": b"weights" * 100 + b"{}", "adapter_config.json": b"", "deep/er/notes.txt": b""},
    ]
    hashes = {folder_sha256(folder(tmp_path / f"changed {i}", files)) for i, files in enumerate(changes)}
    assert len(hashes) == len(changes)
    assert folder_sha256(made) not in hashes


@pytest.mark.parametrize("taken", ["folder", "empty folder", "file"])
def test_nothing_is_published_over_anything(tmp_path: Path, taken: str) -> None:
    final = tmp_path / "run-1-1"
    if taken == "file":
        final.write_text("here first")
    else:
        folder(final, {"here": b"first"} if taken == "folder" else {})
        final.mkdir(exist_ok=True)
    before = [(path, path.is_file() and path.read_bytes()) for path in [final, *final.rglob("*")]]
    scratch = folder(tmp_path / "scratch")
    with pytest.raises(StoreError, match="run-1-1"):
        publish(scratch, final)
    assert [(path, path.is_file() and path.read_bytes()) for path in [final, *final.rglob("*")]] == before
    assert folder_sha256(scratch) == folder_sha256(folder(tmp_path / "again"))


@pytest.mark.skipif(hasattr(fcntl, "F_FULLFSYNC"), reason="macOS syncs another way")
@pytest.mark.promise(9)
def test_all_is_on_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, final = folder(tmp_path / "scratch"), tmp_path / "adapters" / "run-1-1"
    inside = {path.stat().st_ino for path in [scratch, *scratch.rglob("*")]}
    done: list[int | str] = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        done.append(os.fstat(descriptor).st_ino)

    def watched_rename(source: Path, target: Path) -> None:
        rename(source, target)
        done.append("renamed")

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    publish(scratch, final)
    named = done.index("renamed")
    assert inside <= set(done[:named])
    assert final.parent.stat().st_ino in done[named:]


def test_sweeping_removes_unregistered_folders_and_nothing_else(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "adapters", folder(tmp_path / "elsewhere")
    known = folder(root / "run-1-1")
    orphan = folder(root / "run-2-2")
    bare = folder(root / "run-3-3", {"adapters.safetensors": b""})
    writing = folder(root / ".run-4-4.part", {"x": b""})
    removing = folder(root / "run-5-5.partial", {"deep/er/notes.txt": b""})
    (root / "notes.txt").write_text("mine")
    photos = folder(root / "photos", {"me.png": b""})
    link = root / "run-6-6"
    link.symlink_to(elsewhere)
    # The rows may spell the same path differently.
    gone = sweep(root, [root / ".." / "adapters" / "run-1-1"])
    assert sorted(gone) == sorted([orphan, bare, writing, removing])
    assert set(root.iterdir()) == {known, root / "notes.txt", photos, link}
    assert folder_sha256(elsewhere) == folder_sha256(known)
    assert sweep(root, [known]) == []
    assert sweep(tmp_path / "never made", []) == []


def test_a_sweep_that_was_cut_short_is_finished_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "adapters" / "run-1-1")

    def cut_short(path: Path) -> None:
        for name in ("adapters.safetensors", "adapter_config.json"):
            (path / name).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", cut_short)
        with pytest.raises(KeyboardInterrupt):
            sweep(tmp_path / "adapters", [])
    assert len(list((tmp_path / "adapters").iterdir())) == 1
    sweep(tmp_path / "adapters", [])
    assert list((tmp_path / "adapters").iterdir()) == []
