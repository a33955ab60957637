"""The report of a round, for streaming and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from service.core import Delta, Round
from service.engine.request import Request


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What a round emitted, by row. rows: in batch order, finished ones included. seconds: duration of the round."""

    rows: tuple[Request, ...]
    deltas: tuple[Delta, ...]
    rounds: tuple[Round, ...]
    seconds: float
