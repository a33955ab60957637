"""Compares two adapters by predicted tokens per second, from scores on the same generations. Pure functions of values.

Each adapter is taken at the draft length that is best for it on these texts, by the measured costs of rounds over one row, or
at the longest where there are no costs. Intervals are percentile intervals of a paired bootstrap over conversations (Efron &
Tibshirani 1993, ch. 13; Cameron, Gelbach & Miller 2008), expanded for few conversations (Hesterberg 2015, sec. 3.3). Why it is
done so, with the simulated coverage: docs/decisions/loop.md, "The gate".
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
"""Fewer conversations than this give no usable interval."""
FEW = 20
"""Effective number of conversations below which a bootstrap alone is too short (docs/results/gate.md has the coverage)."""
TAIL = 0.05
"""What lies beyond either end of a two-sided 90 % interval."""
SHORTFALL = 0.05
"""Share of its predicted tokens a call that an adapter may lack before its scores count as wrong."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Relative change of tokens per second, new over old, and the ends of its two-sided interval. lengths: the draft lengths at
    which the two were compared, the new one's first."""

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
    """The scores of two adapters, generation by generation. seconds: what a round costs that drafts 1, 2, ... tokens; None
    where that is not known or the length is fixed. old_seconds: what it costs with the old adapter; None: the same.

    Raises ValueError when the scores are not about the same texts and the same draft lengths, or are none.
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
            raise ValueError("scores at different draft lengths do not compare")
        self._longest = max(lengths, default=0)
        self._seconds: tuple[Sequence[float], Sequence[float]] | None = None
        """With the new adapter and with the old one."""
        if seconds is not None:
            self._seconds = seconds, seconds if old_seconds is None else old_seconds
        for each in self._seconds or ():
            if lengths and len(each) != self._longest:
                raise ValueError(f"costs of {len(each)} draft lengths, scores at {self._longest}")
            if not all(math.isfinite(cost) and cost > 0 for cost in each):
                raise ValueError("rounds that cost nothing, or nothing finite")
        self._resampled: dict[tuple[int, int], NDArray[np.float64]] = {}

    @property
    def generations(self) -> int:
        """Number of generations that both adapters were scored on."""
        return len(self._pairs)

    @property
    def conversations(self) -> int:
        """Independent parts of the evidence: what an interval resamples."""
        return len({_conversation(score) for score, _ in self._pairs})

    @property
    def tokens(self) -> int:
        """Output tokens of all generations."""
        return sum(score.tokens for score, _ in self._pairs)

    @property
    def empty(self) -> bool:
        """No token, or a draft that may propose none."""
        return not (self.tokens and self._longest)

    def domains(self) -> Mapping[str, Comparison]:
        """Those that have conversations enough for an interval. Each is compared at lengths of its own: the engine would come
        to them where such texts are what it serves."""
        groups: dict[str, tuple[list[Score], list[Score]]] = {}
        for new, old in self._pairs:
            ours, theirs = groups.setdefault(new.domain, ([], []))
            ours.append(new)
            theirs.append(old)
        if len(groups) == 1:
            # Not compared twice.
            parts = dict.fromkeys(groups, self)
        else:
            parts = {name: Comparison(*both, *(self._seconds or ())) for name, both in groups.items()}
        return {name: part for name, part in parts.items() if part.conversations >= MIN_CONVERSATIONS}

    def gain(self, resamples: int, seed: int, tail: float = TAIL) -> Gain:
        """Of all these texts together, which must not be empty. tail: share beyond either end of the interval."""
        costs = self._costs
        whole = costs.sum(axis=0)
        new, old = (costs[:, adapter, whole[adapter].argmin()] for adapter in (0, 1))
        gain = float(old.sum() / new.sum() - 1.0)
        # Long conversations weigh more: the number of equal ones with the same variance (Kish 1965).
        effective = float(old.sum() ** 2 / (old @ old))
        beyond = 100 * _expanded(tail, effective)
        low, high = np.percentile(self._resampled_gains(resamples, seed), (beyond, 100 - beyond))
        if effective < FEW:
            error = _reach(tail, effective) * float(np.linalg.norm(old - (1.0 + gain) * new)) / float(new.sum())
            low, high = min(low, gain - error), max(high, gain + error)
        # The longest of those considered is the last, whether all are or that one alone.
        first = self._longest - whole.shape[1] + 1
        lengths = (first + int(whole[0].argmin()), first + int(whole[1].argmin()))
        return Gain(gain, float(low), float(high), lengths)

    def _resampled_gains(self, resamples: int, seed: int) -> NDArray[np.float64]:
        """The gain of each resample, which are drawn once for intervals of any width."""
        if (resamples, seed) not in self._resampled:
            count = len(self._costs)
            drawn = np.random.default_rng(seed).integers(count, size=(resamples, count))
            drawn += count * np.arange(resamples)[:, None]
            weights = np.bincount(drawn.ravel(), minlength=resamples * count).reshape(resamples, count)
            least = np.tensordot(weights.astype(np.float64), self._costs, axes=1).min(axis=2)
            self._resampled[resamples, seed] = least[:, 1] / least[:, 0] - 1.0
        return self._resampled[resamples, seed]

    def p_value(self, floor: float = 0.0) -> float:
        """One-sided p-value of the hypothesis that the new adapter's gain is at most `floor` (`sign_flips.p_value`, by
        conversation). 1.0 without texts."""
        if self.empty:
            return 1.0
        tests = self._differences(floor)
        return min(1.0, len(tests) * min(map(sign_flips.p_value, tests)))

    def e_values(self) -> tuple[float, float]:
        """Evidence that the new adapter is (worse, better), valid at any number of looks (`sign_flips.e_value`). Ones without
        texts."""
        if self.empty:
            return 1.0, 1.0
        worse = [sign_flips.e_value(-each) for each in self._differences(0.0, better=False)]
        better = [sign_flips.e_value(each) for each in self._differences(0.0)]
        return sum(worse) / len(worse), sum(better) / len(better)

    def _differences(self, floor: float, *, better: bool = True) -> list[NDArray[np.float64]]:
        """By conversation: what the old adapter costs more than the new one would at a gain of `floor`, each at its best draft
        length. Where these differ, also both at one length, since two lengths that are about as fast are not so text by text,
        and that would hide the difference between the adapters. better: what they are to prove; the length is the best one of
        the adapter that is to be proven slower, so that the other is never favoured.
        """
        costs = self._costs
        new, old = (int(costs[:, adapter].sum(axis=0).argmin()) for adapter in (0, 1))
        both = old if better else new
        return [costs[:, 1, j] - (1.0 + floor) * costs[:, 0, i] for i, j in sorted({(new, old), (both, both)})]

    @cached_property
    def _costs(self) -> NDArray[np.float64]:
        """Seconds, or calls, of (conversation, adapter, draft length)."""
        each = np.array([[new.calls, old.calls] for new, old in self._pairs], dtype=np.float64)
        _, owner = np.unique([_conversation(score) for score, _ in self._pairs], return_inverse=True)
        calls = np.zeros((owner.max() + 1, *each.shape[1:]))
        np.add.at(calls, owner, each)
        return calls[:, :, -1:] if self._seconds is None else calls * np.array(self._seconds)


@dataclass(frozen=True, slots=True)
class Realised:
    """Tokens a call of the rounds that an adapter drafted, the bonus token included, and those that its scores predict for the
    same rounds. high: upper end of the two-sided 90 % interval of the first's change against the second."""

    tokens_per_call: float
    predicted: float
    high: float

    @property
    def short(self) -> bool:
        """Whether the engine surely accepts less than the scores say, by more than SHORTFALL."""
        return self.high < -SHORTFALL

    def __str__(self) -> str:
        return f"realised {self.tokens_per_call:.2f} tokens a call, predicted {self.predicted:.2f}"


def realised(scores: Sequence[Score], resamples: int, seed: int) -> Realised | None:
    """What an adapter's logged rounds say of its scores; None where too few conversations have any."""
    drafted = [score for score in scores if score.rounds]
    rounds = sum(score.rounds for score in drafted)
    # The ratio of their sums over whole conversations, as a comparison estimates that of calls.
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
    """Both scores of every generation, in the order of the ids."""
    ours, theirs = {score.generation: score for score in new}, {score.generation: score for score in old}
    if len(ours) != len(new) or len(theirs) != len(old):
        raise ValueError("a generation was scored twice")
    if ours.keys() != theirs.keys():
        raise ValueError("the two adapters were scored on different generations")
    pairs = [(ours[name], theirs[name]) for name in sorted(ours)]
    for one, other in pairs:
        if (one.tokens, one.domain, one.conversation) != (other.tokens, other.domain, other.conversation):
            raise ValueError(f"generation {one.generation} was scored as two different texts")
        for score in (one, other):
            # The sum is finite only if all are.
            usable = math.isfinite(sum(score.calls)) and min(score.calls, default=1.0) > 0.0
            if score.tokens < 0 or not usable:
                raise ValueError(f"generation {score.generation} has no usable score")
    return pairs


def _expanded(tail: float, count: float) -> float:
    """Share of the resamples to leave out at either end, so that `tail` of the truth is."""
    return NormalDist().cdf(-_reach(tail, count))


def _reach(tail: float, count: float) -> float:
    """Standard deviations of a resample's estimate between the estimate and an end of its interval: Student's t instead of the
    normal distribution's quantile, and a sample's deviation instead of a resample's."""
    freedom = max(count - 1.0, 1.0)
    return student_t(tail, freedom) * math.sqrt(count / freedom)


def student_t(tail: float, freedom: float) -> float:
    """The value that Student's t exceeds with probability `tail`. freedom: degrees of freedom (Abramowitz & Stegun 26.7.5)."""
    z, v = -NormalDist().inv_cdf(tail), freedom
    t = z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    return t + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
