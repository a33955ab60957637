"""How often each position of a proposal is kept, and the tokens that this makes of a round."""

from __future__ import annotations

from collections.abc import Sequence

from service.engine.share import Share

DRAFTED = 0.8
"""Taken for granted of drafts before anything was seen, rather too high than too low, for what is tried is soon known."""
ROUND_MEMORY = 0.98
"""What an observation of acceptance weighs a round later."""
PRIOR_WEIGHT = 4.0
USUAL_WEIGHT = 6.0
"""Rounds of a row's own that what is usual lately counts for: texts differ more than an hour's traffic does, and a row whose
draft fails it is told after a few."""


class Acceptance:
    """How often each position of a proposal is kept, lately."""

    def __init__(self, most: int, prior: float = DRAFTED) -> None:
        self.prior = prior
        self._shares = [Share(ROUND_MEMORY) for _ in range(most)]

    def observe(self, proposed: int, kept: int) -> None:
        """Count one round: the first `kept` of `proposed` tokens were accepted. Positions after a rejection were not tested."""
        for position, share in enumerate(self._shares):
            share.observe(position < kept, tested=position < min(kept + 1, proposed))

    def rates(self) -> list[float]:
        """A position seldom tested is taken to be like the one before."""
        found, rate = list[float](), self.prior
        for share in self._shares:
            rate = share.rate(rate, PRIOR_WEIGHT)
            found.append(rate)
        return found

    def rates_beside(self, usual: Sequence[float]) -> list[float]:
        """Of one row, where others' are so and so. A position seldom tested is taken to differ from what is usual as much as
        the one before."""
        found, differs = list[float](), 1.0
        for mean, share in zip(usual, self._shares, strict=True):
            rate = share.rate(min(mean * differs, 1.0), USUAL_WEIGHT)
            differs = rate / mean
            found.append(rate)
        return found


def expected(rates: Sequence[float]) -> list[float]:
    """Tokens of a round by how many are proposed, from none. rates: how often each position is kept when all before it were."""
    totals, reached = [1.0], 1.0
    for rate in rates:
        reached *= rate
        totals.append(totals[-1] + reached)
    return totals
