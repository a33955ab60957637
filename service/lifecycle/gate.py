"""Whether one adapter drafts better than another, from scores on the same generations. Pure functions of values.

At one fixed draft length a target call costs the same whoever drafted, so the ratio of calls is the ratio of predicted
tokens per second. Intervals are percentile intervals of a paired bootstrap over generations (Efron & Tibshirani 1993,
ch. 13): a resample draws generations with replacement and takes both adapters' calls on them, so what makes one text
easier than another cancels out. They are expanded as Hesterberg (2015, sec. 3.3) has it, because plain ones are too short
where there are few generations, which would let chance decide more often than is said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from service.core import Score, Verdict

MIN_SPEAKERS = 5
"""Fewer generations than this have no interval worth the name."""
TAIL = 0.05
"""What lies beyond either end of a two-sided 90 % interval."""
WORTHWHILE = 0.005
"""A candidate that seems to gain less than this is not worth a swap: what was read ahead with the old draft is lost, and the
next run waits for the watch. It also keeps out candidates that differ from the active one by noise alone."""

Interval = tuple[float, float, float]


def judge(
    candidate: Sequence[Score],
    active: Sequence[Score],
    *,
    min_prompts: int,
    min_tokens: int,
    domain_tolerance: float,
    resamples: int,
    seed: int,
) -> Verdict:
    """Whether `candidate` may replace `active`.

    Promoted when the gain is worth a swap and the lower end of its two-sided 90 % interval above 0, there are at least
    `min_prompts` generations and `min_tokens` tokens, and no domain of five or more generations blocks. A domain does when
    its gain is below -domain_tolerance and surely below 0: its whole interval is, widened for the number of domains, so that
    many of them do not make it likely that one is blocked by chance. Asking for an interval that lies wholly below the
    tolerance would let most of what is twice as bad pass; asking for the gain alone would let a handful of texts decide.
    Raises ValueError when the two lists are not about the same generations at one draft length.
    """
    pairs = paired(candidate, active)
    tokens = sum(score.tokens for score, _ in pairs)
    if not pairs or not tokens:
        return Verdict(False, "nothing to compare on", 0, 0, 0.0, 0.0, 0.0)
    whole = interval(pairs, resamples, seed)
    parts = domains(pairs, resamples, seed)
    surely = domains(pairs, resamples, seed, TAIL / max(len(parts), 1))
    blocked = [name for name in sorted(parts) if parts[name][0] < -domain_tolerance and surely[name][2] < 0]
    if len(pairs) < min_prompts:
        promoted, reason = False, f"{len(pairs)} of {min_prompts} prompts"
    elif tokens < min_tokens:
        promoted, reason = False, f"{tokens} of {min_tokens} tokens"
    elif whole[1] <= 0:
        promoted, reason = False, f"not proven better: {told(whole)}"
    elif whole[0] < WORTHWHILE:
        promoted, reason = False, f"too little better: {told(whole)}"
    elif blocked:
        promoted, reason = False, f"worse on {', '.join(blocked)}: {told(parts[blocked[0]])}"
    else:
        promoted, reason = True, f"better: {told(whole)}"
    return Verdict(promoted, reason, len(pairs), tokens, *whole, domains=parts)


def paired(new: Sequence[Score], old: Sequence[Score]) -> list[tuple[Score, Score]]:
    """Both scores of every generation, in the order of the ids. Raises ValueError when they do not match."""
    ours, theirs = {score.generation: score for score in new}, {score.generation: score for score in old}
    if len(ours) != len(new) or len(theirs) != len(old):
        raise ValueError("a generation was scored twice")
    if ours.keys() != theirs.keys():
        raise ValueError("the two adapters were scored on different generations")
    pairs = [(ours[name], theirs[name]) for name in sorted(ours)]
    if len({score.k for pair in pairs for score in pair}) > 1:
        raise ValueError("scores at different draft lengths do not compare")
    for one, other in pairs:
        if (one.tokens, one.domain) != (other.tokens, other.domain):
            raise ValueError(f"generation {one.generation} was scored as two different texts")
        for score in (one, other):
            if score.tokens < 0 or not math.isfinite(score.calls) or score.calls <= 0:
                raise ValueError(f"generation {score.generation} has no usable score")
    return pairs


def interval(pairs: Sequence[tuple[Score, Score]], resamples: int, seed: int, tail: float = TAIL) -> Interval:
    """Gain and the ends of its two-sided interval, beyond either of which lies a share of `tail`."""
    calls: NDArray[np.float64] = np.array([[new.calls, old.calls] for new, old in pairs], dtype=np.float64)
    draws = np.random.default_rng(seed).multinomial(len(pairs), np.full(len(pairs), 1.0 / len(pairs)), size=resamples)
    sums = draws.astype(np.float64) @ calls
    beyond = 100 * _expanded(tail, len(pairs))
    low, high = np.percentile(sums[:, 1] / sums[:, 0] - 1.0, (beyond, 100 - beyond))
    new, old = calls.sum(axis=0)
    return float(old / new - 1.0), float(low), float(high)


def _expanded(tail: float, count: int) -> float:
    """Share of the resamples to leave out at either end, so that `tail` of the truth is: as much wider as Student's t is than
    the normal distribution, and a sample's deviation than a resample's."""
    if count < 2:
        return 0.0
    z, v = -NormalDist().inv_cdf(tail), count - 1
    # Quantile of Student's t (Abramowitz & Stegun 26.7.5).
    t = z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    return NormalDist().cdf(-t * math.sqrt(count / v))


def domains(
    pairs: Sequence[tuple[Score, Score]], resamples: int, seed: int, tail: float = TAIL
) -> Mapping[str, Interval]:
    """The interval of every domain that has generations enough to speak."""
    groups: dict[str, list[tuple[Score, Score]]] = {}
    for pair in pairs:
        groups.setdefault(pair[0].domain, []).append(pair)
    return {name: interval(each, resamples, seed, tail) for name, each in groups.items() if len(each) >= MIN_SPEAKERS}


def told(interval: Interval) -> str:
    gain, low, high = interval
    return f"{gain:+.1%} tokens/s, 90 % interval {low:+.1%} to {high:+.1%}"
