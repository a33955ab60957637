"""The child process: `python -m service.learning.job`, which reads one job per line from stdin (see `spec`).

Messages on stdout are one JSON object per line: texts, progress, candidate, scores, then done, or failed with a reason.
After either, it waits for the next job: starting, importing and preparing a GPU take longer than most comparisons.
stdin also carries pause and resume; at its end the child exits at once. Only the main thread uses MLX. The child writes
nothing to the database; the parent writes the rows.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from service.core import RedraftError, Score, TrainingOutOfMemory
from service.engine.folding import as_served
from service.engine.profile import step_ratios
from service.learning import lora
from service.learning.channel import Channel
from service.learning.loading import load_draft, load_grammars, serving_vocabulary, target_width
from service.learning.masks import answer_masks, usable
from service.learning.memory_errors import is_out_of_memory
from service.learning.practice import PracticeJob
from service.learning.scoring.budget import token_budget, within_budget
from service.learning.scoring.score import score, scores_message
from service.learning.spec import ScoreJob, TrainJob, parse
from service.learning.training_job import TrainingJob
from service.store.database import Database
from service.store.log.generations import Generations

log = logging.getLogger(__name__)

CACHE_BYTES = 2**30
"""Freed memory that MLX may keep for reuse."""
LEAST_PRIORITY = 19
"""Niceness of practice."""


def main() -> None:
    """Performs the jobs that arrive on stdin. Any exception other than RedraftError or out of memory ends the process."""
    offer_to_oom_killer()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    channel = Channel.claim()
    for line in channel.jobs():
        perform(channel, line)


def perform(channel: Channel, line: str) -> None:
    """Does one job and ends with a `done` message, or `failed` after a RedraftError or when memory runs out."""
    try:
        waits = run(channel, line)
    except RedraftError as error:
        channel.send("failed", {"reason": str(error), "memory": isinstance(error, TrainingOutOfMemory)})
        return
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        log.exception("out of memory")
        channel.send("failed", {"reason": f"out of memory: {error or type(error).__name__}", "memory": True})
        return
    # Free the job's memory before the next one.
    gc.collect()
    mx.clear_cache()
    channel.send("done", {"waits": waits})


def run(channel: Channel, line: str) -> bool:
    """Does the job described by this line of JSON. Returns whether this process may do another: after practice its
    niceness cannot be lowered again. Raises RedraftError with the reason when the job fails."""
    job = parse(line)
    practises = isinstance(job, TrainJob) and job.practice is not None
    # A new request shares the cores with the call in progress.
    lower_priority(LEAST_PRIORITY if practises else job.training.niceness)
    # Niceness only affects the CPU. Practice pauses for every request, so it does not need throttling.
    throttled = not practises and mx.default_device().type != mx.cpu
    channel.share = job.training.gpu_share if throttled else 1.0
    mx.set_cache_limit(CACHE_BYTES)
    database = Database(job.url, read_only=True)
    try:
        if isinstance(job, TrainJob):
            kind = PracticeJob if practises else TrainingJob
            kind(job, channel, database).run()
        else:
            score_adapters(job, channel, database)
    finally:
        database.close()
    return not practises


def score_adapters(job: ScoreJob, channel: Channel, database: Database) -> None:
    """Does a `score` job and sends the scores. Raises RedraftError."""
    found = Generations(database).by_ids(job.generations)
    masks = answer_masks(found, cache(partial(load_grammars, job)))
    texts = usable([generation for generation in found if generation.output and generation.prompt.tokens], masks)
    draft = load_draft(job)
    budget = token_budget(
        as_served(draft.model, serving_vocabulary(job, None)),
        texts,
        job.gate,
        adapters=len(job.adapters),
        seconds=job.seconds,
        vocabulary=target_width(job),
        between=channel.hold,
    )
    # The same seed at every check, so that later checks include the texts of earlier ones as far as possible.
    texts = within_budget(texts, budget, seed=0)
    log.info("models loaded; scoring %d of %d texts", len(texts), len(job.generations))
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
        log.info("adapter %s scored", name)
    channel.hold()
    channel.send("scores", {"scores": scores_message(scores), "steps": step_ratios(models)})


def offer_to_oom_killer() -> None:
    """On Linux, makes the out-of-memory killer choose this process before the server: its run can be repeated."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def lower_priority(niceness: int) -> None:
    """Sets this process's niceness so that it yields to serving; never below the current value. On Linux it is set for
    each thread: niceness belongs to threads, and the BLAS library started its own before main began."""
    tasks = Path("/proc/self/task")
    for thread in [int(task.name) for task in tasks.iterdir()] if tasks.is_dir() else [0]:
        with suppress(ProcessLookupError):
            # Lowering niceness again requires a privilege.
            os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), niceness))


if __name__ == "__main__":
    main()
