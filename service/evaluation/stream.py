"""`redraft eval stream`: traffic whose topic changes, drafted arm by arm through the real loop.

Four arms draft the same requests. static: the bare draft. online: the loop. no_replay: the loop, whose runs learn from new
generations alone. unguarded: the same, and every candidate is promoted. Each part is compared with its best: one adapter
trained at once on all requests on its topic so far.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from service.core import BARE_DRAFT, BadRequest, Generation, Score, TrainingFailed
from service.engine.adapters import served
from service.engine.costs import Costs
from service.evaluation.agreement import paired_low90
from service.evaluation.local_loop import History, LocalLoop, measured_costs, promote_all
from service.evaluation.progress import OnProgress, silent
from service.evaluation.prompts import PromptLine, read_prompts
from service.evaluation.stream_result import LEARNING, ONLINE, STATIC, UNGUARDED, Best, Part, StreamResult
from service.evaluation.target_outputs import greedy_generations
from service.evaluation.training_run import DRAFT_LENGTH
from service.learning.job import CACHE_BYTES
from service.learning.scoring.score import score
from service.learning.scoring.simulate import simulate_rounds
from service.lifecycle import gate
from service.models.pair import Pair, load_pair
from service.settings import Settings
from service.store.log.generations import HELD_OUT, split_of

AgreementByTopic = dict[str, float]


def read_parts(files: Sequence[str]) -> list[Part]:
    """Parts of a stream from FILE or FILE:N, the next N prompts of it. A file that is named again continues where it stopped.

    Raises BadRequest when a file has no more prompts, or cannot be read.
    """
    unused = dict[str, list[PromptLine]]()
    parts: list[Part] = []
    for item in files:
        name, _, count = item.rpartition(":") if item.rpartition(":")[2].isdigit() else (item, "", "")
        if name not in unused:
            unused[name] = read_prompts(Path(name))
        left = unused[name]
        lines = left[: int(count)] if count else list(left)
        del left[: len(lines)]
        if not lines:
            raise BadRequest(f"{name} holds no more prompts for {item}", field="files")
        parts.append(Part(Path(name).name.removesuffix(".jsonl").removesuffix(".train"), lines))
    return parts


def run_stream(
    settings: Settings,
    models: tuple[Path, Path],
    general: Path | None,
    parts: Sequence[Part],
    *,
    window: int = 50,
    max_tokens: int = 128,
    rows: int = 16,
    tagged: bool = True,
    on_progress: OnProgress = silent,
) -> StreamResult:
    """Draft the parts, one after another, with every arm.

    models: target and draft folders. general: the shipped replay set. window: requests of a moving mean. rows: prompts the
    target answers together. tagged: requests carry their file's domain; otherwise replay has to tell topics apart itself.

    Raises BadRequest for prompts without an answer and for topics with too few prompts, TrainingFailed when a best adapter
    cannot be trained, and other RedraftErrors of the models' files.
    """
    mx.set_cache_limit(CACHE_BYTES)
    pair = load_pair(*models)
    answers = _answers(settings, pair, parts, max_tokens, rows, on_progress)
    if not tagged:
        answers = [replace(g, prompt=replace(g.prompt, domain=None)) for g in answers]
    traffic = _split(parts, answers)
    experiment = _Experiment(settings, models, general, pair, traffic, measured_costs(pair), on_progress)
    histories, after = experiment.static()
    with tempfile.TemporaryDirectory(prefix="redraft-stream-") as scratch:
        for arm in LEARNING:
            histories[arm], after[arm] = experiment.learning(arm, Path(scratch) / arm)
        best = experiment.best(Path(scratch))
    return StreamResult(tuple(parts), window, histories, best, after)


def _answers(
    settings: Settings, pair: Pair, parts: Sequence[Part], max_tokens: int, rows: int, on_progress: OnProgress
) -> list[Generation]:
    found = greedy_generations(
        pair,
        [line for part in parts for line in part.lines],
        settings.home,
        max_tokens=max_tokens,
        rows=rows,
        on_step=lambda done, of: on_progress("answers of the target", done, of),
    )
    if empty := sum(not g.output for g in found):
        raise BadRequest(f"{empty} prompts were answered with nothing", field="files")
    return found


@dataclass(frozen=True, slots=True)
class _Traffic:
    """requests: by part, in order. held_out: by topic, the requests that no run may learn from."""

    parts: Sequence[Part]
    requests: list[list[Generation]]
    held_out: Mapping[str, list[Generation]]

    def everything(self) -> list[Generation]:
        return [g for each in self.requests for g in each]


def _split(parts: Sequence[Part], answers: Sequence[Generation]) -> _Traffic:
    """The answers by part and topic. Raises BadRequest for a topic with nothing held out, or nothing to learn from at first."""
    requests: list[list[Generation]] = []
    for part in parts:
        start = sum(map(len, requests))
        requests.append(list(answers[start : start + len(part.lines)]))
    held_out: dict[str, list[Generation]] = {}
    first: dict[str, list[Generation]] = {}
    for part, each in zip(parts, requests, strict=True):
        held_out.setdefault(part.topic, []).extend(filter(_is_held_out, each))
        first.setdefault(part.topic, each)
    if short := [topic for topic, each in held_out.items() if not each]:
        raise BadRequest(f"too few prompts of {short[0]} to hold any out", field="files")
    if short := [topic for topic, each in first.items() if all(map(_is_held_out, each))]:
        raise BadRequest(f"too few prompts of {short[0]} at first to learn from", field="files")
    return _Traffic(parts, requests, held_out)


def _is_held_out(generation: Generation) -> bool:
    return split_of(generation.prompt.first_user) == HELD_OUT


@dataclass(frozen=True, slots=True)
class _Experiment:
    """What all arms have in common."""

    settings: Settings
    models: tuple[Path, Path]
    general: Path | None
    pair: Pair
    traffic: _Traffic
    costs: Costs
    on_progress: OnProgress

    def static(self) -> tuple[dict[str, History], dict[str, Sequence[AgreementByTopic]]]:
        """History, and agreement on held-out requests after each part, of the bare draft."""
        self.on_progress("static", 0, 1)
        assert self.pair.draft is not None
        bare, history = served(self.pair.draft).model, History()
        requests = self.traffic.everything()
        for one in simulate_rounds(bare, requests, k=DRAFT_LENGTH, adapter=BARE_DRAFT, vocabulary=self.pair.vocabulary):
            history.add(one)
        return {STATIC: history}, {STATIC: [self._agreement_by_topic(bare)] * len(self.traffic.parts)}

    def learning(self, arm: str, folder: Path) -> tuple[History, Sequence[AgreementByTopic]]:
        """History, and agreement on held-out requests after each part, of an arm that goes through the loop."""
        settings, unguarded = self.settings, arm == UNGUARDED
        if arm != ONLINE:
            new_alone = settings.training.model_copy(update={"replay": 0.0, "window": 0})
            settings = settings.model_copy(update={"training": new_alone})
        history, judge = History(), promote_all if unguarded else gate.judge
        loop = LocalLoop(settings, self.pair, self.models, self.general, folder, costs=self.costs, judge=judge)
        try:
            for i, each in enumerate(self.traffic.requests):
                self.on_progress(f"{arm}: {self.traffic.parts[i].topic}", i, len(self.traffic.parts))
                loop.serve(each, history, watched=not unguarded)
            return history, [self._agreement_by_topic(loop.model(adapter)) for adapter in history.serving]
        finally:
            loop.close()

    def best(self, folder: Path) -> list[Best]:
        """The best of each part. Raises TrainingFailed."""
        found: list[Best] = []
        by_topic: dict[str, list[Generation]] = {}
        for i, (part, each) in enumerate(zip(self.traffic.parts, self.traffic.requests, strict=True)):
            self.on_progress("best", i, len(self.traffic.parts))
            learnt = by_topic.setdefault(part.topic, [])
            learnt += [g for g in each if not _is_held_out(g)]
            found.append(self._best(learnt, self.traffic.held_out[part.topic], folder / f"best-{i}"))
        return found

    def _best(self, learnt: Sequence[Generation], held_out: Sequence[Generation], folder: Path) -> Best:
        """One run on all of `learnt` at once, from the bare draft, measured on `held_out`."""
        everything = self.settings.training.model_copy(update={"max_generations": len(learnt), "window": 0})
        settings = self.settings.model_copy(update={"training": everything})
        loop = LocalLoop(settings, self.pair, self.models, self.general, folder, judge=promote_all)
        try:
            before = self._scores(loop.drafts.model, held_out)
            loop.record(learnt)
            run = loop.train()
            if run.adapter is None:
                raise TrainingFailed(run.error or "the run made no adapter")
            after = self._scores(loop.model(run.adapter), held_out)
        finally:
            loop.close()
        return Best(_agreement(after), _agreement(before), paired_low90(before, after))

    def _agreement_by_topic(self, model: nn.Module) -> AgreementByTopic:
        return {topic: _agreement(self._scores(model, each)) for topic, each in self.traffic.held_out.items()}

    def _scores(self, model: nn.Module, generations: Sequence[Generation]) -> list[Score]:
        return score(model, generations, k=1, vocabulary=self.pair.vocabulary)


def _agreement(scores: Sequence[Score]) -> float:
    return sum(one.agreed for one in scores) / sum(one.tokens for one in scores)
