"""Acceptance statistics, by position in a proposal and by the draft's confidence in a token. Recent rounds weigh more."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

PRIOR = 0.8
"""Acceptance rate of drafts before any was verified. Better too high than too low, because drafts that are tried are soon
measured."""
ROUND_DECAY = 0.98
"""Factor by which a round's weight decays per round."""
PRIOR_WEIGHT = 4.0
"""Weight of the prior, in rounds."""
BATCH_WEIGHT = 6.0
"""Weight of the rate over all rows in the estimate for one row, in rounds."""
BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
"""Bounds of the confidence buckets whose acceptance is counted separately."""
TOKEN_DECAY = 0.995
"""Factor by which a token's weight decays per further token in the same bucket."""
CONFIDENCE_WEIGHT = 8.0
"""Weight of the draft's probability as a prior, in tokens."""


class DecayedRate:
    """Share of tested tokens that were accepted. decay: factor by which older observations decay per new one."""

    __slots__ = ("accepted", "decay", "tested")

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.accepted = self.tested = 0.0

    def observe(self, accepted: bool, tested: bool = True) -> None:
        """Count one token. tested: False if none was verified; older observations then only decay."""
        self.accepted = self.decay * self.accepted + (tested and accepted)
        self.tested = self.decay * self.tested + tested

    def rate(self, prior: float, weight: float) -> float:
        """The rate, with `prior` weighted as `weight` observations."""
        return (self.accepted + weight * prior) / (self.tested + weight)


class Acceptance:
    """Acceptance rate by position, given that all earlier positions were accepted. positions: maximum length of a proposal."""

    def __init__(self, positions: int, prior: float = PRIOR) -> None:
        self.prior = prior
        self._rates = [DecayedRate(ROUND_DECAY) for _ in range(positions)]

    def observe(self, proposed: int, accepted: int) -> None:
        """Count one round. Positions after the first rejection were not tested."""
        for position, rate in enumerate(self._rates):
            rate.observe(position < accepted, tested=position < min(accepted + 1, proposed))

    def rates(self) -> list[float]:
        """The rates by position. The prior of each is the rate of the position before."""
        found, rate = list[float](), self.prior
        for position in self._rates:
            rate = position.rate(rate, PRIOR_WEIGHT)
            found.append(rate)
        return found

    def row_rates(self, batch: Sequence[float]) -> list[float]:
        """The rates by position for a single row. batch: the recent rates over all rows, used as priors. A rarely tested
        position deviates from its prior by the same ratio as the position before."""
        found, ratio = list[float](), 1.0
        for usual, position in zip(batch, self._rates, strict=True):
            rate = position.rate(min(usual * ratio, 1.0), BATCH_WEIGHT)
            ratio = rate / usual
            found.append(rate)
        return found


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Expected tokens of a round, including the target's token, by the number of proposed tokens from 0 on. rates: as in
    `Acceptance`."""
    totals, reach = [1.0], 1.0
    for rate in rates:
        reach *= rate
        totals.append(totals[-1] + reach)
    return totals


class Calibration:
    """Acceptance rate of tokens by the draft's confidence, which is its probability of the token at T = 1."""

    def __init__(self) -> None:
        self._rates = [DecayedRate(TOKEN_DECAY) for _ in range(len(BUCKETS) + 1)]

    def rate(self, confidence: float) -> float:
        """Acceptance rate of tokens with this confidence. The prior assumes that a draft is right slightly more often than it
        claims."""
        return self._rates[bisect(BUCKETS, confidence)].rate(0.2 + 0.78 * confidence, CONFIDENCE_WEIGHT)

    def observe(self, confidence: float, accepted: bool) -> None:
        """Count one verified token."""
        self._rates[bisect(BUCKETS, confidence)].observe(accepted)
