"""Whether one adapter drafts better than another, from scores on the same generations. Pure functions of values.

At one fixed draft length a target call costs the same whoever drafted, so the ratio of calls is the ratio of predicted
tokens per second. Intervals are percentile intervals of a paired bootstrap over generations (Efron & Tibshirani 1993,
ch. 13): a resample draws generations with replacement and takes both adapters' calls on them, so what makes one text
easier than another cancels out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from service.core import Score, Verdict

MIN_SPEAKERS = 5
"""Fewer generations than this have no interval worth the name."""

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

    Promoted when the lower end of the two-sided 90 % interval of the gain is above 0, there are at least `min_prompts`
    generations and `min_tokens` tokens, and no domain of five or more generations lies with its whole interval below
    -domain_tolerance. Raises ValueError when the two lists are not about the same generations at one draft length.
    """
    pairs = _pairs(candidate, active)
    tokens = sum(score.tokens for score, _ in pairs)
    if not pairs or not tokens:
        return Verdict(False, "nothing to compare on", 0, 0, 0.0, 0.0, 0.0)
    whole = _interval(pairs, resamples, seed)
    domains = _domains(pairs, resamples, seed)
    blocked = [name for name, (_, _, high) in sorted(domains.items()) if high < -domain_tolerance]
    if len(pairs) < min_prompts:
        promoted, reason = False, f"{len(pairs)} of {min_prompts} prompts"
    elif tokens < min_tokens:
        promoted, reason = False, f"{tokens} of {min_tokens} tokens"
    elif whole[1] <= 0:
        promoted, reason = False, f"not proven better: {_text(whole)}"
    elif blocked:
        promoted, reason = False, f"worse on {', '.join(blocked)}: {_text(domains[blocked[0]])}"
    else:
        promoted, reason = True, f"better: {_text(whole)}"
    return Verdict(promoted, reason, len(pairs), tokens, *whole, domains=domains)


def watch(serving: Sequence[Score], parent: Sequence[Score], *, resamples: int, seed: int) -> Verdict:
    """Whether a promoted adapter may stay, from live generations: `promoted` is False when it must go back.

    It goes when the whole 90 % interval of its gain over its parent lies below 0. Raises ValueError like `judge`.
    """
    pairs = _pairs(serving, parent)
    tokens = sum(score.tokens for score, _ in pairs)
    if len(pairs) < MIN_SPEAKERS or not tokens:
        return Verdict(True, f"stays: only {len(pairs)} generations to compare on", len(pairs), tokens, 0.0, 0.0, 0.0)
    whole = _interval(pairs, resamples, seed)
    stays = whole[2] >= 0
    reason = f"{'stays' if stays else 'worse than its parent'}: {_text(whole)}"
    return Verdict(stays, reason, len(pairs), tokens, *whole, domains=_domains(pairs, resamples, seed))


def _pairs(new: Sequence[Score], old: Sequence[Score]) -> list[tuple[Score, Score]]:
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


def _interval(pairs: Sequence[tuple[Score, Score]], resamples: int, seed: int) -> Interval:
    """Gain and the ends of its two-sided 90 % interval."""
    calls: NDArray[np.float64] = np.array([[new.calls, old.calls] for new, old in pairs], dtype=np.float64)
    draws = np.random.default_rng(seed).multinomial(len(pairs), np.full(len(pairs), 1.0 / len(pairs)), size=resamples)
    sums = draws.astype(np.float64) @ calls
    low, high = np.percentile(sums[:, 1] / sums[:, 0] - 1.0, (5.0, 95.0))
    new, old = calls.sum(axis=0)
    return float(old / new - 1.0), float(low), float(high)


def _domains(pairs: Sequence[tuple[Score, Score]], resamples: int, seed: int) -> Mapping[str, Interval]:
    """The interval of every domain that has generations enough to speak."""
    groups: dict[str, list[tuple[Score, Score]]] = {}
    for pair in pairs:
        groups.setdefault(pair[0].domain, []).append(pair)
    return {name: _interval(group, resamples, seed) for name, group in groups.items() if len(group) >= MIN_SPEAKERS}


def _text(interval: Interval) -> str:
    gain, low, high = interval
    return f"{gain:+.1%} tokens/s, 90 % interval {low:+.1%} to {high:+.1%}"
