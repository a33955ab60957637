"""Compares two adapters by predicted tokens per second, from scores on the same generations. Pure functions of values.

Each adapter is compared at its best draft length on these texts, according to the measured costs of rounds over one
row; without costs, at the longest length. Intervals are percentile intervals of a paired bootstrap over conversations
(Efron & Tibshirani 1993, ch. 13; Cameron, Gelbach & Miller 2008), expanded for few conversations (Hesterberg 2015, sec.
3.3). The reasons and the simulated coverage: docs/decisions/loop.md, "The gate".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from service.core import Score
from service.lifecycle import sign_flips

MIN_CONVERSATIONS = 5
"""Minimum number of conversations for a usable interval."""
FEW = 20
"""Effective number of conversations below which a plain bootstrap interval is too short (coverage: docs/results/gate.md)."""
TAIL = 0.05
"""Probability beyond each end of a two-sided 90 % interval."""
SHORTFALL = 0.05
"""Fraction by which the acceptance length may fall short of the prediction before the scores count as wrong."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Relative change of tokens per second, new over old, with its two-sided interval. lengths: draft lengths at which
    the two were compared, the new adapter's first."""

    gain: float
    low: float
    high: float
    lengths: tuple[int, int]

    @property
    def interval(self) -> tuple[float, float, float]:
        """(gain, low, high), as fractions."""
        return self.gain, self.low, self.high

    def __str__(self) -> str:
        new, old = self.lengths
        at = f"K = {new}" if new == old else f"K = {new} against K = {old}"
        return f"{self.gain:+.1%} tokens/s at {at}, 90 % interval {self.low:+.1%} to {self.high:+.1%}"


class Comparison:
    """The scores of two adapters, paired by generation.

    seconds: cost of a round that drafts 1, 2, ... tokens; None when unknown or when the length is fixed. old_seconds:
    the same with the old adapter; None: the same costs.

    Raises ValueError when the scores cover different texts or draft lengths, or are invalid.
    """

    def __init__(
        self,
        new: Sequence[Score],
        old: Sequence[Score],
        seconds: Sequence[float] | None = None,
        old_seconds: Sequence[float] | None = None,
    ) -> None:
        self._pairs = _paired(new, old)
        lengths = {len(score.calls) for pair in self._pairs for score in pair}
        if len(lengths) > 1:
            raise ValueError("scores at different draft lengths cannot be compared")
        self._longest = max(lengths, default=0)
        self._seconds: tuple[Sequence[float], Sequence[float]] | None = None
        """Costs with the new and with the old adapter."""
        if seconds is not None:
            self._seconds = seconds, seconds if old_seconds is None else old_seconds
        for each in self._seconds or ():
            if lengths and len(each) != self._longest:
                raise ValueError(f"costs cover {len(each)} draft lengths, scores {self._longest}")
            if not all(math.isfinite(cost) and cost > 0 for cost in each):
                raise ValueError("round costs must be positive and finite")
        self._resampled: dict[tuple[int, int], NDArray[np.float64]] = {}

    @property
    def generations(self) -> int:
        """Generations that both adapters were scored on."""
        return len(self._pairs)

    @property
    def conversations(self) -> int:
        """Independent units of evidence, which the bootstrap resamples."""
        return len({_conversation(score) for score, _ in self._pairs})

    @property
    def tokens(self) -> int:
        """Output tokens of all generations."""
        return sum(score.tokens for score, _ in self._pairs)

    @property
    def empty(self) -> bool:
        """Whether there are no tokens, or no draft length to compare at."""
        return not (self.tokens and self._longest)

    def domains(self) -> Mapping[str, Comparison]:
        """The domains with enough conversations for an interval. Each is compared at its best lengths, which the engine
        would choose when it serves such texts."""
        groups: dict[str, tuple[list[Score], list[Score]]] = {}
        for new, old in self._pairs:
            ours, theirs = groups.setdefault(new.domain, ([], []))
            ours.append(new)
            theirs.append(old)
        if len(groups) == 1:
            # A single domain is not compared twice.
            parts = dict.fromkeys(groups, self)
        else:
            parts = {name: Comparison(*both, *(self._seconds or ())) for name, both in groups.items()}
        return {name: part for name, part in parts.items() if part.conversations >= MIN_CONVERSATIONS}

    def gain(self, resamples: int, seed: int, tail: float = TAIL) -> Gain:
        """The gain over all these texts, which must not be empty. tail: probability beyond each end of the interval."""
        costs = self._costs
        whole = costs.sum(axis=0)
        new, old = (costs[:, adapter, whole[adapter].argmin()] for adapter in (0, 1))
        gain = float(old.sum() / new.sum() - 1.0)
        # Long conversations weigh more: the effective number of equal ones with the same variance (Kish 1965).
        effective = float(old.sum() ** 2 / (old @ old))
        beyond = 100 * _expanded(tail, effective)
        low, high = np.percentile(self._resampled_gains(resamples, seed), (beyond, 100 - beyond))
        if effective < FEW:
            error = _reach(tail, effective) * float(np.linalg.norm(old - (1.0 + gain) * new)) / float(new.sum())
            low, high = min(low, gain - error), max(high, gain + error)
        # The longest length is the last column, whether all lengths are compared or only that one.
        first = self._longest - whole.shape[1] + 1
        lengths = (first + int(whole[0].argmin()), first + int(whole[1].argmin()))
        return Gain(gain, float(low), float(high), lengths)

    def _resampled_gains(self, resamples: int, seed: int) -> NDArray[np.float64]:
        """The gain in each resample. Resamples are drawn once and used for intervals of any width."""
        if (resamples, seed) not in self._resampled:
            count = len(self._costs)
            drawn = np.random.default_rng(seed).integers(count, size=(resamples, count))
            drawn += count * np.arange(resamples)[:, None]
            weights = np.bincount(drawn.ravel(), minlength=resamples * count).reshape(resamples, count)
            least = np.tensordot(weights.astype(np.float64), self._costs, axes=1).min(axis=2)
            self._resampled[resamples, seed] = least[:, 1] / least[:, 0] - 1.0
        return self._resampled[resamples, seed]

    def p_value(self, floor: float = 0.0) -> float:
        """One-sided p-value of the hypothesis that the new adapter's gain is at most `floor` (`sign_flips.p_value`,
        over conversations). 1.0 without texts."""
        if self.empty:
            return 1.0
        tests = self._differences(floor)
        return min(1.0, len(tests) * min(map(sign_flips.p_value, tests)))

    def e_values(self) -> tuple[float, float]:
        """Evidence that the new adapter is (worse, better), valid under any number of looks (`sign_flips.e_value`). (1,
        1) without texts."""
        if self.empty:
            return 1.0, 1.0
        worse = [sign_flips.e_value(-each) for each in self._differences(0.0, better=False)]
        better = [sign_flips.e_value(each) for each in self._differences(0.0)]
        return sum(worse) / len(worse), sum(better) / len(better)

    def _differences(self, floor: float, *, better: bool = True) -> list[NDArray[np.float64]]:
        """Per conversation, the old adapter's cost minus the new one's scaled to a gain of `floor`, each at its best
        draft length.

        When the best lengths differ, the differences at a common length are returned as well. Two lengths that are
        about equally fast differ from text to text, which would hide the difference between the adapters. better:
        whether the differences are to prove the new adapter better; the common length is the best one of the adapter to
        be proven slower, which favours neither side unfairly.
        """
        costs = self._costs
        new, old = (int(costs[:, adapter].sum(axis=0).argmin()) for adapter in (0, 1))
        both = old if better else new
        return [costs[:, 1, j] - (1.0 + floor) * costs[:, 0, i] for i, j in sorted({(new, old), (both, both)})]

    @cached_property
    def _costs(self) -> NDArray[np.float64]:
        """Seconds, or target calls, by (conversation, adapter, draft length)."""
        each = np.array([[new.calls, old.calls] for new, old in self._pairs], dtype=np.float64)
        _, owner = np.unique([_conversation(score) for score, _ in self._pairs], return_inverse=True)
        calls = np.zeros((owner.max() + 1, *each.shape[1:]))
        np.add.at(calls, owner, each)
        return calls[:, :, -1:] if self._seconds is None else calls * np.array(self._seconds)


@dataclass(frozen=True, slots=True)
class Realised:
    """Acceptance length of the rounds that an adapter drafted, bonus token included, and the length predicted by its
    scores for the same rounds. high: upper end of the two-sided 90 % interval of realised relative to predicted."""

    tokens_per_call: float
    predicted: float
    high: float

    @property
    def short(self) -> bool:
        """Whether the engine accepts less than the scores predict, with confidence and by more than SHORTFALL."""
        return self.high < -SHORTFALL

    def __str__(self) -> str:
        return f"realised acceptance length {self.tokens_per_call:.2f}, predicted {self.predicted:.2f}"


def realised(scores: Sequence[Score], resamples: int, seed: int) -> Realised | None:
    """Compares an adapter's logged rounds with its scores. None when too few conversations have such rounds."""
    drafted = [score for score in scores if score.rounds]
    rounds = sum(score.rounds for score in drafted)
    # The ratio of sums over whole conversations, as in a comparison of target calls.
    predicted = [replace(score, calls=(score.rounds + score.predicted,)) for score in drafted]
    logged = [replace(score, calls=(score.rounds + float(score.accepted),)) for score in drafted]
    both = Comparison(predicted, logged)
    if both.conversations < MIN_CONVERSATIONS:
        return None
    tokens, expected = (sum(score.calls[0] for score in each) / rounds for each in (logged, predicted))
    return Realised(tokens, expected, both.gain(resamples, seed).high)


def _conversation(score: Score) -> str:
    return score.conversation or score.generation


def _paired(new: Sequence[Score], old: Sequence[Score]) -> list[tuple[Score, Score]]:
    """Both scores of every generation, sorted by id."""
    ours, theirs = {score.generation: score for score in new}, {score.generation: score for score in old}
    if len(ours) != len(new) or len(theirs) != len(old):
        raise ValueError("a generation was scored twice")
    if ours.keys() != theirs.keys():
        raise ValueError("the two adapters were scored on different generations")
    pairs = [(ours[name], theirs[name]) for name in sorted(ours)]
    for one, other in pairs:
        if (one.tokens, one.domain, one.conversation) != (other.tokens, other.domain, other.conversation):
            raise ValueError(f"generation {one.generation} was scored with different tokens")
        for score in (one, other):
            # The sum is finite only if every term is.
            usable = math.isfinite(sum(score.calls)) and min(score.calls, default=1.0) > 0.0
            if score.tokens < 0 or not usable:
                raise ValueError(f"generation {score.generation} has no usable score")
    return pairs


def _expanded(tail: float, count: float) -> float:
    """Fraction of resamples to cut at each end so that the true value lies beyond with probability `tail`."""
    return NormalDist().cdf(-_reach(tail, count))


def _reach(tail: float, count: float) -> float:
    """Distance between the estimate and an end of its interval, in standard deviations of a resample's estimate. It
    uses Student's t instead of the normal quantile, and the sample's deviation instead of the resample's."""
    freedom = max(count - 1.0, 1.0)
    return student_t(tail, freedom) * math.sqrt(count / freedom)


def student_t(tail: float, freedom: float) -> float:
    """The value that Student's t exceeds with probability `tail`. freedom: degrees of freedom (Abramowitz & Stegun 26.7.5)."""
    z, v = -NormalDist().inv_cdf(tail), freedom
    t = z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    return t + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
