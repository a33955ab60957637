"""The memory estimate that decides whether a run may start."""

import pytest

from service.core import TrainingFailed
from service.learning import loading

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
