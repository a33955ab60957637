"""Losslessness in half precision: how often the engine's text leaves the target's own only where rounding decides.

A tie is a position where the engine's token is not the oracle's, and moving the oracle's logits against each other by no more
than the measured rounding makes it the choice: by its logit where greedy, with the noise of that position where seeded, by the
edge of the set where top-k, top-p or min-p filter. Any other difference is an error. docs/decisions/engine.md says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from service.core import Sampling
from service.engine.sampling import SamplingBatch, gumbel, noise_key, transform
from service.evaluation.oracle import prefilled_cache
from service.models.arrays import named_arrays

RATE = 1.5
"""Ties that are allowed for each between mlx-lm's own one-token and (K+1)-token calls."""
CHANCE = 0.001
"""Probability below which more ties than RATE allows are no chance."""
CONTENDERS = 8
"""Best tokens of a position between which the rounding is measured."""
PREFILL_CHUNK = 2048

Scores = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the greedy or seeded output to check, with its end token if any."""

    prompt: Sequence[int]
    output: Sequence[int]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class TieReport:
    """Counts of output positions.

    ties: the engine's token differs from the oracle's within the measured rounding. own_ties: mlx-lm's own one-token and
    (K+1)-token calls choose different tokens. differences: neither equal nor a tie. rounding: in logits. largest: how far the
    logits would have to move for the worst of the engine's tokens to be the choice.
    """

    positions: int
    ties: int
    own_ties: int
    differences: int
    rounding: float
    largest: float

    @property
    def per_thousand(self) -> float:
        """Ties per 1,000 tokens."""
        return 1000.0 * self.ties / max(self.positions, 1)

    def plain(self) -> dict[str, float | int | bool]:
        """The figures by name, JSON-ready."""
        return {
            "per_1000": self.per_thousand,
            "own_per_1000": self.own_per_thousand,
            "differences": self.differences,
            "rounding": self.rounding,
            "positions": self.positions,
            "lossless": self.lossless(),
        }

    @property
    def own_per_thousand(self) -> float:
        """Ties per 1,000 tokens between mlx-lm's own calls."""
        return 1000.0 * self.own_ties / max(self.positions, 1)

    def lossless(self) -> bool:
        """Whether all differences are ties, and no more of them than RATE allows, or so few that the excess may be chance."""
        if self.differences:
            return False
        # At this rate, each of all these ties is the engine's with a probability of RATE / (1 + RATE) at most.
        both, share = self.ties + self.own_ties, Fraction(RATE) / (1 + Fraction(RATE))
        least = sum(comb(both, n) * share**n * (1 - share) ** (both - n) for n in range(self.ties, both + 1))
        return self.ties <= RATE * self.own_ties or float(least) >= CHANCE


def exact(target: nn.Module) -> bool:
    """Whether calls of all shapes choose the same tokens: float32 on a CPU. Elsewhere ties have to be counted."""
    weights = named_arrays(target.parameters())
    half = any(array.dtype in {mx.bfloat16, mx.float16} for _, array in weights)
    return mx.default_device().type == mx.cpu and not half


def measure_ties(
    target: nn.Module,
    texts: Sequence[Text],
    *,
    k: int,
    vocabulary: int | None = None,
    on_step: Callable[[int], None] = lambda done: None,
) -> TieReport:
    """Compare texts with the target alone, teacher-forced on them.

    k: drafted tokens of the (K+1)-token calls that one-token calls are compared with. vocabulary: width that logits are cut to.
    on_step: positions compared so far. Makes a target call for each token of the texts, and one for every K+1 tokens. Raises
    ValueError for texts sampled without a seed, which have no oracle.
    """
    positions = own_ties = 0
    rounding, needed = 0.0, list[float]()
    for text in texts:
        if not text.output:
            continue
        one, several = (forced_logits(target, text, width)[:, :vocabulary] for width in (1, k + 1))
        noise = _noise(text.sampling, len(text.output), one.shape[-1])
        mine, theirs = _scores(one, text.sampling, noise), _scores(several, text.sampling, noise)
        chosen, other = (np.array(mx.argmax(scores, axis=-1)) for scores in (mine, theirs))
        own_ties += int((chosen != other).sum())
        rounding = max(rounding, _moved(one, several, mine))
        for at in np.flatnonzero(chosen != np.array(text.output)).tolist():
            row = np.array(one[at], dtype=np.float64)
            needed.append(
                needed_rounding(
                    row, text.output[at], text.sampling, None if noise is None else np.array(noise[at], np.float64)
                )
            )
        positions += len(text.output)
        on_step(positions)
    ties = sum(each <= rounding for each in needed)
    return TieReport(positions, ties, own_ties, len(needed) - ties, rounding, max(needed, default=0.0))


def forced_logits(target: nn.Module, text: Text, width: int) -> mx.array:
    """Logits (n, V), float32, at each of a text's n output positions, on mlx-lm's own cache, `width` tokens a call."""
    cache = prefilled_cache(target, text.prompt, PREFILL_CHUNK)
    fed = [text.prompt[-1], *text.output[:-1]]
    found: list[mx.array] = []
    for start in range(0, len(fed), width):
        found.append(target(mx.array([fed[start : start + width]]), cache=cache)[0].astype(mx.float32))
        mx.eval(found[-1])
    return mx.concatenate(found)


def needed_rounding(logits: Scores, token: int, sampling: Sampling, noise: Scores | None = None) -> float:
    """How far logits (V,) would have to move against each other for `token` to be the choice, in natural-log units: 0 where it
    is already, infinity where nothing makes it so. noise: (V,) of a seeded position."""
    logits = logits - logits.max()
    low, high = 0.0, 1e-6
    if _may_be_chosen(logits, token, sampling, noise, low):
        return 0.0
    while not _may_be_chosen(logits, token, sampling, noise, high):
        low, high = high, 2.0 * high
        if high > 1e3:
            return float("inf")
    for _ in range(20):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if _may_be_chosen(logits, token, sampling, noise, middle) else (middle, high)
    return high


def _may_be_chosen(logits: Scores, token: int, sampling: Sampling, noise: Scores | None, by: float) -> bool:
    """Whether logits can move against each other by at most `by` so that the filters keep the token and, of tokens with a
    better score, each is filtered out or falls behind it."""
    if noise is None:
        return bool(logits[token] >= logits.max() - by)
    score = logits / sampling.temperature + noise
    rivals = logits[(score > score[token] + by / sampling.temperature) & np.isfinite(logits)]
    inside, _ = _edges(logits, logits[token : token + 1], sampling, by)
    _, outside = _edges(logits, rivals, sampling, by)
    return bool(inside[0] and outside.all())


def _edges(logits: Scores, of: Scores, sampling: Sampling, by: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether tokens with these logits may be inside the filters' set, and whether they may be outside, when logits move by
    at most `by` against each other. Mass is moved by as much in log odds."""
    ascending = np.sort(logits)
    mass = np.append(np.cumsum(np.exp(ascending)[::-1])[::-1], 0.0)
    total = mass[0]

    def odds(part: Scores, moved: float) -> Scores:
        share = np.clip(part / total, 0.0, 1.0)
        return share * np.exp(moved) / (share * np.exp(moved) + 1.0 - share)

    above = np.searchsorted(ascending, of + by, side="right")
    from_here = np.searchsorted(ascending, of - by, side="left")
    inside, outside = np.ones(len(of), dtype=np.bool_), np.zeros(len(of), dtype=np.bool_)
    if 0 < sampling.top_k < len(logits):
        inside &= len(logits) - above < sampling.top_k
        outside |= len(logits) - from_here - 1 >= sampling.top_k
    if sampling.top_p < 1.0:
        inside &= odds(mass[above], -by) < sampling.top_p
        outside |= odds(np.maximum(mass[from_here] - np.exp(of), 0.0), by) >= sampling.top_p
    if sampling.min_p > 0.0:
        edge = logits.max() + np.log(sampling.min_p)
        inside &= of >= edge - by
        outside |= of < edge + by
    return inside, outside


def _noise(sampling: Sampling, count: int, vocabulary: int) -> mx.array | None:
    if sampling.greedy:
        return None
    if sampling.seed is None:
        raise ValueError("a text that was sampled without a seed has no oracle")
    return gumbel([noise_key(sampling.seed, position) for position in range(count)], vocabulary)


def _scores(logits: mx.array, sampling: Sampling, noise: mx.array | None) -> mx.array:
    """(n, V), whose argmax is the choice: the logits, or log-probabilities after filters and temperature plus noise."""
    if noise is None:
        return logits
    return transform(logits[None], SamplingBatch.of([sampling], logits.shape[-1]))[0] + noise


def _moved(one: mx.array, several: mx.array, scores: mx.array) -> float:
    """The most by which two of a position's CONTENDERS move against each other."""
    best = mx.argpartition(-scores, min(CONTENDERS, scores.shape[-1]) - 1, axis=-1)[:, :CONTENDERS]
    usable = mx.isfinite(mx.take_along_axis(scores, best, axis=-1))
    moved = np.array(mx.where(usable, mx.take_along_axis(several - one, best, axis=-1), mx.nan))
    # The best token of all is always usable, so no row is all NaN.
    return float((np.nanmax(moved, axis=-1) - np.nanmin(moved, axis=-1)).max())
