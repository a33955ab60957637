"""Tests of paired differences by random signs (Fisher 1935). If two adapters are equally good, each conversation's
difference is equally likely to have either sign. Given the magnitudes, the sum of the differences then has a known
distribution for any sample size, and no moment has to be estimated. Pure functions of values.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Differences = NDArray[np.float64]

_BISECTIONS = 60
_STRENGTHS = np.linspace(0.0, 5.0, 129)[1:]
"""Betting strengths in the mixture of `e_value`, in units of 1 / RMS of the differences, which is the prior's standard
deviation."""
_PRIOR = np.exp(-(_STRENGTHS**2) / 2) / np.exp(-(_STRENGTHS**2) / 2).sum()


def p_value(differences: Differences) -> float:
    """One-sided p-value of the hypothesis that the differences are not positive: the fraction of all sign assignments
    whose sum is at least the observed one.

    It is computed by a saddlepoint approximation (Lugannani & Rice 1980; Robinson 1982), which stays accurate relative
    to the p-value far into the tail. Tests in an unbounded stream work there, and resampling would need millions of
    draws.
    """
    total, magnitudes = float(differences.sum()), np.abs(differences[differences != 0.0])
    if total <= 0.0:
        return 1.0
    smallest = 0.5 ** len(magnitudes)
    scale = float(magnitudes.max())
    magnitudes, total = magnitudes / scale, total / scale
    if total >= magnitudes.sum() * (1.0 - 1e-9):
        return smallest
    # Continuity correction by half a lattice step: calls are whole numbers for greedy texts, and so are their sums.
    total -= float(magnitudes.min())
    if total <= 0.0:
        return 0.5
    low, high = 0.0, 1.0
    while _mean(magnitudes, high) < total:
        low, high = high, 2.0 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _mean(magnitudes, middle) < total else (low, middle)
    tilt = (low + high) / 2.0
    distance = math.sqrt(max(2.0 * (tilt * total - float(_log_cosh(tilt * magnitudes).sum())), 0.0))
    spread = tilt * math.sqrt(float(((magnitudes / np.cosh(np.minimum(tilt * magnitudes, 300.0))) ** 2).sum()))
    if distance < 1e-4:
        return 0.5
    reach = distance + math.log(spread / distance) / distance if spread > 0.0 else distance
    return min(max(NormalDist().cdf(-reach), smallest), 1.0)


def e_value(differences: Differences) -> float:
    """Evidence that the differences are positive. If they are not, it ever exceeds 1 / alpha with probability at most
    alpha, however often it is checked while data accumulate (Ville's inequality).

    It is the capital from bets on each difference's sign, given its magnitude, averaged over a half-normal prior of the
    betting strength (the normal mixture of Robbins 1970, with the exact moment generating function of a random sign in
    place of its sub-Gaussian bound). The prior's scale comes from the magnitudes seen so far.
    """
    scale = math.sqrt(float((differences**2).mean())) if len(differences) else 0.0
    if scale == 0.0:
        return 1.0
    bets = _STRENGTHS[:, None] * differences / scale
    logs = np.log(_PRIOR) + (bets - _log_cosh(bets)).sum(axis=1)
    largest = float(logs.max())
    # Capped: beyond 1e300 to one the value makes no difference.
    return math.exp(min(largest + math.log(float(np.exp(logs - largest).sum())), 690.0))


def _mean(magnitudes: Differences, tilt: float) -> float:
    """Expected sum when signs are tilted towards plus."""
    return float((magnitudes * np.tanh(tilt * magnitudes)).sum())


def _log_cosh(values: Differences) -> Differences:
    return np.logaddexp(values, -values) - math.log(2.0)
