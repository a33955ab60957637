"""How much faster one way of decoding is than another, from turns in which both decoded the same prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev

from service.lifecycle.comparison import TAIL, student_t

EQUAL = 1.1
"""Two speeds are equal in words when their ratio surely lies between this and its inverse."""


@dataclass(frozen=True, slots=True)
class SpeedRatio:
    """The geometric mean of a speed's ratio to another, turn by turn, and its two-sided 90 % interval (Student's t on
    logarithms)."""

    ratio: float
    low: float
    high: float

    @property
    def noisy(self) -> bool:
        """Whether the interval shows neither which of the two is faster nor that they are equal."""
        return self.low <= 1.0 <= self.high and not (self.low >= 1 / EQUAL and self.high <= EQUAL)

    def plain(self) -> dict[str, float]:
        """All fields by name, JSON-ready."""
        return asdict(self)

    def __str__(self) -> str:
        interval = f"{self.low:.2f} to {self.high:.2f} times"
        if self.noisy:
            return f"cannot be told: {interval}, this machine is too noisy now"
        if self.low <= 1.0 <= self.high:
            return f"as fast: {interval}"
        return f"{self.ratio:.2f} times as fast ({interval})"


def speed_ratio(speeds: Sequence[float], others: Sequence[float]) -> SpeedRatio:
    """`speeds` over `others`, which were measured in the same turns. Raises ValueError for fewer than two turns, or for
    different numbers of them."""
    logs = [math.log(one / other) for one, other in zip(speeds, others, strict=True)]
    if len(logs) < 2:
        raise ValueError(f"{len(logs)} turns give no interval")
    middle = mean(logs)
    reach = student_t(TAIL, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return SpeedRatio(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))
