from __future__ import annotations

from pathlib import Path

import pytest

from service.settings import EngineSettings, GateSettings, Settings, TrainingSettings
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


@pytest.fixture
def quick(settings: Settings) -> Settings:
    """A tiny adapter learns something within a second, and the gate takes few texts."""
    training = TrainingSettings(min_cases=20, min_tokens=300, epochs=4, rank=8, learning_rate=2e-2)
    return settings.model_copy(
        update={
            "engine": EngineSettings(num_draft_tokens=3),
            "training": training,
            "gate": GateSettings(min_prompts=3, min_tokens=40, bootstrap=200),
        }
    )
