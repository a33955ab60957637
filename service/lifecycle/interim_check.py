"""One interim check of a promoted adapter while it serves, against its parent and the base draft. Pure functions of values.

The evidence against each opponent is an e-value over all answers so far (a confidence sequence,
lifecycle/sign_flips.py), which is valid at every check: an adapter as good as both is rolled back by mistake with a
probability of at most ALPHA, however often it is checked. The opponents share ALPHA equally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.core import BARE_DRAFT, Score, Verdict
from service.lifecycle.comparison import MIN_CONVERSATIONS, Comparison, Gain, Realised, realised

ALPHA = 0.05


FEWEST = 8
"""Minimum number of answers for a check: fewer cannot decide anything."""


def check_schedule(generations: int) -> tuple[int, ...]:
    """Numbers of generations at which to check: each check has twice as many as the one before, the last one all of them."""
    parts = {generations // part for part in (1, 2, 4, 8, 16)}
    return tuple(sorted(count for count in parts if count >= FEWEST or count == generations))


@dataclass(frozen=True, slots=True)
class CheckResult:
    """over: this check ends the watch. roll_back_to: what should serve instead (verdict.promoted is False). short: the
    engine accepts less than the scores predict (Realised.short)."""

    verdict: Verdict
    over: bool
    roll_back_to: int | None = None
    short: bool = False


def interim_check(
    serving: Sequence[Score],
    others: Mapping[int, Sequence[Score]],
    *,
    seconds: Sequence[float] | None = None,
    others_seconds: Mapping[int, Sequence[float]] | None = None,
    parent: int,
    last: bool,
    resamples: int,
    seed: int,
) -> CheckResult:
    """Compares the serving adapter with `others` (its parent among them) on live generations.

    seconds: cost of a round with it, as in gate.judge. others_seconds: the costs with those opponents that have different ones.

    The adapter is rolled back as soon as it is proven worse than an opponent, to the best of those. It counts as proven
    as soon as it is proven better than all of them; after the `last` check it stays. The verdict holds the two-sided 90
    % interval of the deciding comparison, otherwise of the one with the parent. Raises ValueError like gate.judge.

    The adapter's logged rounds show whether the scores hold for this engine. If they clearly fall short, the scores
    prove nothing.
    """
    costs = others_seconds or {}
    comparisons = {other: Comparison(serving, scores, seconds, costs.get(other)) for other, scores in others.items()}
    with_parent = comparisons[parent]
    if with_parent.conversations < MIN_CONVERSATIONS or with_parent.empty:
        return CheckResult(_too_few(with_parent), last)
    enough = len(comparisons) / ALPHA
    evidence = {other: each.e_values() for other, each in comparisons.items()}
    gains = {other: each.gain(resamples, seed) for other, each in comparisons.items()}
    worse = [other for other, (against, _) in evidence.items() if against >= enough]
    # Of the opponents it is proven worse than, the fastest; the parent on a tie.
    back_to = min(worse, key=lambda other: (gains[other].gain, other != parent)) if worse else None
    drafted = realised(serving, resamples, seed)
    short = drafted is not None and drafted.short
    proven = not short and all(in_favour >= enough for _, in_favour in evidence.values())
    opponent = parent if back_to is None else back_to
    decisive = comparisons[opponent]
    gain = gains[opponent]
    outcome = "worse" if back_to is not None else "proven" if proven else "stays" if last else "undecided"
    verdict = Verdict(
        back_to is None,
        _reason(outcome, opponent, gain, drafted),
        decisive.generations,
        decisive.tokens,
        *gain.interval,
        domains={domain: each.gain(resamples, seed).interval for domain, each in decisive.domains().items()},
    )
    return CheckResult(verdict, outcome != "undecided", back_to, short)


def _too_few(comparison: Comparison) -> Verdict:
    conversations, tokens = comparison.conversations, comparison.tokens
    reason = f"stays: {conversations} conversations and {tokens} tokens are too few to compare on"
    return Verdict(True, reason, comparison.generations, tokens, 0.0, 0.0, 0.0)


def _reason(outcome: str, opponent: int, gain: Gain, drafted: Realised | None) -> str:
    name = "the base draft" if opponent == BARE_DRAFT else f"adapter {opponent}"
    sentence = {
        "worse": f"worse than {name}: {gain}",
        "proven": f"stays: proven better than {name}: {gain}",
    }.get(outcome, f"{outcome}: against {name} {gain}")
    return sentence if drafted is None else f"{sentence}; {drafted}"
