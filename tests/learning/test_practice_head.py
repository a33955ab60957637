"""Practice of an EAGLE head, which learns all steps of a round from the target's hidden states."""

from pathlib import Path

import numpy as np
import pytest

from service.learning import practice
from tests.support.training_child import (
    SMALL_PRACTICE,
    Home,
    LoggedPair,
    make_logged_head,
    of_type,
    perform,
    use_many_templates,
)


@pytest.fixture(scope="module")
def logged_pair(tmp_path_factory: pytest.TempPathFactory) -> LoggedPair:
    return use_many_templates(make_logged_head(tmp_path_factory.mktemp("logged_pair"), range(2, 62)))


def test_practice_of_a_head_saves_target_calls(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL_PRACTICE.items():
        monkeypatch.setattr(practice, name, value)
    messages = perform(home.practice_spec(tmp_path / "practice", 0.01))
    assert messages[-1]["type"] == "done", messages[-1]
    (candidate,), (scores,) = of_type(messages, "candidate"), of_type(messages, "scores")
    assert "fuse" in candidate["keys"]
    calls = {name: np.sum([one["calls"] for one in each], axis=0) for name, each in scores["scores"].items()}
    assert (calls["candidate"] < calls["0"]).all()
