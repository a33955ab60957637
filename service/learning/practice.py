"""A `train` job for practice: the target writes text, and the adapter is trained on it (docs/learning.md, "Practice").

Half of the text starts like logged prompts; the other half resembles the text the draft was made from, so that it does
not forget the rest. The target runs in this process, so this text never passes an engine that counts, caches or plans
traffic.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from service.core import Generation, Progress, TrainingFailed
from service.engine.footprint import row_bytes, weight_bytes
from service.learning.channel import Channel
from service.learning.draft_steps import UNROLLED
from service.learning.loading import left_of, load_draft, load_target, plan_run, target_width, training_shape
from service.learning.make.distil import LOGITS_COPIES, Distillation, batches
from service.learning.make.target_text import ANSWER, FORCED, TargetText, write_text
from service.learning.practice_text import Kind, Piece, PracticeText, mixed
from service.learning.recompute import recomputed_blocks
from service.learning.scoring.score import held_out
from service.learning.spec import Practice, TrainJob
from service.learning.texts import as_text
from service.learning.train import Optimiser, TrainReport, train
from service.learning.training_job import Learnt, TrainingJob
from service.models import vocabulary
from service.models.arrays import named_arrays
from service.models.heads import cut, full_head
from service.models.pair import Loaded
from service.models.shipped import OPENINGS
from service.models.training_memory import TrainingShape, training_bytes, with_logits
from service.store.database import Database
from service.store.log.generations import Generations
from service.store.log.sampler import Text
from service.store.log.training_texts import TrainingTexts

log = logging.getLogger(__name__)

LENGTH, TURN = 384, 96
"""Tokens of a practice text, and the maximum of a turn in it."""
MOST_ROWS, MOST_ROWS_CPU = 1024, 48
"""Maximum number of texts written together. On a CPU, more hardly raise the throughput."""
ROWS_A_MINUTE_CPU = 1.6
"""On a CPU, maximum number of texts per minute of the run: texts are written whole, and a short run would overrun its time."""
BATCH, LEAST_BATCH, STEPS = 32, 4, 64
"""Maximum and minimum texts of a training step; steps of a run, if there are enough texts."""
CALL_SECONDS = 0.1
"""Target duration of the calls a training step is split into, unless one text takes longer: a new request waits for one."""
LOGGED_PASSES = 3
"""Number of passes over the logged texts themselves."""
ROWS_ASIDE, BATCH_ASIDE = 256, 8
"""Texts written together and trained together in the memory that a server with practice reserves."""
CUTS, SHORTEST_CUT, LONGEST_OPENING = 4, 0.6, 600
"""Cuts per logged prompt; the smallest fraction of its characters that a cut keeps; maximum characters of an opening."""
LEARNING_RATE, WARMUP = 2e-3, 0.05
FREE_SHARE = 0.5
"""Fraction of the free memory used for writing rows, and for a training step."""
OWN_IDS = 2_048
"""Approximate maximum of ids in a training step's texts that are not in the reduced vocabulary."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of a training step. rows: texts per call. text_seconds: seconds per text. recompute: whether blocks
    recompute their activations."""

    rows: int
    text_seconds: float
    recompute: bool = False


class PracticeJob(TrainingJob):
    """Performs a `train` job with `practice` set."""

    def __init__(self, job: TrainJob, channel: Channel, database: Database) -> None:
        super().__init__(job, channel, database)
        assert job.practice is not None
        self.practice: Practice = job.practice
        self._log = TrainingTexts(database)
        self.seeds = self._log.seeds_of(job.run)
        self._earlier_seeds: dict[tuple[str, ...], list[Text]] = {}
        """The seeds that are still in the log, by the seed ids of an earlier run's practice file."""
        self._learnt_seeds: list[Text] = []
        """Seeds of the earlier runs' practice text that is trained on."""
        self.stored = PracticeText(job.practice.folder, job.provenance.target)
        self._started = time.perf_counter()
        self._paused = 0.0

    def _learn(self) -> Learnt:
        job = self.job
        if not self.seeds:
            raise TrainingFailed("none of the prompts that seed this practice run is in the log any more")
        target = load_target(job)
        dtype = _working_dtype(target.model)
        target.model.set_dtype(dtype)
        draft = load_draft(job, target.model)
        reduced = self._reduced_vocabulary(draft, [(*seed.prompt.tokens, *seed.output) for seed in self.seeds])
        if reduced is not None:
            # The draft only learns what it may propose. Otherwise wide logits would be most of a training step.
            cut(target.model, reduced)
            cut(draft.model, reduced)
        shape = self._wrap(draft.model, job.training.practice_rank)
        loss = Distillation(target.model, dtype, blend=True)
        logged = packed(self.seeds)
        earlier = self._earlier()
        newest = list(islice(earlier, 1))
        width = target_width(job) if reduced is None else len(reduced)
        written, calls = self._write(target, draft.model, loss, len(logged.tokens), width, earlier=bool(newest))
        # Read only now and only as much as is trained on: the disk may hold far more.
        learnt = [*written, *islice(chain(newest, earlier), len(written))]
        # Erasing one of their seeds has to find this adapter as well.
        self._learnt_seeds = self._seeds_of(learnt)
        of_earlier = {seed.id for seed in self._learnt_seeds} - {seed.id for seed in self.seeds}
        self.channel.send("texts", {"window": [], "replay": sorted(of_earlier)})
        text = TargetText.joined([mixed(learnt), *[logged] * LOGGED_PASSES])
        report = self._train(draft.model, text, loss, calls)
        return Learnt(draft, shape, reduced, report)

    def _earlier(self) -> Iterator[Piece]:
        """Practice text of earlier runs, newest first. Skips text whose seed has since been erased or quarantined, and
        text of another length, which another release may have written."""
        for piece in self.stored.pieces(self.job.run):
            if piece.seeds not in self._earlier_seeds:
                self._earlier_seeds[piece.seeds] = self._log.named(piece.seeds)
            whole = len(self._earlier_seeds[piece.seeds]) == len(piece.seeds)
            if whole and piece.text.tokens.shape[1] == LENGTH:
                yield piece

    def _seeds_of(self, learnt: Sequence[Piece]) -> list[Text]:
        """The seeds of those practice texts that earlier runs wrote."""
        return [seed for seeds in {piece.seeds for piece in learnt} for seed in self._earlier_seeds.get(seeds, [])]

    def _held_out(self) -> list[Generation]:
        job = self.job
        return held_out(
            Generations(self.database),
            job.provenance,
            limit=job.gate.max_prompts,
            run=job.run,
            seeds=[*map(as_text, self.seeds), *self._learnt_seeds],
        )

    # ------------------------------------------------------------------------------------------------------- writing

    def _write(
        self, target: Loaded, draft: nn.Module, loss: Distillation, logged: int, width: int, *, earlier: bool
    ) -> tuple[list[Piece], Calls]:
        """Writes practice text of both kinds alternately, at least one file of each, while there is time to train on
        all of it, on the log, and on the same amount of earlier text. Returns it and the calls of the training that
        follows. Each file is stored at once. logged: texts of the log. width: of the trained logits. earlier: whether
        there is text of earlier runs."""
        job = self.job
        rows = writing_rows(target.model, target_width(job), left_of(job.memory), self.practice.minutes)
        openings = {
            Kind.LOG: cuts([seed.prompt.first_user for seed in self.seeds], job.run),
            Kind.GENERAL: general_openings(job),
        }
        own = tuple(seed.id for seed in self.seeds)
        pieces: list[Piece] = []
        calls: Calls | None = None
        number = 0
        while True:
            started = self._elapsed()
            for kind, words in openings.items():
                seed = 2 * (job.run << 16 | number) + (kind is Kind.GENERAL)
                with full_head(target.model):
                    text = write_text(
                        target, rows=rows, length=LENGTH, seed=seed, openings=words, turn=TURN, between=self._hold
                    )
                mx.clear_cache()
                piece = Piece(job.run, kind, text, own if kind is Kind.LOG else ())
                self.stored.save(piece, job.fencing, number)
                pieces.append(piece)
            took = self._elapsed() - started
            calls = calls or self._calls(draft, pieces[0].text, loss, width)
            texts = rows * len(pieces)
            # Each text is accompanied by one of an earlier run.
            learning = calls.text_seconds * (1 + earlier)
            left = self._left() - learning * texts - calls.text_seconds * LOGGED_PASSES * logged
            further = max(int(left / (took + learning * rows * len(openings))), 0)
            self._send_progress(
                Progress(
                    number + 1,
                    number + 1 + further,
                    tokens_per_second=len(openings) * rows * LENGTH / took,
                    seconds_left=self._left(),
                    writing=True,
                )
            )
            if not further:
                return pieces, calls
            number += 1

    # ------------------------------------------------------------------------------------------------------ training

    def _train(self, model: nn.Module, text: TargetText, loss: Distillation, calls: Calls) -> TrainReport:
        """One pass over the text, or as much of it as time allows."""
        texts = len(text.tokens)
        # With fewer texts, steps are smaller.
        size = min(max(texts // STEPS, LEAST_BATCH), BATCH)
        accumulate = max(round(size / calls.rows), 1)
        step = calls.rows * accumulate
        steps = max(min(texts // step, int(self._left() / (step * calls.text_seconds))), 1)
        log.info("%d steps of %d calls over %d texts; %d texts available", steps, accumulate, calls.rows, texts)
        with recomputed_blocks(model, on=calls.recompute):
            return train(
                model,
                islice(batches(text, calls.rows, 1, self.job.run), steps * accumulate),
                loss_fn=loss,
                optimiser=Optimiser(
                    LEARNING_RATE, steps, warmup=WARMUP, clip=self.job.training.clip, accumulate=accumulate
                ),
                on_progress=self._send_progress,
                hold=self._hold,
            )

    def _calls(self, model: nn.Module, text: TargetText, loss: Distillation, width: int) -> Calls:
        """The calls of a training step: as many texts as take CALL_SECONDS and fit into memory, at most BATCH. width:
        of the logits. Raises TrainingOutOfMemory when not even one text fits."""
        job = self.job
        shape = learning_shape(job.target, job.draft, width, job.training.practice_rank)
        # The models are already in memory.
        shape = replace(shape, process=0, weights=0)
        plan = plan_run(shape, int(FREE_SHARE * left_of(job.memory)), batch=BATCH, length=LENGTH, shortest=LENGTH)
        gradient_of = nn.value_and_grad(model, loss)
        most = min(plan.rows, len(text.tokens))
        rows, weights = 1, model.trainable_parameters()
        while True:
            seconds = 0.0
            # The first call of each shape takes longer.
            for batch in islice(batches(text, rows, 2, 0), 2):
                self._hold()
                started = time.perf_counter()
                with recomputed_blocks(model, on=plan.recompute):
                    mx.eval(gradient_of(model, batch))
                model.update(weights)
                seconds = time.perf_counter() - started
            if seconds >= CALL_SECONDS or 2 * rows > most:
                mx.clear_cache()
                return Calls(rows, max(seconds, 1e-3) / rows, plan.recompute)
            rows *= 2

    def _left(self) -> float:
        """Seconds left of the run's minutes."""
        return max(60 * self.practice.minutes - self._elapsed(), 0.0)

    def _hold(self) -> float:
        paused = self.channel.hold()
        self._paused += paused
        return paused

    def _elapsed(self) -> float:
        """Seconds since the start of the job, without pauses."""
        return time.perf_counter() - self._started - self._paused


def cuts(prompts: Sequence[str], seed: int) -> list[str]:
    """Openings of user turns: each prompt cut at CUTS positions, so that the target continues it differently."""
    rng = random.Random(seed)
    return [
        prompt[: max(1, int(len(prompt) * rng.uniform(SHORTEST_CUT, 1.0)))]
        for prompt in (words[:LONGEST_OPENING] for words in prompts)
        for _ in range(CUTS)
    ]


def general_openings(job: TrainJob) -> list[str]:
    """Openings of user turns in general text: those used in the text the draft was made from, if known; otherwise
    empty, and the target starts freely."""
    folders = [job.draft, *([job.general.parent] if job.general is not None else [])]
    found = next((folder / OPENINGS for folder in folders if (folder / OPENINGS).is_file()), None)
    return found.read_text(encoding="utf-8").splitlines() if found is not None else []


def packed(generations: Sequence[Generation]) -> TargetText:
    """Logged texts one after another in rows of LENGTH tokens; a longer text keeps its end. Text that had to follow a
    grammar is left out, because the target alone would have continued differently."""
    texts = [
        ((*one.prompt.tokens, *one.output), [FORCED] * len(one.prompt.tokens) + [ANSWER] * len(one.output))
        for one in generations
        if one.grammar is None
    ]
    tokens = np.array([token for words, _ in texts for token in words[-LENGTH:]], dtype=np.int32)
    role = np.array([each for _, roles in texts for each in roles[-LENGTH:]], dtype=np.uint8)
    rows = -(-len(tokens) // LENGTH)
    spare = rows * LENGTH - len(tokens)
    return TargetText(
        np.pad(tokens, (0, spare)).reshape(rows, LENGTH),
        np.pad(role, (0, spare), constant_values=FORCED).reshape(rows, LENGTH),
        np.zeros(rows),
    )


def practice_bytes(target: nn.Module, folders: tuple[Path, Path], width: int, rank: int) -> int:
    """Bytes that practice needs for a reasonable speed, including a second copy of the target. folders: of target and
    draft. width: of the target's logits. rank: of the adapter."""
    reduced = vocabulary.read(folders[1])
    shape = learning_shape(*folders, width if reduced is None else len(reduced), rank)
    learning = training_bytes(replace(shape, weights=0), rows=BATCH_ASIDE, length=LENGTH, recompute=False, chunk=0)
    return weight_bytes(target) + max(ROWS_ASIDE * _writing_bytes(target, width), learning.total)


def writing_rows(target: nn.Module, width: int, free: int, minutes: float) -> int:
    """Number of texts written together. width: of the logits. free: bytes. minutes: of the run."""
    on_cpu = mx.default_device().type == mx.cpu
    most = min(MOST_ROWS_CPU, int(ROWS_A_MINUTE_CPU * minutes)) if on_cpu else MOST_ROWS
    return max(min(most, int(FREE_SHARE * free / _writing_bytes(target, width))), 1)


def learning_shape(target: Path, draft: Path, width: int, rank: int) -> TrainingShape:
    """The quantities that determine the memory of a training step. width: of the logits, without OWN_IDS. rank: of the
    adapter."""
    shape = training_shape(target, draft, rank=rank, steps=UNROLLED)
    return with_logits(shape, vocabulary=width + OWN_IDS, copies=LOGITS_COPIES)


def _writing_bytes(target: nn.Module, width: int) -> int:
    """Bytes per text being written: its keys and values, and three arrays as wide as the logits."""
    return row_bytes(target, None).of(LENGTH) + 12 * width


def _working_dtype(target: nn.Module) -> mx.Dtype:
    """float32 on a CPU; otherwise the target's type, with bfloat16 instead of float32: several times as fast."""
    if mx.default_device().type == mx.cpu:
        return mx.float32
    dtypes = {array.dtype for _, array in named_arrays(target.parameters())} & {mx.float16, mx.bfloat16, mx.float32}
    return dtypes.pop() if len(dtypes) == 1 and mx.float32 not in dtypes else mx.bfloat16
