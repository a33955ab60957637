"""Timing the demo's work on a tiny real pair."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from service.blas import blas_threads
from service.core import Unavailable
from service.evaluation import machine_speed
from service.evaluation.machine_speed import measure_speed
from service.settings import TrainingSettings
from tests.support.tiny_server import prompts


@pytest.mark.nightly
def test_every_kind_of_work_is_timed(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    threads, used = blas_threads(), list[int]()
    monkeypatch.setattr(machine_speed, "set_blas_threads", used.append)
    speed = measure_speed(models, list(prompts(3)), max_tokens=12, training=TrainingSettings(threads=7))
    assert all(seconds > 0 for seconds in asdict(speed).values())
    # Random tiny models never say an end token here, so that every answer has all of its tokens.
    assert speed.tokens == 12
    # A step is timed on the cores that a run gets, and then all are used again.
    assert used == [7, threads]


def test_a_python_that_does_not_start_is_an_error(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_speed, "python_command", lambda *words: ["/nowhere/python", *words])
    with pytest.raises(Unavailable, match="another Python does not start"):
        measure_speed(models, list(prompts(3)), max_tokens=12, training=TrainingSettings())
