"""The result of `redraft eval stream`: figures by part and arm, as a table and as JSON (terms: docs/results/learning.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.evaluation.local_loop import History
from service.evaluation.prompts import PromptLine

STATIC, ONLINE, NO_REPLAY, UNGUARDED = "static", "online", "no_replay", "unguarded"
LEARNING = (ONLINE, NO_REPLAY, UNGUARDED)
RECOVERED = 0.9
"""Share of a part's best gain from which on the gain counts as recovered."""


@dataclass(frozen=True, slots=True)
class Part:
    """Requests on one topic, one after another."""

    topic: str
    lines: Sequence[PromptLine]


@dataclass(frozen=True, slots=True)
class Best:
    """The best adapter of a part, on its topic's held-out requests.

    agreement: of the adapter. static: of the bare draft. low: lower end of the two-sided 90 % interval of the gain.
    """

    agreement: float
    static: float
    low: float

    @property
    def gain(self) -> float | None:
        """Gain in agreement over the bare draft; None where its interval includes 0: shares of it would be noise."""
        return self.agreement - self.static if self.low > 0 else None


@dataclass(frozen=True, slots=True)
class StreamResult:
    """histories: by arm. best: by part. after: arm -> after each part, agreement on the held-out requests of every topic.
    window: requests of a moving mean."""

    parts: tuple[Part, ...]
    window: int
    histories: Mapping[str, History]
    best: Sequence[Best]
    after: Mapping[str, Sequence[Mapping[str, float]]]

    def moving(self, arm: str) -> list[float]:
        """Agreement over the last `window` requests, by request."""
        history = self.histories[arm]
        return _moving(history.agreed, history.tokens, self.window)

    def part_means(self, arm: str) -> list[tuple[float, float]]:
        """Agreement over each part, and over its last `window` requests."""
        history, found = self.histories[arm], list[tuple[float, float]]()
        for here in self._slices():
            agreed, tokens = history.agreed[here], history.tokens[here]
            end = slice(-self.window, None)
            found.append((sum(agreed) / sum(tokens), sum(agreed[end]) / sum(tokens[end])))
        return found

    def recovered(self, arm: str) -> list[int | None]:
        """Requests into each part until the last window's gain over static was RECOVERED of the best's gain; None where it
        never was, or where the best gains nothing."""
        history, static, found = self.histories[arm], self.histories[STATIC], list[int | None]()
        for here, best in zip(self._slices(), self.best, strict=True):
            gained = [a - b for a, b in zip(history.agreed[here], static.agreed[here], strict=True)]
            moving = _moving(gained, history.tokens[here], self.window)
            complete = range(min(self.window, len(moving)) - 1, len(moving))
            wanted = best.gain
            found.append(
                next((i + 1 for i in complete if wanted is not None and moving[i] >= RECOVERED * wanted), None)
            )
        return found

    def gained(self, arm: str) -> list[float | None]:
        """Share of each part's best gain that the arm had when the part ended, on held-out requests; None where the best gains
        nothing."""
        after = [found[part.topic] for found, part in zip(self.after[arm], self.parts, strict=True)]
        return [
            None if best.gain is None else (mine - best.static) / best.gain
            for mine, best in zip(after, self.best, strict=True)
        ]

    def backward(self, arm: str) -> float | None:
        """Backward transfer: change of agreement on a part's topic from the part's end until the topic came back, or to the end
        of the stream; mean over parts that others followed, None without any."""
        topics, after = [part.topic for part in self.parts], self.after[arm]
        changes: list[float] = []
        for i, topic in enumerate(topics):
            until = next((j - 1 for j in range(i + 1, len(topics)) if topics[j] == topic), len(topics) - 1)
            if until > i:
                changes.append(after[until][topic] - after[i][topic])
        return sum(changes) / len(changes) if changes else None

    @property
    def columns(self) -> tuple[str, ...]:
        """Column headings of the table, in the order of `cells`."""
        held_out = "held-out: static, best, " + ", ".join(f"{arm} at the end (of the gain)" for arm in LEARNING)
        return ("", *self.histories, held_out, f"requests to {RECOVERED:.0%} of the gain")

    def cells(self) -> tuple[tuple[object, ...], ...]:
        """A row for each part, with agreement over all of it and over its last window, then rows of each arm's totals."""
        histories = self.histories.values()
        changes = [self.backward(arm) for arm in self.histories]
        return (
            *self._part_cells(),
            ("backward transfer", *("" if c is None else f"{c:+.3f}" for c in changes), "", ""),
            ("runs (promoted)", *(_runs(history) for history in histories), "", ""),
            ("seconds of training", *(f"{history.seconds:.0f}" for history in histories), "", ""),
        )

    def _part_cells(self) -> list[tuple[object, ...]]:
        means = {arm: self.part_means(arm) for arm in self.histories}
        recovered = {arm: self.recovered(arm) for arm in LEARNING}
        gained = {arm: self.gained(arm) for arm in LEARNING}
        rows: list[tuple[object, ...]] = []
        for i, (part, best) in enumerate(zip(self.parts, self.best, strict=True)):
            agreement = (f"{mean:.3f} ({end:.3f} at its end)" for mean, end in (means[arm][i] for arm in means))
            held_out = [f"{best.static:.3f}, {best.agreement:.3f} (gains {best.low:+.3f} at least)"]
            for arm in LEARNING:
                share = gained[arm][i]
                percent = "-" if share is None else f"{share:.0%}"
                held_out.append(f"{self.after[arm][i][part.topic]:.3f} ({percent})")
            requests = ", ".join(f"{arm} {'never' if at[i] is None else at[i]}" for arm, at in recovered.items())
            name = f"{part.topic}, {len(part.lines)} requests"
            rows.append((name, *agreement, ", ".join(held_out), "-" if best.gain is None else requests))
        return rows

    def plain(self) -> dict[str, Any]:
        """All results by part and by arm, JSON-ready."""
        return {
            "parts": [
                {"topic": part.topic, "requests": len(part.lines), "best": asdict(best)}
                for part, best in zip(self.parts, self.best, strict=True)
            ],
            "window": self.window,
            "arms": {arm: self._plain_arm(arm, history) for arm, history in self.histories.items()},
        }

    def _plain_arm(self, arm: str, history: History) -> dict[str, Any]:
        return {
            "parts": [{"agreement": mean, "at_its_end": end} for mean, end in self.part_means(arm)],
            "recovered_after": self.recovered(arm),
            "share_of_best_gain": self.gained(arm),
            "backward_transfer": self.backward(arm),
            "after": [dict(found) for found in self.after[arm]],
            "training_seconds": history.seconds,
            "tokens_per_call": sum(history.tokens) / sum(history.calls),
            "runs": [
                {"at": run.at, "promoted": run.promoted, "reason": run.reason, "seconds": run.seconds}
                for run in history.runs
            ],
            "moving": [round(value, 4) for value in self.moving(arm)],
        }

    def _slices(self) -> list[slice]:
        """Where each part's requests are in a history."""
        ends = np.cumsum([len(part.lines) for part in self.parts]).tolist()
        return [slice(end - len(part.lines), end) for part, end in zip(self.parts, ends, strict=True)]


def _moving(values: Sequence[int], tokens: Sequence[int], window: int) -> list[float]:
    """Sums of the last `window` values over those of their tokens."""
    above, below = (np.concatenate([[0], np.cumsum(each)]).astype(np.float64) for each in (values, tokens))
    first: NDArray[np.int64] = np.maximum(np.arange(1, len(above)) - window, 0)
    return ((above[1:] - above[first]) / (below[1:] - below[first])).tolist()


def _runs(history: History) -> str:
    return f"{len(history.runs)} ({sum(run.promoted for run in history.runs)})"
