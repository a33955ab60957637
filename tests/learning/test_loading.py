"""How much memory a job may plan with, and what it says where that is too little."""

from pathlib import Path

import mlx.core as mx
import pytest

from service.core import TrainingOutOfMemory
from service.learning import loading
from service.learning.loading import free_for_training, plan_run, training_outlook, training_shape
from service.models.memory import free_bytes
from service.models.training_memory import TrainingShape
from service.settings import TrainingSettings
from tests.support.model_folders import save_model
from tests.support.oracle import tiny_llama

SHAPE = TrainingShape.of({"hidden_size": 64, "num_hidden_layers": 4}, weights=0, value=4, rank=8)


def test_a_run_plans_with_a_share_of_what_is_free_and_no_more_than_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.engine.device.device_free_bytes", lambda: 10 * 2**30)
    assert free_for_training(TrainingSettings()) == 9 * 2**30
    assert free_for_training(TrainingSettings(memory_gb=2.0)) == 2 * 2**30
    assert free_for_training(TrainingSettings(memory_gb=64.0)) == 9 * 2**30
    assert free_for_training(TrainingSettings(), lent=2**30) == 2**30
    assert free_for_training(TrainingSettings(), lent=64 * 2**30) == 9 * 2**30


def test_a_gpu_s_own_memory_counts_and_not_the_host_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    for free in (2**60, 2**20):
        monkeypatch.setattr(mx, "device_info", lambda free=free: {"free_memory": free})
        assert free_for_training(TrainingSettings()) == int(0.9 * free) != int(0.9 * free_bytes())


def test_what_does_not_fit_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_run(SHAPE, 2**40, batch=8, length=512).rows == 8
    with pytest.raises(
        TrainingOutOfMemory, match=r"^0\.1 GiB of memory .* the smallest run, 1 x 256 tokens, takes 0\.6 GiB$"
    ):
        plan_run(SHAPE, 2**27, batch=8, length=512)
    monkeypatch.setattr(loading, "free_bytes", lambda: 2**28)
    with pytest.raises(TrainingOutOfMemory, match="of host memory are free"):
        plan_run(SHAPE, 2**40, batch=8, length=512)


def test_the_outlook_of_a_pair(tmp_path: Path) -> None:
    folder = save_model(tiny_llama(1), tmp_path / "draft")
    settings = TrainingSettings(window=100)
    shape = training_shape(folder, folder, rank=settings.rank)
    whole = training_outlook(shape, settings, 2**40, tflops=4.0)
    assert (whole.fits, whole.batch, whole.length, whole.recompute) == (True, 8, 512, False)
    slow = training_outlook(shape, settings, 2**40, tflops=1.0)
    assert whole.minutes is not None and slow.minutes == pytest.approx(4 * whole.minutes)
    assert training_outlook(shape, settings, 2**40).minutes is None
    small = training_outlook(shape, settings, whole.peak_bytes - 1)
    assert small.fits and small.peak_bytes < whole.peak_bytes and small.batch < 8
    half = training_outlook(shape, settings, 2 * whole.peak_bytes - 2)
    assert half.fits and half.length == 512 and half.peak_bytes < whole.peak_bytes, "requests keep half of what is idle"
    assert training_outlook(shape, TrainingSettings(memory_gb=1e-3), 2**40).fits is False
