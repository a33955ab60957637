"""What a training run takes, and what it does where that is not free: pure arithmetic over real models' shapes."""

from dataclasses import replace
from itertools import product

import pytest

from service.models.training_memory import (
    SHORTEST,
    TrainingShape,
    plan_training,
    smallest_plan,
    training_bytes,
    training_seconds,
    with_logits,
)

GIB = 2**30
QWEN3_06B = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151_936,
}
LLAMA_1B = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 128_256,
}


def half(config: dict[str, int], weights: float) -> TrainingShape:
    """In half precision, with the default rank. weights: GiB."""
    return TrainingShape.of(config, weights=int(weights * GIB), value=2, rank=16)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_peak_grows_with_everything_that_takes_memory(recompute: bool) -> None:
    shape = half(QWEN3_06B, 0.3)

    def peak(shape: TrainingShape = shape, rows: int = 4, length: int = 256, chunk: int = 128) -> int:
        return training_bytes(shape, rows=rows, length=length, recompute=recompute, chunk=chunk).total

    assert peak(rows=8) > peak() and peak(length=512) > peak() and peak(chunk=1024) > peak()
    assert peak(replace(shape, weights=shape.weights + GIB)) == peak() + GIB
    for name in (
        "hidden",
        "inner",
        "queries",
        "keys",
        "heads",
        "blocks",
        "vocabulary",
        "value",
        "rank",
        "copies",
        "steps",
    ):
        assert peak(replace(shape, **{name: 2 * getattr(shape, name)})) > peak(), name
    assert peak(replace(shape, recurrent=3, state=2**14)) > peak()
    assert peak(with_logits(shape, vocabulary=shape.vocabulary, copies=16)) > peak(chunk=4 * 256), "all logits at once"
    parts = training_bytes(shape, rows=4, length=256, recompute=recompute, chunk=128)
    assert parts.total == parts.process + parts.weights + parts.adapter + parts.stored + parts.working


def test_recomputed_activations_take_those_of_a_few_blocks() -> None:
    stored, recomputed = (
        training_bytes(half(QWEN3_06B, 0.3), rows=8, length=512, recompute=each, chunk=32) for each in (False, True)
    )
    assert recomputed.stored + recomputed.working < (stored.stored + stored.working) / 6
    assert replace(recomputed, stored=0, working=0) == replace(stored, stored=0, working=0)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"hidden_size": 64}, (64, 256, 64, 64, 16, 12, 2**17)),
        ({"text_config": QWEN3_06B, "model_type": "qwen3_vl"}, (1024, 3072, 2048, 1024, 16, 28, 151_936)),
        (
            QWEN3_06B | {"num_experts_per_tok": 4, "moe_intermediate_size": 512, "num_experts": 64},
            (1024, 2048, 2048, 1024, 16, 28, 151_936),
        ),
    ],
)
def test_shapes_are_read_from_config_files(config: dict[str, object], sizes: tuple[int, ...]) -> None:
    shape = TrainingShape.of(config, weights=0, value=2, rank=16)
    names = ("hidden", "inner", "queries", "keys", "heads", "blocks", "vocabulary")
    assert tuple(getattr(shape, name) for name in names) == sizes
    assert (shape.state, shape.recurrent) == (0, 0)


def test_recurrent_states_are_read_from_config_files() -> None:
    states = {"linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    shape = TrainingShape.of({"text_config": {"num_hidden_layers": 24, **states}}, weights=0, value=2, rank=16)
    assert (shape.state, shape.recurrent) == (16 * 128 * 128, 18)


@pytest.mark.parametrize(
    ("gib", "wanted"),
    [
        (20, (8, 512, False)),
        (14, (8, 512, False)),
        (13, (4, 512, False)),
        (5, (2, 512, False)),
        (3, (1, 512, False)),
        (2.6, (4, 512, True)),
        (1.4, (1, 512, True)),
        (1.25, (1, 256, True)),
        (1.1, None),
    ],
)
def test_a_run_fits_the_memory_that_is_free(gib: float, wanted: tuple[int, int, bool] | None) -> None:
    """First smaller micro-batches, then recomputed activations, then shorter texts, then not at all."""
    plan = plan_training(half(QWEN3_06B, 0.33), int(gib * GIB), batch=8, length=512)
    assert (plan and (plan.rows, plan.length, plan.recompute)) == wanted


MACHINES = (16, 24, 36, 48, 64)


@pytest.mark.parametrize(
    ("config", "weights", "target", "wanted"),
    [
        (QWEN3_06B, 0.33, 5.0, [(4, True), (2, False), (4, False), (4, False), (8, False)]),
        (LLAMA_1B, 0.7, 2.0, [(1, False), (2, False), (4, False), (4, False), (8, False)]),
    ],
)
def test_every_machine_trains_at_full_length_beside_serving(
    config: dict[str, int], weights: float, target: float, wanted: list[tuple[int, bool]]
) -> None:
    """With half of what is left for the device, 0.7 of a Mac's memory, once the 4-bit pair is loaded."""
    shape, found = half(config, weights), list[tuple[int, bool]]()
    for machine in MACHINES:
        free = int(0.9 * GIB * (0.7 * machine - weights - target) / 2)
        plan = plan_training(shape, free, batch=8, length=512)
        assert plan is not None and plan.length == 512 and plan.peak_bytes <= free
        found.append((plan.rows, plan.recompute))
    assert found == wanted


@pytest.mark.parametrize(("name", "batch"), list(product(("qwen", "llama", "head"), (1, 6, 7, 8))))
def test_plans_make_the_same_step_within_what_is_free(name: str, batch: int) -> None:
    shape = half(QWEN3_06B, 0.3) if name == "qwen" else half(LLAMA_1B, 2.3)
    if name == "head":
        shape = replace(shape, blocks=1, steps=3)
    seen: set[tuple[int, int, bool, int]] = set()
    for step in range(80):
        free = int(32 * GIB * 0.92**step)
        plan = plan_training(shape, free, batch=batch, length=500)
        if plan is None:
            assert smallest_plan(shape, batch=batch, length=500).peak_bytes > free
            continue
        assert plan.peak_bytes <= free and plan.rows * plan.micro_batches == batch
        assert SHORTEST <= plan.length <= 500 and not (name == "head" and plan.recompute)
        parts = training_bytes(shape, rows=plan.rows, length=plan.length, recompute=plan.recompute, chunk=plan.chunk)
        assert parts.total == plan.peak_bytes
        seen.add((plan.rows, plan.length, plan.recompute, plan.chunk))
    assert len(seen) > 3


def test_measured_peaks_are_within_what_is_planned() -> None:
    """Of steps in float32 on a CPU (docs/results/memory.md), MiB without weights: layers, rows, length, recomputed, width."""
    measured = {(4, 2, 256, False, 151_936): 408, (8, 2, 256, True, 151_936): 202, (4, 1, 512, False, 4096): 383}
    for (layers, rows, length, recompute, width), mib in measured.items():
        config = QWEN3_06B | {"num_hidden_layers": layers, "vocab_size": width}
        shape = TrainingShape.of(config, weights=0, value=4, rank=16)
        taken = training_bytes(shape, rows=rows, length=length, recompute=recompute, chunk=64)
        planned = (taken.stored + taken.working) / 2**20
        assert mib / 1.05 < planned < 1.3 * mib


def test_a_text_below_the_floor_is_not_made_longer() -> None:
    plan = smallest_plan(half(QWEN3_06B, 0.3), batch=8, length=96)
    assert plan.length == 96


def test_time_follows_tokens_speed_and_recomputation() -> None:
    shape = half(QWEN3_06B, 0.3)

    def seconds(tokens: int = 10**6, tflops: float = 4.0, recompute: bool = False, share: float = 1.0) -> float:
        return training_seconds(shape, tokens, rows=4, length=512, recompute=recompute, tflops=tflops, share=share)

    assert seconds(tokens=2 * 10**6) == pytest.approx(2 * seconds())
    assert seconds(tflops=8.0) == pytest.approx(seconds() / 2)
    assert seconds(share=0.5) == pytest.approx(2 * seconds())
    assert seconds() < seconds(recompute=True) < 1.5 * seconds()
    # 0.44e9 weights in blocks, twice forward and backward, and the head.
    assert seconds() == pytest.approx(10**6 * (4 * 0.44e9 + 4 * 0.156e9) / 2e12, rel=0.15)
    hybrid = replace(shape, recurrent=21, state=2**18)
    slower = [training_seconds(hybrid, 10**6, rows=n, length=512, recompute=True, tflops=4.0) for n in (1, 2, 10**9)]
    assert slower[0] - slower[2] == pytest.approx(2 * (slower[1] - slower[2])) and slower[0] > 2 * slower[2]
