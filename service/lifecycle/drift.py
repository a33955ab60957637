"""Whether the traffic has moved away from what the serving draft is good at. Pure functions of values.

A one-sided CUSUM (Page 1954) of each request's acceptance: the share of tested draft tokens that were accepted, standardised by
mean and deviation of the first BASELINE requests of the draft that serves. With z_i = (mean - rate_i) / deviation the sum
S_i = max(0, S_{i-1} + z_i - SLACK) stays near 0 while all is as it was and climbs by about (shift - SLACK) a request once
acceptance has fallen. An alarm takes S >= LIMIT, and a mean since S was last 0 that lies FIRM standard errors below the
baseline's, whose own uncertainty counts: a lucky baseline must not look like drift for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from service.core import Round, Source

BASELINE = 200
"""Requests that the baseline is made of. There is no alarm before."""
MIN_TESTED = 8
"""A request with fewer tested tokens has no rate."""
SLACK = 0.25
"""Half of the shift (in deviations of one request) that is to be found soonest."""
LIMIT = 25.0
FIRM = 3.0
OUTLIER = 3.0
"""Deviations that a single request counts for at most."""
MIN_DEVIATION = 0.02
"""Floor of the deviation: requests may all be alike."""


def rate(rounds: Iterable[Round], adapter: int) -> float | None:
    """Share of the tested tokens of this adapter's own drafts that were accepted; None when too few were tested.

    Tested are the tokens up to and with the first rejection: unlike the share of all drafted ones it depends little on how many
    are drafted at a time (a draft goes on where it is sure, so that of what is tested then somewhat more is accepted)."""
    own = [r for r in rounds if r.adapter == adapter and r.source is Source.DRAFT]
    tested = sum(min(r.drafted, r.accepted + 1) for r in own)
    return sum(r.accepted for r in own) / tested if tested >= MIN_TESTED else None


@dataclass(frozen=True, slots=True)
class Drift:
    """The detector's state for one draft since it was switched in. seen: requests, of which at most BASELINE make `mean` and
    `squares` (sum of squared distances from it). climb: the CUSUM; since: requests, and `fallen` the sum of their z,
    since it was 0."""

    seen: int = 0
    mean: float = 0.0
    squares: float = 0.0
    climb: float = 0.0
    since: int = 0
    fallen: float = 0.0

    def observe(self, rate: float) -> Drift:
        """With one request more."""
        seen = self.seen + 1
        if seen <= BASELINE:
            # Welford 1962.
            mean = self.mean + (rate - self.mean) / seen
            return Drift(seen, mean, self.squares + (rate - self.mean) * (rate - mean))
        z = min(max((self.mean - rate) / self.deviation, -OUTLIER), OUTLIER)
        climb = max(self.climb + z - SLACK, 0.0)
        if climb == 0.0:
            return Drift(seen, self.mean, self.squares)
        return Drift(seen, self.mean, self.squares, climb, self.since + 1, self.fallen + z)

    @property
    def deviation(self) -> float:
        """Standard deviation of one request of the baseline."""
        return max(math.sqrt(self.squares / max(min(self.seen, BASELINE) - 1, 1)), MIN_DEVIATION)

    @property
    def z(self) -> float:
        """How many standard errors the requests since the CUSUM was 0 lie below the baseline."""
        return self.fallen / self.since / math.sqrt(1 / self.since + 1 / BASELINE) if self.since else 0.0

    @property
    def alarm(self) -> bool:
        """Whether the acceptance rate has fallen: the CUSUM has reached LIMIT and `z` has reached FIRM."""
        return self.climb >= LIMIT and self.z >= FIRM


def follow(rates: Iterable[float], drift: Drift | None = None) -> Drift:
    """The state after these requests, oldest first."""
    drift = drift or Drift()
    for value in rates:
        drift = drift.observe(value)
    return drift
