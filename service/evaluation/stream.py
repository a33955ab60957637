"""`redraft eval stream`: traffic whose topic changes, and what the loop makes of it, against drafts that stay as they are.

Three arms draft the same requests: static, the bare draft; online, the loop; no_replay, the loop whose runs learn from what is
new alone. Beside them, for each part, stands the best to be had by its end: one adapter trained at once on all requests on its
topic so far, measured on those no run may learn from.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from service.core import BadRequest, Generation
from service.evaluation.courses import Course, Learner, adapted, one_run
from service.evaluation.outputs import greedy_generations
from service.evaluation.prompts import PromptLine, read_prompts
from service.evaluation.run import DRAFTED, Step
from service.learning import lora
from service.learning.fitting import fit
from service.learning.job import CACHE_BYTES
from service.learning.rounds import logged
from service.learning.scoring import score
from service.models.pair import Pair, load_pair
from service.settings import Settings
from service.store.generations import HELD_OUT, split_of

STATIC, ONLINE, NO_REPLAY, BEST = "static", "online", "no_replay", "best"
LEARNING = (ONLINE, NO_REPLAY)
BACK = 0.9
"""Share of a part's best gain that counts as having it back."""


@dataclass(frozen=True, slots=True)
class Part:
    """Requests on one topic, one after another."""

    topic: str
    lines: Sequence[PromptLine]


@dataclass(frozen=True, slots=True)
class Stream:
    """What happened. courses: by arm. best: by part, agreement of its best on the topic's requests that nobody learns from, and
    static's there. after: arm -> after each part, agreement on every topic's such requests."""

    parts: tuple[Part, ...]
    window: int
    courses: Mapping[str, Course]
    best: Sequence[tuple[float, float]]
    after: Mapping[str, Sequence[Mapping[str, float]]]

    def moving(self, arm: str) -> list[float]:
        """Agreement over the last `window` requests, by request."""
        course = self.courses[arm]
        return _moving(course.agreed, course.tokens, self.window)

    def part_means(self, arm: str) -> list[tuple[float, float]]:
        """Agreement over each part, and over its last `window` requests."""
        course, found, start = self.courses[arm], list[tuple[float, float]](), 0
        for part in self.parts:
            agreed, tokens = (values[start : start + len(part.lines)] for values in (course.agreed, course.tokens))
            end = slice(-self.window, None)
            found.append((sum(agreed) / sum(tokens), sum(agreed[end]) / sum(tokens[end])))
            start += len(part.lines)
        return found

    def recovered(self, arm: str) -> list[int | None]:
        """Requests into each part after which the arm had `BACK` of its best's gain over static, on the window that ends there;
        None where it never had, or there is none to have."""
        course, static, found, start = self.courses[arm], self.courses[STATIC], list[int | None](), 0
        for part, (best, plain) in zip(self.parts, self.best, strict=True):
            here = slice(start, start + len(part.lines))
            gained = [a - b for a, b in zip(course.agreed[here], static.agreed[here], strict=True)]
            moving = _moving(gained, course.tokens[here], self.window)
            wanted = BACK * (best - plain)
            whole = range(min(self.window, len(moving)) - 1, len(moving))
            found.append(next((i + 1 for i in whole if best > plain and moving[i] >= wanted), None))
            start += len(part.lines)
        return found

    def gained(self, arm: str) -> list[float | None]:
        """Share of each part's best gain that the arm had when the part ended, on the requests nobody learns from; None where
        there is none to have."""
        after = [found[part.topic] for found, part in zip(self.after[arm], self.parts, strict=True)]
        return [
            (mine - plain) / (best - plain) if best > plain else None
            for mine, (best, plain) in zip(after, self.best, strict=True)
        ]

    def backward(self, arm: str) -> float | None:
        """Backward transfer: what agreement on a part's topic changed by from its end to when the topic came back, or to the
        end of the stream, mean over the parts that others followed."""
        topics, after = [part.topic for part in self.parts], self.after[arm]
        changes: list[float] = []
        for i, topic in enumerate(topics):
            until = next((j - 1 for j in range(i + 1, len(topics)) if topics[j] == topic), len(topics) - 1)
            if until > i:
                changes.append(after[until][topic] - after[i][topic])
        return sum(changes) / len(changes) if changes else None

    @property
    def columns(self) -> tuple[str, ...]:
        held_out = "held-out: static, best, " + ", ".join(f"{arm} at the end (of the gain)" for arm in LEARNING)
        return ("", *self.courses, held_out, f"requests to {BACK:.0%} of the gain")

    def cells(self) -> tuple[tuple[object, ...], ...]:
        """Agreement by part, over all of it and over its last window; then the arms' sums."""
        means = {arm: self.part_means(arm) for arm in self.courses}
        back = {arm: self.recovered(arm) for arm in LEARNING}
        gained = {arm: self.gained(arm) for arm in LEARNING}
        found: list[tuple[object, ...]] = []
        for i, part in enumerate(self.parts):
            best, static = self.best[i]
            then = (
                f"{self.after[arm][i][part.topic]:.3f} ({'none' if share is None else format(share, '.0%')})"
                for arm, share in ((arm, each[i]) for arm, each in gained.items())
            )
            when = ", ".join(f"{arm} {'never' if each[i] is None else each[i]}" for arm, each in back.items())
            mine = (f"{means[arm][i][0]:.3f} ({means[arm][i][1]:.3f} at its end)" for arm in self.courses)
            found.append(
                (
                    f"{part.topic}, {len(part.lines)} requests",
                    *mine,
                    ", ".join((f"{static:.3f}, {best:.3f}", *then)),
                    when,
                )
            )
        changes = {arm: self.backward(arm) for arm in self.courses}
        return (
            *found,
            ("backward transfer", *("" if c is None else f"{c:+.3f}" for c in changes.values()), "", ""),
            ("runs (promoted)", *(_runs(course) for course in self.courses.values()), "", ""),
            ("seconds of training", *(f"{course.seconds:.0f}" for course in self.courses.values()), "", ""),
        )

    def plain(self) -> dict[str, Any]:
        return {
            "parts": [
                {"topic": part.topic, "requests": len(part.lines), "best": best, "static": plain}
                for part, (best, plain) in zip(self.parts, self.best, strict=True)
            ],
            "window": self.window,
            "arms": {
                arm: {
                    "parts": [{"agreement": mean, "at_its_end": end} for mean, end in self.part_means(arm)],
                    "recovered_after": self.recovered(arm),
                    "share_of_best_gain": self.gained(arm),
                    "backward_transfer": self.backward(arm),
                    "after": [dict(found) for found in self.after[arm]],
                    "training_seconds": course.seconds,
                    "tokens_per_call": sum(course.tokens) / sum(course.calls),
                    "runs": [
                        {"at": run.at, "promoted": run.promoted, "reason": run.reason, "seconds": run.seconds}
                        for run in course.runs
                    ],
                    "moving": [round(value, 4) for value in self.moving(arm)],
                }
                for arm, course in self.courses.items()
            },
        }


def _moving(values: Sequence[int], tokens: Sequence[int], window: int) -> list[float]:
    """Sums of the last `window` values over those of their tokens."""
    above, below = (np.concatenate([[0], np.cumsum(each)]).astype(np.float64) for each in (values, tokens))
    first: NDArray[np.int64] = np.maximum(np.arange(1, len(above)) - window, 0)
    return ((above[1:] - above[first]) / (below[1:] - below[first])).tolist()


def _runs(course: Course) -> str:
    return f"{len(course.runs)} ({sum(run.promoted for run in course.runs)})"


def parts_of(files: Sequence[str]) -> list[Part]:
    """FILE or FILE:N. A file that is named again goes on where it was left. Raises BadRequest when it has no more."""
    read: dict[str, list[PromptLine]] = {}
    parts: list[Part] = []
    for item in files:
        name, _, count = item.rpartition(":") if item.rpartition(":")[2].isdigit() else (item, "", "")
        if name not in read:
            read[name] = read_prompts(Path(name))
        left = read[name]
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
            return {topic: _agreement(pair, each) for topic, each in kept.items()}

    draft = pair.draft.model
    on_step("static", 0, 1)
    plain = Course()
    for one in logged(draft, told, k=DRAFTED, adapter=0, vocabulary=pair.vocabulary):
        plain.add(one)
    static = measured(None)
    courses, after = {STATIC: plain}, {STATIC: [static] * len(parts)}
    with tempfile.TemporaryDirectory(prefix="redraft-stream-") as scratch:
        for arm in LEARNING:
            learner, course = (
                Learner(settings, pair, Path(scratch) / arm, general, forgetful=arm == NO_REPLAY),
                Course(),
            )
            try:
                for i, each in enumerate(requests):
                    on_step(f"{arm}: {parts[i].topic}", i, len(parts))
                    learner.take(each, course)
            finally:
                learner.close()
            courses[arm], after[arm] = course, [measured(adapter) for adapter in course.serving]
    best: list[tuple[float, float]] = []
    so_far: dict[str, list[Generation]] = {}
    for i, (part, each) in enumerate(zip(parts, requests, strict=True)):
        on_step(BEST, i, len(parts))
        learnt = so_far.setdefault(part.topic, [])
        learnt += [g for g in each if split_of(g.prompt.first_user) != HELD_OUT]
        best.append((_best(settings, pair, general, learnt, kept[part.topic]), static[part.topic]))
    return Stream(tuple(parts), window, courses, best, after)


def _best(
    settings: Settings, pair: Pair, general: Path | None, learnt: Sequence[Generation], kept: Sequence[Generation]
) -> float:
    """Agreement on `kept` after one run on all of these at once, from the bare draft."""
    assert pair.draft is not None
    draft, training = pair.draft.model, settings.training
    examples = one_run(settings, pair, general, learnt, seed=1)
    lora.wrap(draft, rank=training.rank, scale=training.scale, seed=1)
    try:
        fit(draft, examples, training, seed=1)
        return _agreement(pair, kept)
    finally:
        lora.detach(draft)


def _agreement(pair: Pair, told: Sequence[Generation]) -> float:
    assert pair.draft is not None
    scores = score(pair.draft.model, told, k=1, vocabulary=pair.vocabulary)
    return sum(one.agreed for one in scores) / sum(one.tokens for one in scores)
