"""The memory estimate that decides whether a run may start."""

import mlx.core as mx
import pytest

from service.core import TrainingFailed
from service.learning import loading
from service.models.memory import free_bytes

LLAMA = {
    "hidden_size": 576,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "intermediate_size": 1536,
    "vocab_size": 49_152,
}


def test_the_estimate_grows_with_everything_that_takes_memory() -> None:
    def needed(config: dict[str, int], weights: int = 10**8, rows: int = 8, length: int = 160) -> int:
        return loading.estimate_training_bytes(config, weights=weights, rows=rows, length=length)

    least = needed(LLAMA)
    assert needed(LLAMA, weights=2 * 10**8) == least + 10**8
    assert needed(LLAMA, rows=16) > least
    assert needed(LLAMA, length=512) > least
    for name, value in LLAMA.items():
        assert needed(LLAMA | {name: 2 * value}) > least
    assert needed({}) > least
    nested: dict[str, object] = {"model_type": "qwen3_5", "text_config": LLAMA}
    assert loading.estimate_training_bytes(nested, weights=10**8, rows=8, length=160) == least


def test_a_run_that_does_not_fit_is_refused() -> None:
    loading.check_memory(1, least_gb=0.0)
    with pytest.raises(TrainingFailed, match="GiB are free"):
        loading.check_memory(2**60, least_gb=0.0)
    with pytest.raises(TrainingFailed, match=r"takes 1000000\.0 GiB"):
        loading.check_memory(1, least_gb=1e6)
    loading.check_memory(2**60, least_gb=1e-6)


@pytest.mark.parametrize(("free", "needed", "fits"), [(2**60, 2**59, True), (2**20, 2**21, False)])
def test_a_gpu_s_own_memory_counts_and_not_the_host_s(
    free: int, needed: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is more than any host of the tests has, the second less."""
    assert (free_bytes() < needed) is fits
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: {"free_memory": free})
    if fits:
        loading.check_memory(needed, least_gb=0.0)
    else:
        with pytest.raises(TrainingFailed, match="GiB are free"):
            loading.check_memory(needed, least_gb=0.0)
