"""Looking at a promotion again and again while it serves: against what served before it, and against the bare draft.

Pure functions of values. Looks come when a quarter, a half and all of the generations are there. Every look at every
opponent may err with an equal part of ALPHA (Bonferroni; the looks and the opponents are strongly dependent, so the whole
errs less): however often is looked, an adapter as good as both goes back by mistake with a probability of at most ALPHA,
and one that is no better than one of them is called proven with no greater one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.core import BARE_DRAFT, Score, Verdict
from service.lifecycle.comparison import MIN_SPEAKERS, Comparison, realised

ALPHA = 0.05


def looks(generations: int) -> tuple[int, ...]:
    """After how many generations to look; the last look is at all of them."""
    parts = {generations // 4, generations // 2, generations}
    return tuple(sorted(count for count in parts if count >= MIN_SPEAKERS or count == generations))


@dataclass(frozen=True, slots=True)
class Look:
    """What one look says. over: the watch ends with it. back_to: what shall serve instead (verdict.promoted is False). short:
    the engine accepts less than the scores say (Realised.short)."""

    verdict: Verdict
    over: bool
    back_to: int | None = None
    short: bool = False


def look(
    serving: Sequence[Score],
    others: Mapping[int, Sequence[Score]],
    *,
    seconds: Sequence[float] | None = None,
    others_seconds: Mapping[int, Sequence[float]] | None = None,
    parent: int,
    count: int,
    last: bool,
    resamples: int,
    seed: int,
) -> Look:
    """Compare the adapter that serves with `others` (its parent among them), by live generations. seconds: what a round costs
    with it, as in gate.judge; others_seconds: what it costs with those of the others for which that differs.

    It goes as soon as its whole interval against one of them lies below 0, back to the best of those. It has proven itself
    as soon as every interval lies above 0; after the `last` of `count` looks it stays. The verdict holds the two-sided 90 %
    interval of the comparison that decided, else of that with its parent. Raises ValueError like gate.judge.

    Its own rounds say whether the scores hold for this engine. Where they surely fall short, nothing is proven by them.
    """
    costs = others_seconds or {}
    both = {other: Comparison(serving, scores, seconds, costs.get(other)) for other, scores in others.items()}
    generations, tokens = both[parent].generations, both[parent].tokens
    if both[parent].conversations < MIN_SPEAKERS or both[parent].empty:
        few = f"stays: {both[parent].conversations} conversations and {tokens} tokens are too few to compare on"
        return Look(Verdict(True, few, generations, tokens, 0.0, 0.0, 0.0), last)
    tail = ALPHA / (count * len(both))
    strict = {other: each.gain(resamples, seed, tail) for other, each in both.items()}
    worse = [other for other, gain in strict.items() if gain.high < 0]
    # Of those it is proven worse than, the fastest; the parent where they are alike.
    back_to = min(worse, key=lambda other: (strict[other].gain, other != parent)) if worse else None
    opponent = parent if back_to is None else back_to
    name = "the bare draft" if opponent == BARE_DRAFT else f"adapter {opponent}"
    whole = both[opponent].gain(resamples, seed)
    drafted = realised(serving, resamples, seed)
    short = drafted is not None and drafted.short
    proven = not short and all(gain.low > 0 for gain in strict.values())
    if back_to is not None:
        reason = f"worse than {name}: {whole}"
    elif proven:
        reason = f"stays: proven better than {name}: {whole}"
    else:
        reason = f"{'stays' if last else 'undecided'}: against {name} {whole}"
    if drafted is not None:
        reason = f"{reason}; {drafted}"
    domains = {domain: each.gain(resamples, seed).interval for domain, each in both[opponent].domains().items()}
    verdict = Verdict(back_to is None, reason, generations, tokens, *whole.interval, domains=domains)
    return Look(verdict, back_to is not None or proven or last, back_to, short)
