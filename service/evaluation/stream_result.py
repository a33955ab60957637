"""What `redraft eval stream` found: traffic whose topic changes, and what the loop makes of it, against drafts that stay as
they are.

Four arms draft the same requests: static, the bare draft; online, the loop; no_replay, the loop whose runs learn from what is
new alone; unguarded, as that, but whatever was trained serves, unproven. Beside them, for each part, stands the best to be had
by its end: one adapter trained at once on all requests on its topic so far, measured on those no run may learn from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.core import BadRequest
from service.evaluation.local_loop import Course
from service.evaluation.prompts import PromptLine, read_prompts

STATIC, ONLINE, NO_REPLAY, UNGUARDED = "static", "online", "no_replay", "unguarded"
LEARNING = (ONLINE, NO_REPLAY, UNGUARDED)
BACK = 0.9
"""Share of a part's best gain that counts as having it back."""


@dataclass(frozen=True, slots=True)
class Part:
    """Requests on one topic, one after another."""

    topic: str
    lines: Sequence[PromptLine]


@dataclass(frozen=True, slots=True)
class Best:
    """agreement: of a part's best on the topic's requests that nobody learns from. static: of the bare draft there. low: of
    what was gained, the lower end of its two-sided 90 % interval over requests."""

    agreement: float
    static: float
    low: float

    @property
    def gain(self) -> float | None:
        """None where it cannot be told from nothing: a share of it would be chance over chance."""
        return self.agreement - self.static if self.low > 0 else None


@dataclass(frozen=True, slots=True)
class Stream:
    """What happened. courses: by arm. best: by part. after: arm -> after each part, agreement on every topic's requests that
    nobody learns from."""

    parts: tuple[Part, ...]
    window: int
    courses: Mapping[str, Course]
    best: Sequence[Best]
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
        for part, best in zip(self.parts, self.best, strict=True):
            here = slice(start, start + len(part.lines))
            gained = [a - b for a, b in zip(course.agreed[here], static.agreed[here], strict=True)]
            moving = _moving(gained, course.tokens[here], self.window)
            whole = range(min(self.window, len(moving)) - 1, len(moving))
            wanted = best.gain
            found.append(next((i + 1 for i in whole if wanted is not None and moving[i] >= BACK * wanted), None))
            start += len(part.lines)
        return found

    def gained(self, arm: str) -> list[float | None]:
        """Share of each part's best gain that the arm had when the part ended, on the requests nobody learns from; None where
        there is none to have."""
        after = [found[part.topic] for found, part in zip(self.after[arm], self.parts, strict=True)]
        return [
            None if best.gain is None else (mine - best.static) / best.gain
            for mine, best in zip(after, self.best, strict=True)
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
        """Column headings of the report, in the order of `cells`."""
        held_out = "held-out: static, best, " + ", ".join(f"{arm} at the end (of the gain)" for arm in LEARNING)
        return ("", *self.courses, held_out, f"requests to {BACK:.0%} of the gain")

    def cells(self) -> tuple[tuple[object, ...], ...]:
        """Agreement by part, over all of it and over its last window; then the arms' sums."""
        means = {arm: self.part_means(arm) for arm in self.courses}
        back = {arm: self.recovered(arm) for arm in LEARNING}
        gained = {arm: self.gained(arm) for arm in LEARNING}
        found: list[tuple[object, ...]] = []
        for i, part in enumerate(self.parts):
            best = self.best[i]
            then = (
                f"{self.after[arm][i][part.topic]:.3f} ({'-' if share is None else format(share, '.0%')})"
                for arm, share in ((arm, each[i]) for arm, each in gained.items())
            )
            when = ", ".join(f"{arm} {'never' if each[i] is None else each[i]}" for arm, each in back.items())
            gain = f"{best.static:.3f}, {best.agreement:.3f} (gains {best.low:+.3f} at least)"
            mine = (f"{means[arm][i][0]:.3f} ({means[arm][i][1]:.3f} at its end)" for arm in self.courses)
            found.append(
                (
                    f"{part.topic}, {len(part.lines)} requests",
                    *mine,
                    ", ".join((gain, *then)),
                    "-" if best.gain is None else when,
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
        """All results by part and by arm, JSON-ready."""
        return {
            "parts": [
                {"topic": part.topic, "requests": len(part.lines), "best": asdict(best)}
                for part, best in zip(self.parts, self.best, strict=True)
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
