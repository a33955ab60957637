from __future__ import annotations

from pathlib import Path

import pytest

from service.settings import Settings
from tests.support.tiny_server import write_pair


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def settings(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings.model_validate(
        {
            "home": tmp_path_factory.mktemp("home"),
            "models": {"target": str(models[0]), "draft": str(models[1])},
            "training": {"max_generations": 20, "rank": 4},
        }
    )
