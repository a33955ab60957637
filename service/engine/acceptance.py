"""Acceptance statistics: by position of a proposal, and by the draft's confidence in a token. Recent rounds weigh most."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

PRIOR = 0.8
"""Acceptance rate of drafts before any was verified: rather too high than too low, because what is tried is soon known."""
ROUND_DECAY = 0.98
"""Weight of a round's outcome one round later."""
PRIOR_WEIGHT = 4.0
"""Rounds that the prior counts for."""
BATCH_WEIGHT = 6.0
"""Rounds of a row's own that the rate of all rows counts for."""
BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
"""Bounds between confidences whose acceptance is counted separately."""
TOKEN_DECAY = 0.995
"""Weight of a token's outcome after one more in the same bucket."""
CONFIDENCE_WEIGHT = 8.0
"""Tokens that the draft's own probability counts for."""


class DecayedRate:
    """Share of tested tokens that were accepted. decay: weight of an observation after one more."""

    __slots__ = ("accepted", "decay", "tested")

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.accepted = self.tested = 0.0

    def observe(self, accepted: bool, tested: bool = True) -> None:
        """Count one token. tested: False where none was verified, and older observations only lose weight."""
        self.accepted = self.decay * self.accepted + (tested and accepted)
        self.tested = self.decay * self.tested + tested

    def rate(self, prior: float, weight: float) -> float:
        """The rate, where `prior` counts as `weight` observations."""
        return (self.accepted + weight * prior) / (self.tested + weight)


class Acceptance:
    """Acceptance rate by position: of those where all positions before were accepted. positions: of the longest proposal."""

    def __init__(self, positions: int, prior: float = PRIOR) -> None:
        self.prior = prior
        self._rates = [DecayedRate(ROUND_DECAY) for _ in range(positions)]

    def observe(self, proposed: int, accepted: int) -> None:
        """Count one round. Positions after the first rejection were not tested."""
        for position, rate in enumerate(self._rates):
            rate.observe(position < accepted, tested=position < min(accepted + 1, proposed))

    def rates(self) -> list[float]:
        """By position. The prior of each is the rate of the one before."""
        found, rate = list[float](), self.prior
        for position in self._rates:
            rate = position.rate(rate, PRIOR_WEIGHT)
            found.append(rate)
        return found

    def row_rates(self, batch: Sequence[float]) -> list[float]:
        """By position, for a single row. batch: the rates of all rows lately, the prior of this one's; a position that was
        seldom tested differs from it as much as the position before does."""
        found, ratio = list[float](), 1.0
        for usual, position in zip(batch, self._rates, strict=True):
            rate = position.rate(min(usual * ratio, 1.0), BATCH_WEIGHT)
            ratio = rate / usual
            found.append(rate)
        return found


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Expected tokens of a round, the target's own included, by how many are proposed, from none. rates: as in `Acceptance`."""
    totals, reach = [1.0], 1.0
    for rate in rates:
        reach *= rate
        totals.append(totals[-1] + reach)
    return totals


class Calibration:
    """Acceptance rate of tokens by the draft's confidence: its probability of the token at T = 1."""

    def __init__(self) -> None:
        self._rates = [DecayedRate(TOKEN_DECAY) for _ in range(len(BUCKETS) + 1)]

    def rate(self, confidence: float) -> float:
        """Acceptance rate of tokens of this confidence. Before any was verified, a draft is right somewhat more often than it
        says."""
        return self._rates[bisect(BUCKETS, confidence)].rate(0.2 + 0.78 * confidence, CONFIDENCE_WEIGHT)

    def observe(self, confidence: float, accepted: bool) -> None:
        """Count one verified token."""
        self._rates[bisect(BUCKETS, confidence)].observe(accepted)
