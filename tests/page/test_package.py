"""What is installed has the page's files in it."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STATIC = Path("service/api/page/static")


@pytest.mark.nightly
def test_the_wheel_and_the_source_distribution_hold_the_page(tmp_path: Path) -> None:
    """The wheel is built from the source distribution."""
    uv = shutil.which("uv")
    assert uv is not None, "uv is not installed"
    subprocess.run([uv, "build", "--quiet", "--out-dir", str(tmp_path)], cwd=ROOT, check=True, timeout=250)
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    wanted = {(STATIC / path.name).as_posix(): path.read_bytes() for path in (ROOT / STATIC).iterdir()}
    assert len(wanted) >= 9
    with zipfile.ZipFile(wheel) as built:
        assert {name: built.read(name) for name in built.namelist() if name in wanted} == wanted
    with tarfile.open(source) as packed:
        names = {member.name.partition("/")[2] for member in packed.getmembers()}
    assert names >= {*wanted, "service/api/page/feed.py"}
