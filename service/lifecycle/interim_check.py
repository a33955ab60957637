"""One interim check of a promotion while it serves: against its parent, and against the base draft. Pure functions of values.

The evidence against each opponent is an e-value of all answers so far (a confidence sequence, lifecycle/sign_flips.py), which
is valid at every look: an adapter as good as both is rolled back by mistake with a probability of at most ALPHA, however often
it is checked. The opponents share ALPHA equally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.core import BARE_DRAFT, Score, Verdict
from service.lifecycle.comparison import MIN_CONVERSATIONS, Comparison, Gain, Realised, realised

ALPHA = 0.05


FEWEST = 8
"""Answers before which no check is made: fewer cannot decide anything."""


def check_schedule(generations: int) -> tuple[int, ...]:
    """After how many generations to check: each check has twice as many as the one before, the last one all of them."""
    parts = {generations // part for part in (1, 2, 4, 8, 16)}
    return tuple(sorted(count for count in parts if count >= FEWEST or count == generations))


@dataclass(frozen=True, slots=True)
class CheckResult:
    """over: the watch ends with it. roll_back_to: what shall serve instead (verdict.promoted is False). short: the engine
    accepts less than the scores predict (Realised.short)."""

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
    """Compare the adapter that serves with `others` (its parent among them), by live generations. seconds: what a round costs
    with it, as in gate.judge; others_seconds: what it costs with those of the others for which that differs.

    It is rolled back as soon as it is proven worse than one of them, to the best of those. It is proven as soon as it is proven
    better than each; after the `last` check it stays. The verdict holds the two-sided 90 % interval of the comparison that
    decided, else of that with its parent. Raises ValueError like gate.judge.

    Its own rounds say whether the scores hold for this engine. Where they surely fall short, nothing is proven by them.
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
    # Of those it is proven worse than, the fastest; the parent where they are alike.
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
