"""`redraft bench train`: our training step against mlx-lm's, on the same draft, LoRA layers, batch and length.

Each measurement runs in a process of its own (`python -m service.evaluation.bench.train`, the task on one line of stdin),
whose peak memory is its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import Adam
from mlx_lm.tuner import trainer as mlx_lm_trainer
from mlx_lm.tuner.callbacks import TrainingCallback

from service.core import TOP_TARGETS, RedraftError, python_command
from service.evaluation.bench.report import Report, ratios, spread
from service.evaluation.progress import OnProgress, silent
from service.learning import lora
from service.learning.batches import Batch, batches
from service.learning.examples import Example
from service.learning.job import CACHE_BYTES
from service.learning.losses import TargetDivergence
from service.learning.train import Optimiser, train
from service.models.pair import load_model, mlx_lm_runs
from service.settings import Settings

OURS, THEIRS = "ours", "mlx_lm"
WARM = 2
"""First steps, which are not counted: kernels are compiled and memory is allocated."""
LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True)
class Task:
    """What one process measures. arm: OURS or THEIRS. draft: folder. steps: counted ones. batch: texts a step. length: input
    tokens of each text. response: output tokens of each, on which the loss is taken."""

    arm: str
    draft: str
    steps: int
    batch: int
    length: int
    response: int
    rank: int
    scale: float


def run_train(
    settings: Settings,
    models: tuple[Path, Path],
    *,
    steps: int = 8,
    turns: int = 3,
    batch: int = 8,
    length: int = 160,
    response: int | None = None,
    on_progress: OnProgress = silent,
) -> Report:
    """Both trainers in turn: tokens per second and peak memory.

    models: folders of target and draft, of which the draft is trained. steps: counted ones of each turn. batch: texts a step.
    length: tokens of each. response: how many of them are output; None: half. Both trainers get batch x length tokens a step,
    which are counted, and take the loss on the response alone: mlx-lm with its own loop, step, loss, optimiser and
    `--mask-prompt`.

    Raises RedraftError for a draft that mlx-lm cannot train, a response that does not fit, and a child that fails.
    """
    response = length // 2 if response is None else response
    if not 0 < response < length:
        raise RedraftError(f"of {length} tokens between 1 and {length - 1} can be response, not {response}")
    if not mlx_lm_runs(models[1]):
        raise RedraftError("mlx-lm cannot train a head that reads hidden states: name another with --draft")
    training = settings.training
    task = Task(OURS, str(models[1]), steps, batch, length, response, training.rank, training.scale)
    rates: dict[str, list[float]] = {OURS: [], THEIRS: []}
    peaks: dict[str, list[float]] = {OURS: [], THEIRS: []}
    for turn in range(turns):
        order = (OURS, THEIRS) if turn % 2 == 0 else (THEIRS, OURS)
        for place, arm in enumerate(order):
            on_progress(arm, 2 * turn + place, 2 * turns)
            found = _measure(replace(task, arm=arm))
            rates[arm].append(batch * length / found["seconds"])
            peaks[arm].append(found["peak_bytes"])
    return _report(task, rates, peaks, turns)


def _report(task: Task, rates: dict[str, list[float]], peaks: dict[str, list[float]], turns: int) -> Report:
    versus = f"{OURS}/{THEIRS}"
    speed_ratio, memory_ratio = (ratios(values, [(OURS, THEIRS)])[versus] for values in (rates, peaks))
    speeds = {arm: spread(values) for arm, values in rates.items()}
    memory = {arm: spread(values) for arm, values in peaks.items()}
    tokens = task.batch * task.length
    response_tokens = task.batch * task.response
    return Report(
        name="train",
        title=f"A training step, {task.batch} x {task.length} tokens, {response_tokens} of them response",
        command=f"redraft bench train --steps {task.steps} --batch {task.batch} --length {task.length} "
        f"--response {task.response}",
        columns=("trainer", "tokens/s (90 %)", "peak memory, GB"),
        rows=(
            *(
                (arm, f"{s.median:.0f} ({s.low:.0f} to {s.high:.0f})", f"{memory[arm].median / 1e9:.2f}")
                for arm, s in speeds.items()
            ),
            (
                f"{OURS} / {THEIRS}",
                *(f"{one.median:.2f} ({one.low:.2f} to {one.high:.2f})" for one in (speed_ratio, memory_ratio)),
            ),
            ("promised", ">= 1.0", "<= 1.0"),
        ),
        plain={
            "arms": {
                arm: {"tokens_per_second": asdict(speeds[arm]), "peak_bytes": asdict(memory[arm])} for arm in rates
            },
            "ratios": {versus: asdict(speed_ratio)},
            "memory_ratios": {versus: asdict(memory_ratio)},
            "settings": asdict(task)
            | {
                "draft": Path(task.draft).name,
                "turns": turns,
                "tokens_per_step": tokens,
                "response_tokens_per_step": response_tokens,
                "peak": "resident set" if mx.default_device().type == mx.cpu else "mx.get_peak_memory",
            },
        },
        bars={
            "tokens/s": {arm: s.median for arm, s in speeds.items()},
            "peak memory, GB": {arm: s.median / 1e9 for arm, s in memory.items()},
        },
    )


def _measure(task: Task) -> dict[str, float]:
    child = subprocess.run(
        python_command("-m", "service.evaluation.bench.train"),
        input=json.dumps(asdict(task)),
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode != 0:
        errors = child.stderr.strip().splitlines()
        raise RedraftError(f"training with {task.arm} failed: {errors[-1] if errors else child.returncode}")
    return json.loads(child.stdout.splitlines()[-1])


# ------------------------------------------------------------------------------------------------ in the child


def perform(task: Task) -> dict[str, float]:
    """Train in this process. Returns seconds, the median of the counted steps, and peak_bytes of this process."""
    model = load_model(Path(task.draft)).model
    lora.wrap(model, rank=task.rank, scale=task.scale, seed=0)
    # Lazy: the graph is built for its output shape and never run.
    width = cast("mx.array", model(mx.zeros((1, 1), dtype=mx.int32))).shape[-1]
    examples = [random_example(seed, width, task) for seed in range(2 * task.batch)]
    mx.reset_peak_memory()
    ends = (_train_ours if task.arm == OURS else _train_theirs)(model, examples, task)
    seconds = np.diff(ends)[WARM - 1 :]
    return {"seconds": float(np.median(seconds)), "peak_bytes": float(_peak())}


def _peak() -> int:
    if mx.default_device().type != mx.cpu:
        return mx.get_peak_memory()
    # Kibibytes on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _train_ours(model: nn.Module, examples: Sequence[Example], task: Task) -> list[float]:
    mx.set_cache_limit(CACHE_BYTES)
    ends: list[float] = []
    steps = WARM + task.steps
    train(
        model,
        islice(_endless(examples, task.batch), steps),
        loss_fn=TargetDivergence(model),
        optimiser=Optimiser(learning_rate=LEARNING_RATE, steps=steps),
        on_progress=lambda progress: ends.append(time.perf_counter()),
    )
    return ends


def _endless(examples: Sequence[Example], size: int) -> Iterator[Batch]:
    seed = 0
    while True:
        yield from batches(examples, size, seed)
        seed += 1


def masked(examples: Sequence[Example], task: Task) -> list[tuple[list[int], int]]:
    """The examples as `mlx_lm.lora --mask-prompt` makes them: token ids, of which the last is only predicted, and the position
    at which the response starts."""
    return [([*example.tokens.tolist(), 1], task.length + 1 - task.response) for example in examples]


class _StepEnds(TrainingCallback):
    """Notes time.perf_counter() at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        self.ends.append(time.perf_counter())


def _train_theirs(model: nn.Module, examples: Sequence[Example], task: Task) -> list[float]:
    ends = _StepEnds()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        mlx_lm_trainer.train(
            model,
            Adam(learning_rate=LEARNING_RATE),
            masked(examples, task),
            args=mlx_lm_trainer.TrainingArgs(
                batch_size=task.batch,
                iters=WARM + task.steps,
                steps_per_report=1,
                # Never: it would save in place during training.
                steps_per_save=10**9,
                max_seq_length=task.length + 1,
                adapter_file=str(Path(folder) / lora.WEIGHTS),
            ),
            training_callback=ends,
        )
    return ends.ends


def random_example(seed: int, width: int, task: Task) -> Example:
    """Random tokens with random target distributions: the cost of a step does not depend on them."""
    rng = np.random.default_rng(seed)
    top = min(TOP_TARGETS, width)
    logprobs = np.log(rng.dirichlet(np.ones(top + 1), size=task.response)).astype(np.float32)
    ids = np.stack([rng.choice(width, top, replace=False) for _ in range(task.response)]).astype(np.int32)
    tokens = rng.integers(0, width, task.length).astype(np.int32)
    return Example(
        tokens,
        task.length - task.response,
        ids,
        logprobs[:, :-1],
        logprobs[:, -1],
    )


if __name__ == "__main__":
    print(json.dumps(perform(Task(**json.loads(sys.stdin.readline())))))
