"""`redraft eval stream`: requests replayed in order through the real loop, arm after arm."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from service.core import BadRequest, Generation, Score
from service.evaluation.agreement import paired_low90
from service.evaluation.courses import Course, Learner, adapted, one_run
from service.evaluation.outputs import greedy_generations
from service.evaluation.run import DRAFTED, Step
from service.evaluation.stream import LEARNING, ONLINE, STATIC, UNGUARDED, Best, Part, Stream
from service.learning import lora
from service.learning.fitting import fit
from service.learning.job import CACHE_BYTES
from service.learning.rounds import logged
from service.learning.scoring import score
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

    def measured(adapter: Path | None) -> dict[str, float]:
        with adapted(draft, adapter, pair.provenance.draft):
            return {topic: _agreement(_scores(pair, each)) for topic, each in kept.items()}

    draft = pair.draft.model
    on_step("static", 0, 1)
    plain = Course()
    for one in logged(draft, told, k=DRAFTED, adapter=0, vocabulary=pair.vocabulary):
        plain.add(one)
    static = measured(None)
    courses, after = {STATIC: plain}, {STATIC: [static] * len(parts)}
    with tempfile.TemporaryDirectory(prefix="redraft-stream-") as scratch:
        for arm in LEARNING:
            folder, course = Path(scratch) / arm, Course()
            learner = Learner(settings, pair, folder, general, forgetful=arm != ONLINE, unguarded=arm == UNGUARDED)
            try:
                for i, each in enumerate(requests):
                    on_step(f"{arm}: {parts[i].topic}", i, len(parts))
                    learner.take(each, course)
            finally:
                learner.close()
            courses[arm], after[arm] = course, [measured(adapter) for adapter in course.serving]
    best: list[Best] = []
    so_far: dict[str, list[Generation]] = {}
    for i, (part, each) in enumerate(zip(parts, requests, strict=True)):
        on_step("best", i, len(parts))
        learnt = so_far.setdefault(part.topic, [])
        learnt += [g for g in each if split_of(g.prompt.first_user) != HELD_OUT]
        best.append(_best(settings, pair, general, learnt, kept[part.topic]))
    return Stream(tuple(parts), window, courses, best, after)


def _best(
    settings: Settings, pair: Pair, general: Path | None, learnt: Sequence[Generation], kept: Sequence[Generation]
) -> Best:
    """On `kept`, after one run on all of these at once, from the bare draft."""
    assert pair.draft is not None
    draft, training = pair.draft.model, settings.training
    before = _scores(pair, kept)
    examples = one_run(settings, pair, general, learnt, seed=1)
    lora.wrap(draft, rank=training.rank, scale=training.scale, seed=1)
    try:
        fit(draft, examples, training, seed=1)
        after = _scores(pair, kept)
    finally:
        lora.detach(draft)
    return Best(_agreement(after), _agreement(before), paired_low90(before, after))


def _scores(pair: Pair, told: Sequence[Generation]) -> list[Score]:
    assert pair.draft is not None
    return score(pair.draft.model, told, k=1, vocabulary=pair.vocabulary)


def _agreement(scores: Sequence[Score]) -> float:
    return sum(one.agreed for one in scores) / sum(one.tokens for one in scores)
