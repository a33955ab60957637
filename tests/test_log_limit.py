"""How much may be recorded where no setting says so: a share of the disk."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from service.app import log_limit
from service.settings import Settings, StoreSettings

GIB = 2**30


@pytest.mark.parametrize(
    ("disk", "limit"),
    [(8 * GIB, GIB // 2), (500 * GIB, 10 * GIB), (8_000 * GIB, 16 * GIB)],
    ids=["small", "usual", "large"],
)
def test_a_share_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: int, limit: int) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(total=disk)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert log_limit(Settings(home=tmp_path / "not" / "made")) == limit
    assert asked == [tmp_path], "the nearest folder that exists"


def test_what_the_settings_say(tmp_path: Path) -> None:
    assert log_limit(Settings(home=tmp_path, store=StoreSettings(max_mb=3))) == 3 * 2**20
    assert log_limit(Settings(home=tmp_path, store=StoreSettings(max_mb=0))) is None
    assert log_limit(Settings(home=tmp_path, store=StoreSettings(url="postgresql://host/name"))) is None
