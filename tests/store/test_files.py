from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from service.core import StoreError
from service.models.fingerprint import folder_sha256
from service.store.artifacts import publish, sweep

ROOT = Path(__file__).parents[2]
FILES = {"adapters.safetensors": b"\x00\x01" * 5000, "adapter_config.json": b'{"rank": 8}'}


def written(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def test_publishing_renames_the_whole_folder(tmp_path: Path) -> None:
    scratch, final = written(tmp_path / "scratch"), tmp_path / "adapters" / "7"
    expected = folder_sha256(scratch)
    assert publish(scratch, final) == expected == folder_sha256(final)
    assert {path.name: path.read_bytes() for path in final.iterdir()} == FILES
    assert not scratch.exists()


def test_a_published_folder_is_never_overwritten(tmp_path: Path) -> None:
    final = tmp_path / "7"
    digest = publish(written(tmp_path / "one"), final)
    other = written(tmp_path / "two")
    (other / "adapter_config.json").write_bytes(b"{}")
    with pytest.raises(StoreError, match="7"):
        publish(other, final)
    assert folder_sha256(final) == digest
    assert other.exists()


def test_the_hash_sees_names_bytes_and_nothing_else(tmp_path: Path) -> None:
    one = written(tmp_path / "one")
    other = tmp_path / "other"
    other.mkdir()
    for name, content in reversed(FILES.items()):
        (other / name).write_bytes(content)
    assert folder_sha256(one) == folder_sha256(other)
    (other / "adapter_config.json").rename(other / "config.json")
    assert folder_sha256(one) != folder_sha256(other)
    (other / "config.json").rename(other / "adapter_config.json")
    assert folder_sha256(one) == folder_sha256(other)
    (other / "adapter_config.json").write_bytes(b'{"rank": 9}')
    assert folder_sha256(one) != folder_sha256(other)


@pytest.mark.promise(9)
def test_a_kill_at_any_step_leaves_the_whole_folder_or_none(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    whole = folder_sha256(written(tmp_path / "model"))
    seen = {True: 0, False: 0}
    for step in range(1, 100):
        root = tmp_path / str(step)
        scratch, final = written(root / ".run-7-1.part"), root / "run-7-1"
        command = [sys.executable, "-m", "tests.support.publish_killed", str(scratch), str(final), str(step)]
        code = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode
        assert final.exists() is not scratch.exists()
        if final.exists():
            assert folder_sha256(final) == whole
        if code == 0:
            break
        assert code == -signal.SIGKILL
        seen[final.exists()] += 1
        # The next start removes unregistered folders, and then the same name can be published.
        assert len(sweep(root, [])) == 1
        assert publish(written(root / ".run-7-1.part"), final) == whole
    else:
        pytest.fail("it never came to the end")
    assert all(seen.values())


def test_sweeping_removes_only_unregistered_folders(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    known = [written(root / "1"), written(root / "2")]
    precious = written(tmp_path / "precious")
    orphans = [written(root / "run-3-1"), written(root / ".run-4-1.part")]
    own = [written(root / "my-lora"), written(root / "mine.partial")]
    (root / "stray").write_text("x")
    (root / "link").symlink_to(precious)
    (root / "notes").mkdir()
    before = {path: folder_sha256(path) for path in known}
    assert set(sweep(root, [*known, tmp_path / "elsewhere"])) == set(orphans)
    assert {path: folder_sha256(path) for path in known} == before
    assert set(root.iterdir()) == {*known, *own, root / "stray", root / "link", root / "notes"}
    assert {path.name for path in precious.iterdir()} == set(FILES)
    assert sweep(root, known) == []
    assert sweep(tmp_path / "nowhere", known) == []
