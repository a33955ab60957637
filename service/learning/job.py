"""What the child process does: `python -m service.learning.job`, the job on one line of stdin (see spec).

Messages on stdout are one JSON object a line: cases, texts, progress, candidate, scores, then done, or failed with a
reason; either ends with status 0, anything else is a crash. stdin carries pause and resume; at its end the child exits at
once. Only the main thread touches MLX. Nothing is written to the database: rows are the parent's.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from service.core import Generation, Progress, RedraftError, Score, TrainingFailed
from service.engine.folding import as_served
from service.engine.profile import step_ratios
from service.learning import budget, lora
from service.learning.buffer import GeneralSet, lesson
from service.learning.channel import Channel
from service.learning.dataset import Dataset, Example, build, padded
from service.learning.fitting import fit
from service.learning.loading import (
    kept,
    load_draft,
    load_grammars,
    load_target,
    shared_width,
    target_width,
    training_bytes,
)
from service.learning.masks import answer_masks, usable
from service.learning.rescore import TargetCache, with_targets
from service.learning.rounds import logged
from service.learning.scoring import held_out, score
from service.learning.spec import ScoreJob, TrainJob, parse
from service.learning.trainer import TrainReport
from service.models import vocabulary
from service.models.pair import Loaded
from service.store.artifacts import publish
from service.store.database import Database
from service.store.log.generations import Generations
from service.store.log.training_texts import TrainingTexts
from service.store.registry.runs import Runs
from service.store.replay.buffer import Replay

log = logging.getLogger(__name__)

CANDIDATE = "candidate"
PIECE = 16
"""Generations whose cases are sent in one message."""
CACHE_BYTES = 2**30
"""Freed memory MLX may keep for reuse."""


def run(channel: Channel) -> None:
    """Read the job and do it. Raises RedraftError with the reason when it cannot be done."""
    job = parse(channel.first_line())
    lower_priority(job.training.niceness)
    if mx.default_device().type != mx.cpu:
        # Niceness is the processor's alone.
        channel.share = job.training.gpu_share
    mx.set_cache_limit(CACHE_BYTES)
    database = Database(job.url, read_only=True)
    try:
        if isinstance(job, TrainJob):
            _Training(job, channel, database).run()
        else:
            _score(job, channel, database)
    finally:
        database.close()


class _Training:
    """A `train` job."""

    def __init__(self, job: TrainJob, channel: Channel, database: Database) -> None:
        self.job = job
        self.channel = channel
        self.database = database
        self.general = GeneralSet.load(job.general) if job.general is not None else None
        self.texts: list[tuple[int, ...]] = []
        """What is learnt from."""
        self.kept: list[int] | None = None
        """What the candidate may propose; None: everything."""
        self.grammars = cache(partial(load_grammars, job))

    def run(self) -> None:
        job = self.job
        self._check_current()
        data = self._dataset()
        self._check_budget(data)
        draft = load_draft(job)
        shape = lora.wrap(draft.model, rank=job.training.rank, scale=job.training.scale, seed=job.run)
        if job.parent is not None:
            lora.warm_start(draft.model, shape, job.parent, job.provenance.draft)
        self.kept = self._vocabulary(draft)
        report = self._train(draft.model, data.examples)
        folder, sha256 = self._publish(draft.model, shape)
        counts = lora.counts(draft.model)
        self.channel.send(
            "candidate",
            {
                "folder": str(folder),
                "sha256": sha256,
                "rank": shape.rank,
                "scale": shape.scale,
                "keys": list(shape.keys),
                "trainable": counts.trainable,
                "frozen": counts.frozen,
                "skipped": sum(data.skipped.values()),
                "skipped_batches": report.skipped,
            },
        )
        self._score(draft)

    def _check_current(self) -> None:
        """A run that was given up or started anew must not publish."""
        row = Runs(self.database).get(self.job.run)
        if row.fencing != self.job.fencing or row.state.over:
            raise TrainingFailed(f"run {self.job.run} is no longer this process's: its fencing token changed")

    def _dataset(self) -> Dataset:
        job, who = self.job, self.job.provenance
        old, texts = Replay(self.database), TrainingTexts(self.database)
        fresh = self._with_cases(texts.claimed(job.run), texts.undrafted(job.run))
        earlier = texts.window(who, job.run, job.training.window - len(fresh))
        chosen = lesson(
            old.labelled([*fresh, *earlier]),
            share=job.training.replay,
            general=self.general.generations(who, golden=False) if self.general is not None else [],
            reservoir=lambda count: old.sample(who, count, job.run),
            seed=job.run,
        )
        ids, window = {generation.id for generation in chosen}, {generation.id for generation in earlier}
        replayed = ids - window - {generation.id for generation in fresh}
        self.channel.send("texts", {"window": sorted(ids & window), "replay": sorted(replayed)})
        masks = answer_masks(chosen, self.grammars)
        scored = with_targets(
            chosen,
            cache=TargetCache(job.cache, who.target),
            load_target=lambda: load_target(job),
            masks=masks,
            between=self.channel.hold,
        )
        # Prompts too: answers take up their words.
        self.texts = [(*generation.prompt.tokens, *generation.output) for generation in chosen]
        data = build(
            scored,
            max_length=job.training.max_length,
            reject_weight=job.training.reject_weight,
            vocabulary=shared_width(job),
            masks=masks,
            seed=job.run,
        )
        log.info(
            "%d generations: of %d new ones, %d before them, and replayed ones; skipped %s, windows left out %d",
            len(chosen),
            len(fresh),
            len(earlier),
            data.skipped,
            data.left_out,
        )
        if not data.examples:
            raise TrainingFailed(f"no example to learn from: {data.skipped or 'the run claimed nothing'}")
        return data

    def _with_cases(self, fresh: Sequence[Generation], undrafted: Set[str]) -> list[Generation]:
        """Give undrafted texts the cases that the parent would have left there. Those that cannot be scored have none."""
        job = self.job
        waiting = [generation for generation in fresh if generation.id in undrafted]
        if not waiting:
            return list(fresh)
        draft = load_draft(job)
        if job.parent is not None:
            lora.attach(draft.model, job.parent, job.provenance.draft)
        model, width = as_served(draft.model, kept(job, job.parent)), target_width(job)
        complete: dict[str, Generation] = {}
        for start in range(0, len(waiting), PIECE):
            some = waiting[start : start + PIECE]
            masks = answer_masks(some, self.grammars)
            whole = [g for g in some if g.prompt.tokens and g.targets and g.targets.positions == len(g.output)]
            drafted = logged(
                model,
                usable(whole, masks),
                k=job.k,
                adapter=job.parent_id,
                vocabulary=width,
                tie_margin=job.tie_margin,
                masks=masks,
                between=self.channel.hold,
            )
            cases: dict[str, list[dict[str, object]]] = {generation.id: [] for generation in some}
            cases |= {one.generation.id: [asdict(case) for case in one.generation.cases] for one in drafted}
            self.channel.send("cases", {"cases": cases})
            complete |= {one.generation.id: one.generation for one in drafted}
        return [merged(generation, complete.get(generation.id)) for generation in fresh]

    def _check_budget(self, data: Dataset) -> None:
        job = self.job
        length = padded(max(len(example.tokens) for example in data.examples))
        rows = min(job.training.batch_size, len(data.examples))
        needed = training_bytes(job.target, job.draft, rows=rows, length=length)
        budget.check(needed, least_gb=job.training.memory_gb)

    def _vocabulary(self, draft: Loaded) -> list[int] | None:
        """The parent's list, with what this run learns from moved to its front."""
        held = kept(self.job, self.job.parent)
        return None if held is None else vocabulary.adapted(held, self.texts, sorted(draft.tokenizer.eos_token_ids))

    def _train(self, model: nn.Module, examples: Sequence[Example]) -> TrainReport:
        return fit(
            model,
            examples,
            self.job.training,
            seed=self.job.run,
            on_progress=self._progress,
            hold=self.channel.hold,
        )

    def _progress(self, progress: Progress) -> None:
        self.channel.send("progress", asdict(progress))

    def _publish(self, model: nn.Module, shape: lora.Shape) -> tuple[Path, str]:
        job = self.job
        final = job.out / f"run-{job.run}-{job.fencing}"
        scratch = job.out / f".{final.name}.part"
        shutil.rmtree(scratch, ignore_errors=True)
        who = job.provenance
        lora.save(model, shape, scratch, draft=who.draft, target=who.target, run=job.run, parent=job.parent_id)
        if self.kept is not None:
            vocabulary.write(self.kept, scratch)
        try:
            self._check_current()
            return final, publish(scratch, final)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _score(self, draft: Loaded) -> None:
        job = self.job
        drawn = held_out(Generations(self.database), job.provenance, limit=job.gate.max_prompts, run=job.run)
        masks = answer_masks(drawn, self.grammars)
        logged = usable(drawn, masks)
        golden = self.general.generations(job.provenance, golden=True)[: job.gate.max_prompts] if self.general else []
        width = target_width(job)
        models: dict[str, nn.Module] = {}
        scores: dict[str, list[Score]] = {}
        guard: dict[str, list[Score]] = {}

        def scored(name: str, ids: list[int] | None) -> None:
            models[name] = as_served(draft.model, ids)
            for found, texts in ((scores, logged), (guard, golden)):
                found[name] = score(
                    models[name], texts, k=job.k, vocabulary=width, masks=masks, between=self.channel.hold
                )

        scored(CANDIDATE, self.kept)
        lora.detach(draft.model)
        if job.parent is not None:
            lora.attach(draft.model, job.parent, job.provenance.draft)
        scored(str(job.parent_id), kept(job, job.parent))
        self.channel.hold()
        steps = step_ratios(models)
        self.channel.send("scores", {"scores": _plain(scores), "golden": _plain(guard), "steps": steps})


def _score(job: ScoreJob, channel: Channel, database: Database) -> None:
    """A `score` job."""
    found = Generations(database).by_ids(job.generations)
    masks = answer_masks(found, cache(partial(load_grammars, job)))
    texts = usable([generation for generation in found if generation.output and generation.prompt.tokens], masks)
    draft = load_draft(job)
    scores: dict[str, list[Score]] = {}
    models: dict[str, nn.Module] = {}
    for name, folder in job.adapters.items():
        if folder is not None:
            lora.attach(draft.model, folder, job.provenance.draft)
        models[name] = as_served(draft.model, kept(job, folder))
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
    channel.send("scores", {"scores": _plain(scores), "steps": step_ratios(models)})


def merged(generation: Generation, drafted: Generation | None) -> Generation:
    """With the cases of `drafted` at positions that have none."""
    if drafted is None:
        return generation
    cases = {case.position: case for case in (*drafted.cases, *generation.cases)}
    return replace(generation, cases=tuple(cases[position] for position in sorted(cases)))


def _plain(scores: dict[str, list[Score]]) -> dict[str, list[dict[str, object]]]:
    return {name: [asdict(one) for one in each] for name, each in scores.items()}


def lower_priority(niceness: int) -> None:
    """Make way for serving. On Linux niceness belongs to a thread, and the BLAS started its own before main began."""
    tasks = Path("/proc/self/task")
    for thread in [int(task.name) for task in tasks.iterdir()] if tasks.is_dir() else [0]:
        with suppress(ProcessLookupError):
            # Only downwards: going back up is not for everyone to do.
            os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), niceness))


def perform(channel: Channel) -> None:
    """Run the one job that arrives on the channel and end with a `done` message, or `failed` for a RedraftError."""
    try:
        run(channel)
    except RedraftError as error:
        channel.send("failed", {"reason": str(error)})
    else:
        channel.send("done")


def main() -> int:
    """`perform` the job that arrives on stdin.

    Returns exit status 0 whether it is done or failed; any other exception ends the process.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    perform(Channel.claim())
    return 0


if __name__ == "__main__":
    sys.exit(main())
