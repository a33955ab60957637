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
from service.lifecycle.gate import MIN_SPEAKERS, domains, interval, paired, told

ALPHA = 0.05


def looks(generations: int) -> tuple[int, ...]:
    """After how many generations to look; the last look is at all of them."""
    parts = {generations // 4, generations // 2, generations}
    return tuple(sorted(count for count in parts if count >= MIN_SPEAKERS or count == generations))


@dataclass(frozen=True, slots=True)
class Look:
    """What one look says. over: the watch ends with it. back_to: what shall serve instead (verdict.promoted is False)."""

    verdict: Verdict
    over: bool
    back_to: int | None = None


def look(
    serving: Sequence[Score],
    others: Mapping[int, Sequence[Score]],
    *,
    parent: int,
    count: int,
    last: bool,
    resamples: int,
    seed: int,
) -> Look:
    """Compare the adapter that serves with `others` (its parent among them), by live generations.

    It goes as soon as its whole interval against one of them lies below 0, back to the best of those. It has proven itself
    as soon as every interval lies above 0; after the `last` of `count` looks it stays. The verdict holds the two-sided 90 %
    interval of the comparison that decided, else of that with its parent. Raises ValueError like gate.judge.
    """
    pairs = {other: paired(serving, scores) for other, scores in others.items()}
    tokens = sum(score.tokens for score, _ in pairs[parent])
    if len(pairs[parent]) < MIN_SPEAKERS or not tokens:
        few = f"only {len(pairs[parent])} generations to compare on"
        return Look(Verdict(True, f"stays: {few}", len(pairs[parent]), tokens, 0.0, 0.0, 0.0), last)
    tail = ALPHA / (count * len(pairs))
    strict = {other: interval(both, resamples, seed, tail) for other, both in pairs.items()}
    worse = [other for other, (_, _, high) in strict.items() if high < 0]
    # Of those it is proven worse than, what needed the fewest calls; the parent where they are alike.
    back_to = min(worse, key=lambda other: (strict[other][0], other != parent)) if worse else None
    opponent = parent if back_to is None else back_to
    name = "the bare draft" if opponent == BARE_DRAFT else f"adapter {opponent}"
    whole = interval(pairs[opponent], resamples, seed)
    proven = all(low > 0 for _, low, _ in strict.values())
    if back_to is not None:
        reason = f"worse than {name}: {told(whole)}"
    elif proven:
        reason = f"stays: proven better than {name}: {told(whole)}"
    else:
        reason = f"{'stays' if last else 'undecided'}: against {name} {told(whole)}"
    verdict = Verdict(
        back_to is None,
        reason,
        len(pairs[opponent]),
        tokens,
        *whole,
        domains=domains(pairs[opponent], resamples, seed),
    )
    return Look(verdict, back_to is not None or proven or last, back_to)
