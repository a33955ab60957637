"""One arm of a stream: the store, the policy, training and gate of the real loop, over texts that are there already.

Decoding is lossless, so what a request would have been answered with does not depend on the draft; what the draft would have
been worth there, and the cases it would have left, one teacher-forced pass tells (learning/rounds.py).
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import mlx.nn as nn

from service.core import (
    BARE_DRAFT,
    AdapterRef,
    Generation,
    RunState,
    Score,
    TrainingFailed,
    TrainingRun,
    Trigger,
    Verdict,
)
from service.evaluation.candidates import register
from service.evaluation.outputs import greedy_generations
from service.evaluation.prompts import PromptLine
from service.evaluation.run import DRAFTED, Step
from service.learning import lora
from service.learning.buffer import GeneralSet, lesson
from service.learning.dataset import Example, build
from service.learning.fitting import fit
from service.learning.rescore import TargetCache, with_targets
from service.learning.rounds import Drafted, logged
from service.learning.scoring import held_out, score
from service.lifecycle import gate, policy
from service.lifecycle.training import RESERVOIR
from service.models.pair import Pair
from service.settings import Settings, sqlite_url
from service.store.adapters import Adapters
from service.store.database import Database, upgrade
from service.store.generations import Generations
from service.store.replay import Replay
from service.store.runs import Runs

BLOCK = 32
"""Requests that are scored together; those behind a switch are scored anew."""


@dataclass(frozen=True, slots=True)
class Run:
    """at: requests answered when it started. seconds: of training and scoring."""

    at: int
    promoted: bool
    reason: str
    seconds: float
    generations: int


@dataclass(slots=True)
class Course:
    """What an arm did. agreed, tokens, calls: by request, in order, at DRAFTED tokens a round. serving: the adapter
    folder after each part of the stream, None for the bare draft."""

    agreed: list[int] = field(default_factory=list[int])
    tokens: list[int] = field(default_factory=list[int])
    calls: list[int] = field(default_factory=list[int])
    runs: list[Run] = field(default_factory=list[Run])
    serving: list[Path | None] = field(default_factory=list["Path | None"])

    def add(self, one: Drafted) -> None:
        """Append one request's counts of agreed tokens, output tokens and target calls."""
        self.agreed.append(one.agreed)
        self.tokens.append(len(one.generation.output))
        self.calls.append(len(one.generation.rounds))

    @property
    def seconds(self) -> float:
        """Seconds of training and scoring, over all runs."""
        return sum(run.seconds for run in self.runs)


class Learner:
    """The loop of one arm, in a folder of its own. forgetful: its runs learn from what is new alone. unguarded: what they made
    serves, whatever the gate says of it. The pair's draft is lent to it: between its calls it is bare."""

    def __init__(
        self,
        settings: Settings,
        pair: Pair,
        folder: Path,
        general: Path | None,
        *,
        forgetful: bool = False,
        unguarded: bool = False,
    ) -> None:
        assert pair.draft is not None
        self.settings = settings
        self.training = settings.training.model_copy(update={"replay": 0.0, "window": 0} if forgetful else {})
        self.unguarded = unguarded
        self.pair = pair
        self.draft: nn.Module = pair.draft.model
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        url = sqlite_url(folder / "redraft.db")
        upgrade(url)
        self.database = Database(url)
        self.generations, self.runs = Generations(self.database), Runs(self.database)
        self.replay, self.adapters = Replay(self.database), Adapters(self.database)
        self.general = GeneralSet.load(general) if general is not None else None
        self.active = BARE_DRAFT
        self.serving: Path | None = None

    def close(self) -> None:
        """Close the database."""
        self.database.close()

    def take(self, requests: Sequence[Generation], course: Course) -> None:
        """Answer requests in order, training whenever the policy says so; a run takes no request's time."""
        at = 0
        while at < len(requests):
            for one in self._drafted(requests[at : at + BLOCK]):
                course.add(one)
                at += 1
                self.generations.add([one.generation]).result()
                if (trigger := self._due()) is not None and self._run(trigger, course):
                    # Those behind it in the block are drafted by another version.
                    break
        course.serving.append(self.serving)

    def _drafted(self, block: Sequence[Generation]) -> list[Drafted]:
        with adapted(self.draft, self.serving, self.pair.provenance.draft):
            return logged(self.draft, block, k=DRAFTED, adapter=self.active, vocabulary=self.pair.vocabulary)

    def _due(self) -> Trigger | None:
        """Without a cool-down: a stream has no clock."""
        latest = self.runs.latest(1)
        found = policy.decide(
            self.generations.counts(self.pair.provenance),
            latest[0] if latest else None,
            datetime.now(UTC),
            min_cases=self.training.min_cases,
            min_tokens=self.training.min_tokens,
            cooldown_seconds=0.0,
        )
        return found if isinstance(found, Trigger) else None

    def _run(self, trigger: Trigger, course: Course) -> bool:
        """Train and judge; whether the candidate serves now."""
        limit = self.training.max_generations
        run = self.runs.claim(trigger=trigger, who=self.pair.provenance, parent=self.active, limit=limit)
        if run is None:
            return False
        begun = time.perf_counter()
        self.runs.move(run.id, run.fencing, RunState.TRAINING)
        try:
            ref = self._train(run)
        except TrainingFailed as error:
            self.runs.move(run.id, run.fencing, RunState.FAILED, error=str(error))
            course.runs.append(Run(len(course.tokens), False, str(error), time.perf_counter() - begun, run.generations))
            return False
        self.runs.move(run.id, run.fencing, RunState.SCORING)
        verdict = self._judged(run, ref.folder)
        self.replay.remember(run.id, RESERVOIR, seed=0)
        if verdict.promoted:
            self.runs.move(run.id, run.fencing, RunState.STAGING)
            self.runs.promote(run.id, run.fencing, ref.id, verdict)
            self.active, self.serving = ref.id, ref.folder
        else:
            self.runs.reject(run.id, run.fencing, ref.id, verdict)
        seconds = time.perf_counter() - begun
        course.runs.append(Run(len(course.tokens), verdict.promoted, verdict.reason, seconds, run.generations))
        return verdict.promoted

    def _train(self, run: TrainingRun) -> AdapterRef:
        """What the child process does up to its candidate, but for the vocabulary: the whole head is scored."""
        who = self.pair.provenance
        fresh = self.generations.claimed(run.id)
        earlier = self.generations.earlier(who, run.id, self.training.window - len(fresh))
        chosen = lesson(
            self.replay.labelled([*fresh, *earlier]),
            share=self.training.replay,
            general=self.general.generations(who, golden=False) if self.general is not None else [],
            reservoir=lambda count: self.replay.sample(who, count, run.id),
            seed=run.id,
        )
        examples = lessons(self.pair, self.settings, chosen)
        shape = lora.wrap(self.draft, rank=self.training.rank, scale=self.training.scale, seed=run.id)
        try:
            if self.serving is not None:
                lora.warm_start(self.draft, shape, self.serving, who.draft)
            fit(self.draft, examples, self.training, seed=run.id)
            return register(self.adapters, run, self.draft, shape, self.folder / "adapters" / f"run-{run.id}", who)
        finally:
            lora.detach(self.draft)

    def _judged(self, run: TrainingRun, candidate: Path) -> Verdict:
        who, rules = self.pair.provenance, self.settings.gate
        logged = held_out(self.generations, who, limit=rules.max_prompts, run=run.id)
        golden = self.general.generations(who, golden=True) if self.general is not None else []
        scores: list[list[Score]] = []
        guard: list[list[Score]] = []
        for folder in (candidate, self.serving):
            with adapted(self.draft, folder, who.draft):
                for found, texts in ((scores, logged), (guard, golden)):
                    found.append(score(self.draft, texts, k=DRAFTED, vocabulary=self.pair.vocabulary))
        verdict = gate.judge(scores[0], scores[1], rules, golden=(guard[0], guard[1]), seed=run.id)
        return replace(verdict, promoted=True) if self.unguarded else verdict


def lessons(pair: Pair, settings: Settings, chosen: Sequence[Generation]) -> list[Example]:
    """Generations as examples, targets made where they lack them. Raises TrainingFailed when there is nothing to learn."""
    told = with_targets(
        chosen,
        cache=TargetCache(settings.home / "targets", pair.provenance.target),
        load_target=lambda: (pair.target.model, pair.vocabulary),
    )
    training = settings.training
    data = build(
        told,
        max_length=training.max_length,
        reject_weight=training.reject_weight,
        vocabulary=pair.shared_vocabulary,
    )
    if not data.examples:
        raise TrainingFailed(f"no example to learn from: {data.skipped}")
    return list(data.examples)


def one_run(
    settings: Settings, pair: Pair, general: Path | None, fresh: Sequence[Generation], seed: int
) -> list[Example]:
    """What a service's first run would learn from: these texts and general ones."""
    training = settings.training
    held = GeneralSet.load(general).generations(pair.provenance, golden=False) if general is not None else []
    return lessons(
        pair, settings, lesson(fresh, share=training.replay, general=held, reservoir=lambda count: [], seed=seed)
    )


def answered(
    settings: Settings, pair: Pair, stage: str, lines: Sequence[PromptLine], max_tokens: int, rows: int, on_step: Step
) -> list[Generation]:
    """The target's greedy answers that are not empty."""
    home = settings.home
    found = greedy_generations(
        pair, lines, home, max_tokens=max_tokens, rows=rows, on_step=lambda done, of: on_step(stage, done, of)
    )
    return [generation for generation in found if generation.output]


@contextmanager
def adapted(draft: nn.Module, folder: Path | None, fingerprint: str) -> Generator[nn.Module]:
    """The bare draft with an adapter (None: as it is) for a while."""
    if folder is not None:
        lora.attach(draft, folder, fingerprint)
    try:
        yield draft
    finally:
        lora.detach(draft)
