"""The child process: `python -m service.learning.job`, which reads its job from one line of stdin (see `spec`).

Messages on stdout are one JSON object a line: cases, texts, progress, candidate, scores, then done, or failed with a
reason; either ends with status 0, anything else is a crash. stdin carries pause and resume; at its end the child exits at
once. Only the main thread uses MLX. The child writes nothing to the database: rows are the parent's.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from service.core import RedraftError, Score
from service.engine.folding import as_served
from service.engine.profile import step_ratios
from service.learning import lora
from service.learning.channel import Channel
from service.learning.loading import load_draft, load_grammars, serving_vocabulary, target_width
from service.learning.masks import answer_masks, usable
from service.learning.scoring.score import score, scores_message
from service.learning.spec import ScoreJob, TrainJob, parse
from service.learning.training_job import TrainingJob
from service.store.database import Database
from service.store.log.generations import Generations

CACHE_BYTES = 2**30
"""Freed memory MLX may keep for reuse."""


def main() -> int:
    """`perform` the job that arrives on stdin.

    Returns exit status 0 whether it is done or failed; any other exception ends the process.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    perform(Channel.claim())
    return 0


def perform(channel: Channel) -> None:
    """Run the job that arrives on the channel and end with a `done` message, or `failed` for a RedraftError."""
    try:
        run(channel)
    except RedraftError as error:
        channel.send("failed", {"reason": str(error)})
    else:
        channel.send("done")


def run(channel: Channel) -> None:
    """Read the job and do it. Raises RedraftError with the reason when it cannot be done."""
    job = parse(channel.first_line())
    lower_priority(job.training.niceness)
    if mx.default_device().type != mx.cpu:
        # Niceness is about the processor alone.
        channel.share = job.training.gpu_share
    mx.set_cache_limit(CACHE_BYTES)
    database = Database(job.url, read_only=True)
    try:
        if isinstance(job, TrainJob):
            TrainingJob(job, channel, database).run()
        else:
            score_adapters(job, channel, database)
    finally:
        database.close()


def score_adapters(job: ScoreJob, channel: Channel, database: Database) -> None:
    """Do a `score` job: sends scores. Raises RedraftError."""
    found = Generations(database).by_ids(job.generations)
    masks = answer_masks(found, cache(partial(load_grammars, job)))
    texts = usable([generation for generation in found if generation.output and generation.prompt.tokens], masks)
    draft = load_draft(job)
    scores: dict[str, list[Score]] = {}
    models: dict[str, nn.Module] = {}
    for name, folder in job.adapters.items():
        if folder is not None:
            lora.attach(draft.model, folder, job.provenance.draft)
        models[name] = as_served(draft.model, serving_vocabulary(job, folder))
        scores[name] = score(
            models[name],
            texts,
            k=job.k,
            vocabulary=target_width(job),
            masks=masks,
            adapter=int(name),
            between=channel.hold,
        )
        lora.detach(draft.model)
    channel.hold()
    channel.send("scores", {"scores": scores_message(scores), "steps": step_ratios(models)})


def lower_priority(niceness: int) -> None:
    """Set this process's niceness, so that it yields to serving; never less than it has. On Linux that is done for each thread:
    niceness belongs to threads, and the BLAS started its own before main began."""
    tasks = Path("/proc/self/task")
    for thread in [int(task.name) for task in tasks.iterdir()] if tasks.is_dir() else [0]:
        with suppress(ProcessLookupError):
            # Lowering niceness again takes a privilege.
            os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), niceness))


if __name__ == "__main__":
    sys.exit(main())
