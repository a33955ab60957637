"""The level at which the next hypothesis of an unbounded stream is tested: LORD++ (Ramdas, Yang, Wainwright & Jordan 2017).

Before the first discovery all levels sum to at most FIRST: a stream of candidates without any gain leads to a promotion
with at most that probability, under any dependence. Each discovery refills the budget: the expected fraction of false
discoveries stays below SHARE. Pure function of earlier outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence

FIRST = 0.05
"""Probability that a stream without a single true hypothesis leads to any discovery."""
SHARE = 0.10
"""Bound on the expected fraction of false discoveries (false discovery rate)."""
LARGEST = 0.05
"""Upper limit of every level, however full the budget is."""
DECAY = 1.5
"""The part of a budget that is spent j hypotheses after its arrival falls as j ** -DECAY: slowly enough that a clear
gain still passes after a hundred refusals."""
_ZETA = 2.612375348685488
"""Sum of j ** -DECAY over all j."""


def next_level(discoveries: Sequence[bool]) -> float:
    """The level of the next test. discoveries: for each earlier test, oldest first, whether it was a discovery."""
    now = len(discoveries) + 1
    found = [number for number, discovery in enumerate(discoveries, start=1) if discovery]
    level = FIRST * _spent(now)
    for order, number in enumerate(found):
        level += (SHARE - FIRST if order == 0 else SHARE) * _spent(now - number)
    return min(level, LARGEST)


def _spent(age: int) -> float:
    """Fraction of a budget that is spent on the hypothesis `age` tests after the budget arrived."""
    return age**-DECAY / _ZETA
