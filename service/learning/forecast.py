"""What a draft is worth at a draft length, from the acceptance of logged texts and what calls cost: a pure function of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.engine.costs import USUALLY_HELD, Costs, Load
from service.learning.offpolicy import Acceptance, expected_calls, expected_positions


@dataclass(frozen=True, slots=True)
class Forecast:
    """At draft length k. rates: (k,) how often each position of a proposal is kept when all before it were; where none is ever
    tested, 0. tokens_per_second: of all rows together; None without costs."""

    k: int
    tokens_per_call: float
    rates: tuple[float, ...]
    tokens_per_second: float | None


def forecast(found: Sequence[Acceptance], k: int, costs: Costs | None = None, rows: int = 1) -> Forecast:
    """Of texts with at least one token together. costs: of target and draft where the draft would serve, `rows` at a time."""
    load = Load(rows, USUALLY_HELD)
    tokens = sum(one.rates.shape[-1] for one in found)
    per_call = tokens / sum(expected_calls(one.rates, k) for one in found)
    tested, kept = np.zeros(k), np.zeros(k)
    for one in found:
        here = expected_positions(one.rates, k)
        tested, kept = tested + here[0], kept + here[1]
    rates = tuple((kept / np.maximum(tested, 1e-12)).tolist())
    seconds = None if costs is None else costs.round(load, k)
    return Forecast(k, per_call, rates, None if seconds is None else rows * per_call / seconds)
