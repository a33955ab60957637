"""Times the work of `redraft demo` on this machine, each kind once and briefly."""

from __future__ import annotations

import gc
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn

from service.blas import blas_threads, set_blas_threads
from service.core import Generation, Prompt, Sampling, Unavailable, python_command
from service.engine.adapters import served
from service.engine.decoder import Decoder
from service.engine.request import Request
from service.evaluation.oracle import forced_mismatches
from service.evaluation.progress import OnProgress, silent
from service.evaluation.prompts import PromptLine, encode_prompts
from service.learning import lora
from service.learning.batches import collate
from service.learning.examples import build
from service.learning.losses import TargetDivergence
from service.learning.scoring.score import score
from service.learning.train import Optimiser, train
from service.models.pair import Pair, load_pair
from service.settings import TrainingSettings

Result = TypeVar("Result")

START_LIMIT = 600.0
"""Seconds that another Python may take to start."""
STEPS = 2
"""Training steps that are timed, after one that is not."""
STAGE = "measuring this machine"


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """Seconds that each kind of work takes.

    start: another Python with the service imported. load: the pair. served: one answer, prefill included, of several that are
    decoded together without a draft. alone: one answer decoded alone without a draft. checked: a teacher-forced pass of the
    target over one answer and its prompt. scored: the same of the draft. training_step: one step of a full batch on the
    processor cores that a training run gets. tokens: output tokens of an answer (a number, not seconds).
    """

    start: float
    load: float
    served: float
    alone: float
    checked: float
    scored: float
    training_step: float
    tokens: float


def measure_speed(
    models: tuple[Path, Path],
    lines: Sequence[PromptLine],
    *,
    max_tokens: int,
    training: TrainingSettings,
    on_progress: OnProgress = silent,
) -> MachineSpeed:
    """Load the pair, time each kind of work on answers to `lines`, which are decoded together, and free the models.

    models: folders of target and draft. Raises ModelError for models that cannot be loaded, and Unavailable when another Python
    does not start.
    """
    on_progress(STAGE, 0, 3)
    _, start = _timed(_start_python)
    on_progress(STAGE, 1, 3)
    pair, load = _timed(lambda: load_pair(*models))
    on_progress(STAGE, 2, 3)
    try:
        return _measure(pair, lines, max_tokens, training, start=start, load=load)
    finally:
        # The server's process needs the memory.
        del pair
        gc.collect()
        mx.clear_cache()


def _measure(
    pair: Pair, lines: Sequence[PromptLine], max_tokens: int, training: TrainingSettings, *, start: float, load: float
) -> MachineSpeed:
    assert pair.draft is not None
    prompts = [Prompt(tokens, Sampling(max_tokens=max_tokens)) for tokens in encode_prompts(pair, lines)]
    # The first call of a shape allocates, and on some devices compiles.
    _decoded(pair, [replace(prompts[0], sampling=Sampling(max_tokens=2))])
    answers, together = _timed(lambda: _decoded(pair, prompts))
    first, alone = _timed(lambda: _decoded(pair, prompts[:1]))
    tokens = sum(len(answer.output) for answer in answers) / len(answers)
    texts = [(answer.prompt.tokens, answer.output) for answer in answers]
    _, checked = _timed(lambda: forced_mismatches(pair.target.model, texts, pair.vocabulary, tie=0.0))
    draft = served(pair.draft).model
    _, scored = _timed(lambda: score(draft, answers, k=1, vocabulary=pair.vocabulary))
    return MachineSpeed(
        start=start,
        load=load,
        served=together / len(answers),
        alone=alone * tokens / len(first[0].output),
        checked=checked / len(answers),
        scored=scored / len(answers),
        training_step=_training_step(pair.draft.model, answers, training, pair.shared_vocabulary),
        tokens=tokens,
    )


def _decoded(pair: Pair, prompts: Sequence[Prompt]) -> list[Generation]:
    """The target's answers, decoded together, with what a run learns from."""
    decoder = Decoder(pair.target.model, None, vocabulary=pair.vocabulary, k=0, collect=True)
    rows = [Request(str(i), prompt, pair.eos, None) for i, prompt in enumerate(prompts)]
    for row in rows:
        decoder.admit(row)
    while decoder.rows:
        decoder.round()
    return [made for row in rows if (made := row.generation(pair.provenance)) is not None]


def _training_step(
    model: nn.Module, answers: Sequence[Generation], training: TrainingSettings, vocabulary: int
) -> float:
    """Seconds of a step over a full batch of answers like these, on the cores of a training run. Leaves LoRA on the model."""
    lora.wrap(model, rank=training.rank, scale=training.scale, seed=0)
    data = build(answers, max_length=training.max_length, vocabulary=vocabulary)
    batch, loss = collate(data.examples), TargetDivergence(model)

    def steps(count: int) -> None:
        train(model, [batch] * count, loss_fn=loss, optimiser=Optimiser(training.learning_rate, count))

    threads = blas_threads()
    set_blas_threads(training.threads or max((os.cpu_count() or 1) // 2, 1))
    try:
        steps(1)
        _, seconds = _timed(lambda: steps(STEPS))
    finally:
        set_blas_threads(threads)
    return seconds / STEPS * training.batch_size / len(data.examples)


def _start_python() -> None:
    command = python_command("-c", "import service.server, service.learning.job")
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=START_LIMIT)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"another Python does not start: {error}") from error


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What `work` returns, and the seconds that it takes."""
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started
