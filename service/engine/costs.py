"""What rounds cost, in seconds, by what they are over: a table that was measured, and lines between and beyond."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

USUALLY_HELD = 200
"""Positions that a row is taken to hold where costs are asked for without a batch at hand."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a round is over: so many rows, the longest of which holds so many positions (all rows are read that far). unread:
    tokens of all rows that the draft must read before it can draft. prompted: tokens of prompts that are read for each token
    that may be said."""

    rows: int
    held: int
    unread: int = 0
    prompted: float = 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, as measured: a target call by (rows, tokens of each), a draft step by rows, both over empty rows; and what they
    take more for each position of each row, a target call by its tokens. Between and beyond, lines. read: what the draft takes
    for a token, one of many, that it only reads. asked: by rows, what it takes to hear once how sure the draft is."""

    verify: Mapping[tuple[int, int], float]
    step: Mapping[int, float]
    verify_held: Mapping[int, float]
    step_held: float
    read: float
    asked: Mapping[int, float] = field(default_factory=dict[int, float])

    def call(self, load: Load, tokens: int) -> float:
        """Seconds of one target call over `tokens` tokens of each row."""
        sizes = sorted({size for size, _ in self.verify})
        empty = line({size: line(self._of(size), tokens) for size in sizes}, load.rows)
        return empty + load.rows * load.held * line(self.verify_held, tokens)

    def draft(self, load: Load) -> float:
        """Seconds of one draft step."""
        return line(self.step, load.rows) + load.rows * load.held * self.step_held

    def round(self, load: Load, drafted: int) -> float:
        """Seconds of a round: `drafted` draft steps and one target call over drafted + 1 tokens of each row."""
        return self.call(load, drafted + 1) + (drafted * self.draft(load) if drafted else 0.0)

    def near(self, other: Costs, share: float) -> bool:
        """Whether no call and no step differs by more than so much of itself."""
        pairs = [(self.verify[at], other.verify.get(at, 0.0)) for at in self.verify]
        pairs += [(self.step[size], other.step.get(size, 0.0)) for size in self.step]
        return all(abs(mine - theirs) <= share * mine for mine, theirs in pairs)

    def _of(self, size: int) -> dict[int, float]:
        return {tokens: seconds for (rows, tokens), seconds in self.verify.items() if rows == size}


def line(points: Mapping[int, float], at: int) -> float:
    """Linear between the neighbouring points, and on beyond the ends; a single point is a constant."""
    known = sorted(points)
    if len(known) == 1 or at in points:
        return points.get(at, points[known[0]])
    above = min(max(next((i for i, x in enumerate(known) if x > at), len(known)), 1), len(known) - 1)
    low, high = known[above - 1], known[above]
    return points[low] + (points[high] - points[low]) * (at - low) / (high - low)
