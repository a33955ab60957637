"""`redraft eval stream`: requests replayed in order through the real loop, arm after arm."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from service.core import BARE_DRAFT, BadRequest, Generation, Score, TrainingFailed
from service.engine.adapters import served
from service.evaluation.agreement import paired_low90
from service.evaluation.local_loop import Course, Loop, measured_costs, promote_all
from service.evaluation.target_outputs import greedy_generations
from service.evaluation.training_run import DRAFTED, Step
from service.evaluation.stream_result import LEARNING, ONLINE, STATIC, UNGUARDED, Best, Part, Stream
from service.learning.job import CACHE_BYTES
from service.learning.rounds import logged
from service.learning.scoring import score
from service.lifecycle import gate
from service.models.pair import Pair, load_pair
from service.settings import Settings
from service.store.generations import HELD_OUT, split_of


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
    on_step: Step = lambda stage, done, of: None,
) -> Stream:
    """models: target and draft folders. general: the shipped replay set. window: requests of a moving mean. rows: prompts the
    target answers together. tagged: requests carry their file's domain; otherwise replay has to tell topics apart itself.

    Raises RedraftError.
    """
    mx.set_cache_limit(CACHE_BYTES)
    pair = load_pair(*models)
    assert pair.draft is not None
    asked = [line for part in parts for line in part.lines]
    told = greedy_generations(
        pair,
        asked,
        settings.home,
        max_tokens=max_tokens,
        rows=rows,
        on_step=lambda done, of: on_step("what the target says", done, of),
    )
    if empty := sum(not g.output for g in told):
        raise BadRequest(f"{empty} prompts were answered with nothing", field="files")
    if not tagged:
        told = [replace(g, prompt=replace(g.prompt, domain=None)) for g in told]
    requests: list[list[Generation]] = []
    for part in parts:
        at = sum(map(len, requests))
        requests.append(told[at : at + len(part.lines)])
    topics = {
        topic: [g for part, each in zip(parts, requests, strict=True) if part.topic == topic for g in each]
        for topic in dict.fromkeys(part.topic for part in parts)
    }
    kept = {topic: [g for g in each if split_of(g.prompt.first_user) == HELD_OUT] for topic, each in topics.items()}
    if short := [topic for topic, each in kept.items() if not each]:
        raise BadRequest(f"too few prompts of {short[0]} to hold any out", field="files")
    first = {part.topic: each for part, each in reversed(list(zip(parts, requests, strict=True)))}
    if short := [
        topic for topic, each in first.items() if all(split_of(g.prompt.first_user) == HELD_OUT for g in each)
    ]:
        raise BadRequest(f"too few prompts of {short[0]} at first to learn from", field="files")

    def measured(model: nn.Module) -> dict[str, float]:
        return {topic: _agreement(_scores(pair, model, each)) for topic, each in kept.items()}

    on_step("static", 0, 1)
    bare, plain = served(pair.draft).model, Course()
    for one in logged(bare, told, k=DRAFTED, adapter=BARE_DRAFT, vocabulary=pair.vocabulary):
        plain.add(one)
    static = measured(bare)
    courses, after = {STATIC: plain}, {STATIC: [static] * len(parts)}
    costs = measured_costs(pair)
    forgetful = settings.training.model_copy(update={"replay": 0.0, "window": 0})
    with tempfile.TemporaryDirectory(prefix="redraft-stream-") as scratch:
        for arm in LEARNING:
            course, unguarded = Course(), arm == UNGUARDED
            chosen = settings if arm == ONLINE else settings.model_copy(update={"training": forgetful})
            judge = promote_all if unguarded else gate.judge
            loop = Loop(chosen, pair, models, general, Path(scratch) / arm, costs=costs, judge=judge)
            try:
                for i, each in enumerate(requests):
                    on_step(f"{arm}: {parts[i].topic}", i, len(parts))
                    loop.take(each, course, watched=not unguarded)
                courses[arm], after[arm] = course, [measured(loop.model(adapter)) for adapter in course.serving]
            finally:
                loop.close()
        best: list[Best] = []
        so_far: dict[str, list[Generation]] = {}
        for i, (part, each) in enumerate(zip(parts, requests, strict=True)):
            on_step("best", i, len(parts))
            learnt = so_far.setdefault(part.topic, [])
            learnt += [g for g in each if split_of(g.prompt.first_user) != HELD_OUT]
            whole = settings.training.model_copy(update={"max_generations": len(learnt), "window": 0})
            chosen = settings.model_copy(update={"training": whole})
            loop = Loop(chosen, pair, models, general, Path(scratch) / f"best-{i}", judge=promote_all)
            try:
                best.append(_best(loop, pair, learnt, kept[part.topic]))
            finally:
                loop.close()
    return Stream(tuple(parts), window, courses, best, after)


def _best(loop: Loop, pair: Pair, learnt: Sequence[Generation], kept: Sequence[Generation]) -> Best:
    """On `kept`, after one run on all of these at once, from the bare draft."""
    before = _scores(pair, loop.drafts.model, kept)
    loop.log(learnt)
    run = loop.train()
    if run.adapter is None:
        raise TrainingFailed(run.error or "the run made no adapter")
    after = _scores(pair, loop.model(run.adapter), kept)
    return Best(_agreement(after), _agreement(before), paired_low90(before, after))


def _scores(pair: Pair, model: nn.Module, generations: Sequence[Generation]) -> list[Score]:
    return score(model, generations, k=1, vocabulary=pair.vocabulary)


def _agreement(scores: Sequence[Score]) -> float:
    return sum(one.agreed for one in scores) / sum(one.tokens for one in scores)
