"""The measured gain of the serving adapter over the base draft."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class MeasuredGain:
    """The gain of an adapter over the base draft, measured on answers given since its promotion, none of which it learned from.

    answers: their number, with `tokens` output tokens in total. before, after: acceptance length with the base draft and with
    the adapter, at the longest draft length (tokens per target call, including the target's token). gain: the relative change
    from `before` to `after`, with its two-sided 90 % interval `low90` to `high90`.

    speed_before, speed_after: tokens per second of one request while drafting, each at its best draft length; speed_gain: the
    relative change and its 90 % interval. None if the costs of rounds are not measured.

    realised: tokens per call of the rounds that the adapter drafted in these answers; predicted: the prediction of its scores
    for the same rounds. None if too few rounds can be compared. overstated: the engine certainly accepts less than the scores
    predict. read_to: the newest generation (seq) when it was measured.
    """

    answers: int
    tokens: int
    before: float
    after: float
    gain: float
    low90: float
    high90: float
    speed_before: float | None = None
    speed_after: float | None = None
    speed_gain: tuple[float, float, float] | None = None
    realised: float | None = None
    predicted: float | None = None
    overstated: bool = False
    read_to: int = 0

    @property
    def summary(self) -> str:
        """One line for operators."""
        change = f"{_percent(self.gain)} ({_percent(self.low90)} to {_percent(self.high90)})"
        line = f"{self.before:.2f} → {self.after:.2f} tokens a call, {change}, on {self.answers} answers since its promotion"
        if self.overstated:
            line += f"; overstated: {self.realised:.2f} were realised where {self.predicted:.2f} were predicted"
        return line


def _percent(share: float) -> str:
    return f"{share:+.1%}".replace("%", " %")


@dataclass(frozen=True, slots=True)
class GainsState:
    """adapter: the serving adapter, 0 for the base draft. measured: its newest measurement, made at `measured_at`; None: there
    is none, and `reason` says why."""

    adapter: int
    measured: MeasuredGain | None
    measured_at: datetime | None
    reason: str | None
