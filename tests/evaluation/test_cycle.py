"""`eval cycle` at toy size, with a client that keeps sending requests."""

from pathlib import Path

import pytest

from service.evaluation.cycle import run_cycle
from service.evaluation.training_run import _server
from service.settings import GateSettings, Settings, TrainingSettings, load_settings
from tests.support.tiny_server import prompts


@pytest.mark.nightly
def test_a_cycle_reports_the_speed_of_serving_during_a_run(settings: Settings, models: tuple[Path, Path]) -> None:
    training = TrainingSettings(rank=4, epochs=8, max_generations=40, learning_rate=2e-2)
    chosen = settings.model_copy(
        update={"training": training, "gate": GateSettings(min_prompts=3, min_tokens=40, bootstrap=200)}
    )
    found = run_cycle(chosen, models, list(prompts(50, 1)), {"held": list(prompts(10, 2))}, beside=True, max_tokens=16)
    assert found["state"] in {"promoted", "rejected"}
    assert found["train_seconds"] > 0
    assert found["beside"]["before"] > 0 and found["beside"]["during"] > 0
    assert found["tests"]["held"]["after"]["agreement"] > found["tests"]["held"]["before"]["agreement"]


def test_what_an_operator_chose_about_practice_is_no_part_of_a_measurement(tmp_path: Path) -> None:
    for flags in ({}, {"training.practice": True}):
        server = _server(load_settings(None, flags), tmp_path, None)
        measured = load_settings(server.config).training
        assert "practice" in measured.model_fields_set and measured.practice is bool(flags)
