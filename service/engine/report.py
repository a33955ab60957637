"""What a round leaves to tell."""

from __future__ import annotations

from dataclasses import dataclass

from service.core import Delta, Round
from service.engine.request import Request


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What one round did: the new tokens of every row, in the rows' order before finished ones left."""

    rows: tuple[Request, ...]
    deltas: tuple[Delta, ...]
    rounds: tuple[Round, ...]
    seconds: float
