"""A `train` job: chooses the texts, trains an adapter on them, publishes its folder, scores it and its parent on
held-out texts."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from service.core import BARE_DRAFT, Generation, Progress, Score, TrainingFailed
from service.engine.folding import as_served
from service.engine.profile import step_ratios
from service.learning import lora
from service.learning.batches import batches
from service.learning.channel import Channel
from service.learning.examples import Dataset, Example, build, set_aside
from service.learning.general_set import GeneralSet
from service.learning.loading import (
    free_for_training,
    load_draft,
    load_grammars,
    load_target,
    plan_run,
    serving_vocabulary,
    shared_width,
    target_width,
    training_shape,
)
from service.learning.losses import TargetDivergence
from service.learning.masks import answer_masks, usable
from service.learning.recompute import recomputed_blocks
from service.learning.scoring.budget import RUN_SHARE, token_budget, token_count, within_budget
from service.learning.scoring.score import held_out, score, scores_message
from service.learning.spec import TrainJob
from service.learning.targets import TargetCache, with_targets
from service.learning.texts import training_texts
from service.learning.train import Optimiser, TrainReport, number, train, update_count
from service.models import eagle, vocabulary
from service.models.padding import padded
from service.models.pair import Loaded
from service.models.training_memory import TrainingPlan
from service.settings import TrainingSettings
from service.store.artifacts import folder_name, publish
from service.store.database import Database
from service.store.log.generations import Generations
from service.store.log.training_texts import TrainingTexts
from service.store.registry.runs import Runs
from service.store.replay.buffer import Replay

log = logging.getLogger(__name__)

CANDIDATE = "candidate"


@dataclass(frozen=True, slots=True)
class Learnt:
    """A draft with its trained adapter. vocabulary: the reduced vocabulary it serves with; None: full head. skipped:
    number of unusable texts."""

    draft: Loaded
    shape: lora.Shape
    vocabulary: list[int] | None
    report: TrainReport
    skipped: int = 0


class TrainingJob:
    """Performs a `train` job and reports on it by messages; the parent writes the rows."""

    def __init__(self, job: TrainJob, channel: Channel, database: Database) -> None:
        self.job = job
        self.channel = channel
        self.database = database
        self.general = GeneralSet.load(job.general) if job.general is not None else None
        self.grammars = cache(partial(load_grammars, job))

    def run(self) -> None:
        """Sends texts, progress, candidate and scores. Raises RedraftError."""
        self._check_current()
        learnt = self._learn()
        folder, sha256 = self._publish(learnt.draft.model, learnt.shape, learnt.vocabulary)
        self._send_candidate(folder, sha256, learnt)
        self._score(learnt)

    def _learn(self) -> Learnt:
        data, plan, tokens = self._data()
        draft = load_draft(self.job, needed=plan.peak_bytes)
        shape = self._wrap(draft.model, self.job.training.rank)
        reduced = self._reduced_vocabulary(draft, tokens)
        report = fit_adapter(
            draft.model,
            data.examples,
            self.job.training,
            plan,
            seed=self.job.run,
            on_progress=self._send_progress,
            hold=self.channel.hold,
        )
        if isinstance(draft.model, eagle.Model):
            # Makes room for the features of the texts to be scored.
            draft.model.clear_features()
        return Learnt(draft, shape, reduced, report, skipped=sum(data.skipped.values()))

    def _check_current(self) -> None:
        """A run that was lost or restarted must not publish."""
        row = Runs(self.database).get(self.job.run)
        if row.fencing != self.job.fencing or row.state.over:
            raise TrainingFailed(f"run {self.job.run} no longer belongs to this process: its fencing token has changed")

    def _choose_texts(self) -> list[Generation]:
        """Selects the texts of the run, and reports which of them are in the window and which are replayed."""
        job, provenance = self.job, self.job.provenance
        replay, logged = Replay(self.database), TrainingTexts(self.database)
        claimed = logged.claimed(job.run)
        if job.own_texts_only:
            # No text is left out, so that success clears every one of them.
            again = logged.claimed_again(job.run)
            self.channel.send("texts", {"window": [generation.id for generation in again], "replay": []})
            return [*claimed, *again]
        earlier = logged.window(provenance, job.run, job.window - len(claimed))
        texts = training_texts(
            replay.labelled([*claimed, *earlier]),
            share=job.training.replay,
            general=self.general.generations(provenance, golden=False) if self.general is not None else [],
            reservoir=lambda count: replay.sample(provenance, count, job.run),
            seed=job.run,
        )
        ids, window = {generation.id for generation in texts}, {generation.id for generation in earlier}
        replayed = ids - window - {generation.id for generation in claimed}
        self.channel.send("texts", {"window": sorted(ids & window), "replay": sorted(replayed)})
        log.info(
            "%d generations: of %d new ones, %d earlier ones, and replayed ones", len(texts), len(claimed), len(earlier)
        )
        return texts

    def _data(self) -> tuple[Dataset, TrainingPlan, list[tuple[int, ...]]]:
        """The examples, the plan for training on them, and the tokens of each text, prompt included. The texts
        themselves, with the target's distributions, are not kept during training. Raises TrainingFailed."""
        texts = self._choose_texts()
        data, plan = self._dataset(texts)
        return data, plan, [(*text.prompt.tokens, *text.output) for text in texts]

    def _dataset(self, texts: Sequence[Generation]) -> tuple[Dataset, TrainingPlan]:
        """Examples short enough to fit into memory, and the matching plan."""
        job = self.job
        masks = answer_masks(texts, self.grammars)
        complete = with_targets(
            texts,
            cache=TargetCache(job.cache, job.provenance.target),
            load_target=lambda: (load_target(job).model, target_width(job)),
            masks=masks,
            between=self.channel.hold,
        )
        # The target that computed missing distributions is no longer loaded: free its memory.
        mx.clear_cache()

        def examples(max_length: int) -> Dataset:
            return build(
                complete,
                max_length=max_length,
                vocabulary=shared_width(job),
                masks=masks,
                seed=job.run,
            )

        data = examples(job.training.max_length)
        if not data.examples:
            raise TrainingFailed(f"no example to learn from: {data.skipped or 'the run claimed no text'}")
        plan = self._plan(data)
        if plan.length < data.longest:
            data = examples(plan.length)
        log.info("%d examples; skipped %s, windows left out %d", len(data.examples), data.skipped, data.left_out)
        return data, plan

    def _plan(self, data: Dataset) -> TrainingPlan:
        """How the run computes its steps in the free memory. Raises TrainingOutOfMemory."""
        job = self.job
        shape = training_shape(job.target, job.draft, rank=self._rank(job.training.rank))
        free = free_for_training(job.training, job.memory)
        plan = plan_run(shape, free, batch=job.training.batch_size, length=padded(data.longest))
        log.info("steps of %s; they take %.1f of %.1f GiB", plan, plan.peak_bytes / 2**30, free / 2**30)
        return plan

    def _rank(self, rank: int) -> int:
        """The requested rank, or the parent's if that is higher."""
        job = self.job
        return rank if job.parent is None else max(rank, lora.read(job.parent, job.provenance.draft)[0].rank)

    def _wrap(self, model: nn.Module, rank: int) -> lora.Shape:
        """Adds LoRA of this rank, or of the parent's if that is higher."""
        job = self.job
        shape = lora.wrap(model, rank=self._rank(rank), scale=job.training.scale, seed=job.run)
        if job.parent is not None:
            lora.warm_start(model, shape, job.parent, job.provenance.draft)
        return shape

    def _reduced_vocabulary(self, draft: Loaded, texts: Sequence[Sequence[int]]) -> list[int] | None:
        """The parent's reduced vocabulary with the ids of the training texts moved to the front; None: full head.
        texts: token ids with their prompts, because answers repeat words of these."""
        parent = serving_vocabulary(self.job, self.job.parent)
        if parent is None:
            return None
        return vocabulary.adapted(parent, texts, sorted(draft.tokenizer.eos_token_ids))

    def _send_progress(self, progress: Progress) -> None:
        self.channel.send("progress", asdict(progress))

    def _publish(self, model: nn.Module, shape: lora.Shape, reduced: list[int] | None) -> tuple[Path, str]:
        """Writes the adapter's folder. Returns it and its sha256."""
        job = self.job
        final = job.out / folder_name(job.run, job.fencing)
        scratch = job.out / f".{final.name}.part"
        shutil.rmtree(scratch, ignore_errors=True)
        who = job.provenance
        lora.save(model, shape, scratch, draft=who.draft, target=who.target, run=job.run, parent=job.parent_id)
        if reduced is not None:
            vocabulary.write(reduced, scratch)
        try:
            self._check_current()
            return final, publish(scratch, final)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _send_candidate(self, folder: Path, sha256: str, learnt: Learnt) -> None:
        shape, counts = learnt.shape, lora.counts(learnt.draft.model)
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
                "skipped": learnt.skipped,
                "skipped_batches": learnt.report.skipped,
            },
        )

    def _held_out(self) -> list[Generation]:
        job = self.job
        return held_out(Generations(self.database), job.provenance, limit=job.gate.max_prompts, run=job.run)

    def _score(self, learnt: Learnt) -> None:
        """Scores the candidate, then its parent and the base draft, and sends the scores."""
        job, draft = self.job, learnt.draft
        drawn = self._held_out()
        masks = answer_masks(drawn, self.grammars)
        logged = usable(drawn, masks)
        golden = self.general.generations(job.provenance, golden=True)[: job.gate.max_prompts] if self.general else []
        width = target_width(job)
        models: dict[str, nn.Module] = {CANDIDATE: as_served(draft.model, learnt.vocabulary)}
        scores: dict[str, list[Score]] = {}
        golden_scores: dict[str, list[Score]] = {}
        budget = token_budget(
            models[CANDIDATE],
            logged,
            job.gate,
            adapters=2 if job.parent is None else 3,
            seconds=learnt.report.seconds * RUN_SHARE / (1.0 - RUN_SHARE),
            vocabulary=width,
            between=self.channel.hold,
        )
        # The golden set guards every gate equally, so its texts come first, with at most half of the budget.
        golden = within_budget(golden, budget // 2, seed=0)
        logged = within_budget(logged, budget - sum(map(token_count, golden)), seed=job.run)
        log.info("scoring %d of %d held-out texts, at most %d tokens per adapter", len(logged), len(drawn), budget)

        def score_as(name: str) -> None:
            for found, texts in ((scores, logged), (golden_scores, golden)):
                found[name] = score(
                    models[name], texts, k=job.k, vocabulary=width, masks=masks, between=self.channel.hold
                )

        score_as(CANDIDATE)
        lora.detach(draft.model)
        for name, folder in {str(job.parent_id): job.parent, str(BARE_DRAFT): None}.items():
            if folder is not None:
                lora.attach(draft.model, folder, job.provenance.draft)
            models[name] = as_served(draft.model, serving_vocabulary(job, folder))
            score_as(name)
            lora.detach(draft.model)
        self.channel.hold()
        steps = step_ratios(models)
        self.channel.send(
            "scores", {"scores": scores_message(scores), "golden": scores_message(golden_scores), "steps": steps}
        )


def fit_adapter(
    model: nn.Module,
    examples: Sequence[Example],
    training: TrainingSettings,
    plan: TrainingPlan,
    *,
    seed: int,
    on_progress: Callable[[Progress], None],
    hold: Callable[[], float],
) -> TrainReport:
    """Trains a wrapped model in place with the run's settings. plan: how its steps are computed. hold: called before
    every micro-batch of training and validation, may wait; returns the seconds that do not count as part of the run.
    Raises TrainingFailed."""
    loss = TargetDivergence(model, chunk=plan.chunk)
    learnt, validation = set_aside(examples)
    per_epoch = -(-len(learnt) // training.batch_size)

    def validate() -> float:
        total, weight = 0.0, 0.0
        for batch in batches(validation, plan.rows, seed):
            hold()
            total, weight = total + number(loss(model, batch)) * batch.loss_weight, weight + batch.loss_weight
        return total / weight if weight else 0.0

    with recomputed_blocks(model, on=plan.recompute):
        return train(
            model,
            (batch for epoch in range(training.epochs) for batch in batches(learnt, training.batch_size, seed + epoch)),
            loss_fn=loss,
            optimiser=Optimiser(
                learning_rate=training.learning_rate,
                steps=update_count(per_epoch, training.epochs, training.accumulate),
                warmup=training.warmup,
                clip=training.clip,
                accumulate=training.accumulate,
                epoch=per_epoch,
            ),
            on_progress=on_progress,
            hold=hold,
            validate=validate,
            validate_every=update_count(per_epoch, 1, training.accumulate),
            rows=plan.rows,
        )
