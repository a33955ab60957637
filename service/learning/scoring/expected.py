"""Expected target calls, accepted tokens and speed of speculative decoding over a text with known acceptance rates.

Rounds over acceptance rates a_t (see `acceptance`) are a renewal process, so the expected number of target calls is
computed exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from service.core import Round
from service.engine.costs import USUALLY_HELD, Costs, Load
from service.learning.scoring.acceptance import Acceptance, Doubles

Rates: TypeAlias = Sequence[float] | Doubles


def expected_calls(rates: Rates, k: int) -> float:
    """Expected number of target calls to emit all tokens of `rates`, with draft length `k`.

    A round that starts at t accepts exactly j < k tokens with probability a_t .. a_{t+j-1} (1 - a_{t+j}), and all k
    with probability a_t .. a_{t+k-1}. It emits one token more than it accepts, but never past the end. With r(t) the
    probability that some round starts at t (r(0) = 1), the number of calls is the sum of r.
    """
    return float(_starts(_by_step(rates), [k]).sum())


def calls_by_length(rates: Rates, k: int) -> tuple[float, ...]:
    """expected_calls for draft lengths 1, 2, ... k, computed together."""
    lengths = range(1, k + 1)
    return tuple(_starts(_by_step(rates), lengths).sum(axis=1).tolist()) if lengths else ()


def expected_positions(rates: Rates, k: int) -> tuple[Doubles, Doubles]:
    """Expected number of times each of the k positions of a proposal is tested and accepted, (k,) each. A position is
    tested if all earlier ones were accepted and the text continues."""
    a = _by_step(rates)
    reach = _starts(a, [k])[0]
    tested, accepted = np.zeros(k), np.zeros(k)
    for i in range(k):
        reach = reach[: max(a.shape[1] - i, 0)]
        tested[i] = reach.sum()
        reach = reach * a[min(i, len(a) - 1), i : i + len(reach)]
        accepted[i] = reach.sum()
    return tested, accepted


def expected_accepted(rates: Rates, rounds: Sequence[Round]) -> float:
    """Expected number of accepted draft tokens in these rounds, each with its start and draft length."""
    a = _by_step(rates)
    steps, count = a.shape
    return sum(
        float(np.cumprod([a[min(i - at, steps - 1), i] for i in range(at, min(at + drafted, count))]).sum())
        for at, drafted in ((round.start, round.drafted) for round in rounds)
    )


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast for a draft at draft length k. tokens_per_call: acceptance length. rates: (k,), acceptance rate of each
    position given that all earlier ones were accepted; 0 if it is never tested. tokens_per_second: of all rows
    together; None without costs."""

    k: int
    tokens_per_call: float
    rates: tuple[float, ...]
    tokens_per_second: float | None


def forecast(found: Sequence[Acceptance], k: int, costs: Costs | None = None, rows: int = 1) -> Forecast:
    """Computes a forecast from the acceptance rates of texts with at least one token in total. costs: of target and
    draft on the serving machine. rows: concurrent requests."""
    tokens = sum(one.rates.shape[-1] for one in found)
    per_call = tokens / sum(expected_calls(one.rates, k) for one in found)
    tested, accepted = np.zeros(k), np.zeros(k)
    for one in found:
        of_text = expected_positions(one.rates, k)
        tested, accepted = tested + of_text[0], accepted + of_text[1]
    rates = tuple((accepted / np.maximum(tested, 1e-12)).tolist())
    seconds = None if costs is None else costs.round(Load(rows, USUALLY_HELD), k)
    return Forecast(k, per_call, rates, None if seconds is None else rows * per_call / seconds)


def _by_step(rates: Rates) -> Doubles:
    """(steps, tokens)."""
    return np.atleast_2d(np.asarray(rates, dtype=np.float64))


def _starts(a: Doubles, lengths: Sequence[int]) -> Doubles:
    """r(t), the probability that a round starts at output position t, (lengths, tokens). a: (steps, tokens)."""
    count, longest = a.shape[1], max(lengths)
    # Rates past the end are arbitrary: whatever is accepted there, the request is over.
    past_end = np.pad(a, ((0, 0), (0, longest + 1)))
    # (tokens, longest + 1): the rates of a round that starts at each token.
    ahead = np.stack([past_end[min(i, len(a) - 1), i : i + count] for i in range(longest + 1)], axis=1)
    at_least = np.concatenate([np.ones((count, 1)), np.cumprod(ahead[:, :longest], axis=1)], axis=1)
    # Probability that a round starting at t accepts exactly n tokens: after k of them the proposal ends.
    exactly = np.stack([at_least * np.where(np.arange(longest + 1) == k, 1.0, 1.0 - ahead) for k in lengths])
    for row, k in zip(exactly, lengths, strict=True):
        row[:, k + 1 :] = 0.0
    starts = np.zeros((len(lengths), count + longest + 1))
    starts[:, :1] = 1.0
    for t in range(count):
        starts[:, t + 1 : t + longest + 2] += starts[:, t, None] * exactly[:, t]
    return starts[:, :count]
