"""Whether a candidate may replace the adapter that serves. Pure functions of the scores of the candidate, its parent and the
base draft on the same generations, of what rounds cost where they serve, and of the verdicts before
(docs/decisions/loop.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.core import Score, Verdict
from service.lifecycle.comparison import MIN_CONVERSATIONS, TAIL, Comparison
from service.lifecycle.online_testing import next_level
from service.settings import GateSettings

WORTHWHILE = 0.005
"""A candidate that seems to gain less than this is not worth a swap: the draft's cached prefixes are lost, and the
next run waits for the watch."""
BOUNDED = 60
"""Conversations from which the golden set's or a domain's loss against the base draft is bounded by its confidence limit. With
fewer, a candidate that loses nothing could hardly prove it."""
GOLDEN = "golden set"
"""Its name among the domains of a verdict."""
AGAINST_BASE = ", against the base draft"
"""Follows the name of a domain in a verdict that compares it with the base draft."""

NO_DOMAIN = "requests without a domain"


@dataclass(frozen=True, slots=True)
class Scored:
    """What one adapter scored. texts: on logged texts. golden: on the golden set, which only guards: it is no part of the gain.
    seconds: what a round costs that drafts 1, 2, ... tokens; None: compare at the longest draft length, by target calls."""

    texts: Sequence[Score]
    golden: Sequence[Score] = ()
    seconds: Sequence[float] | None = None


def judge(
    candidate: Scored,
    parent: Scored,
    rules: GateSettings,
    *,
    base: Scored | None = None,
    history: Sequence[Verdict] = (),
    seed: int,
) -> Verdict:
    """Whether `candidate` may replace `parent`, which serves.

    base: the base draft; None: it is the parent. history: the verdicts of this pair's earlier gates, oldest first, with
    `promoted` False for adapters that were rolled back since.

    A candidate is promoted when

    - there are `min_prompts` generations of five or more conversations and `min_tokens` tokens;
    - its gain over the parent is worth a swap and proven at the level that online testing leaves for it (`p_value`,
    `next_level`); - no domain, nor the golden set, is worse than with the parent or the base draft by more than
      `domain_tolerance` and surely worse at all;
    - on the golden set and every domain of BOUNDED or more conversations it is proven to lose no more than `domain_tolerance`
      against the base draft, at a level of its own sequence. A chain of adapters therefore loses no more than one may.

    Raises ValueError when the scores are not about the same generations and draft lengths, or the costs about others.
    """
    whole = Comparison(candidate.texts, parent.texts, candidate.seconds, parent.seconds)
    if whole.empty:
        return Verdict(False, "nothing to compare on", 0, 0, 0.0, 0.0, 0.0)
    gain = whole.gain(rules.bootstrap, seed)
    against_parent = _parts(candidate, parent)
    against_base = against_parent if base is None else _parts(candidate, base)
    bounded = {name: part for name, part in against_base.items() if part.conversations >= BOUNDED}
    intervals = {name: part.gain(rules.bootstrap, seed).interval for name, part in against_parent.items()}
    if base is not None:
        intervals |= {name + AGAINST_BASE: part.gain(rules.bootstrap, seed).interval for name, part in bounded.items()}

    def verdict(promoted: bool, reason: str, **tested: float | bool | None) -> Verdict:
        counts = whole.generations, whole.tokens
        return Verdict(promoted, reason, *counts, *gain.interval, domains=intervals, **tested)  # pyright: ignore[reportArgumentType]

    if lacking := _lacking(whole, rules):
        return verdict(False, lacking)
    p_value, level = whole.p_value(), next_level([one.promoted for one in history if one.p_value is not None])
    guard_level = next_level([one.loss_bounded for one in history if one.loss_bounded is not None])
    unproven = [name for name, part in bounded.items() if part.p_value(-rules.domain_tolerance) > guard_level]
    tested = {"p_value": p_value, "level": level, "loss_bounded": not unproven if bounded else None}
    if p_value > level:
        return verdict(False, f"not proven better: {gain}; p = {p_value:.2g}, tested at {level:.2g}", **tested)
    if gain.gain < WORTHWHILE:
        return verdict(False, f"too little better: {gain}", **tested)
    for rival, parts in (("", against_parent), (AGAINST_BASE, against_base)):
        if blocked := _surely_worse(parts, rules, seed):
            names = ", ".join(name or NO_DOMAIN for name in blocked) + rival
            return verdict(False, f"worse on {names}: {parts[blocked[0]].gain(rules.bootstrap, seed)}", **tested)
    if unproven:
        names = ", ".join(name or NO_DOMAIN for name in unproven) + AGAINST_BASE
        shown = bounded[unproven[0]].gain(rules.bootstrap, seed)
        limit = f"{rules.domain_tolerance:.0%}"
        return verdict(False, f"may lose more than {limit} on {names}: {shown}", **tested)
    return verdict(True, f"better: {gain}; p = {p_value:.2g}, tested at {level:.2g}", **tested)


def _parts(candidate: Scored, rival: Scored) -> Mapping[str, Comparison]:
    """The golden set and every domain that have conversations enough for an interval, by name in order."""
    costs = candidate.seconds, rival.seconds
    parts = dict(Comparison(candidate.texts, rival.texts, *costs).domains())
    golden = Comparison(candidate.golden, rival.golden, *costs)
    if golden.conversations >= MIN_CONVERSATIONS:
        parts[GOLDEN] = golden
    return dict(sorted(parts.items()))


def _lacking(whole: Comparison, rules: GateSettings) -> str | None:
    """What a verdict needs and the texts do not have; None: nothing."""
    if whole.generations < rules.min_prompts:
        return f"{whole.generations} of {rules.min_prompts} prompts"
    if whole.tokens < rules.min_tokens:
        return f"{whole.tokens} of {rules.min_tokens} tokens"
    if whole.conversations < MIN_CONVERSATIONS:
        return f"{whole.conversations} of {MIN_CONVERSATIONS} conversations"
    return None


def _surely_worse(parts: Mapping[str, Comparison], rules: GateSettings, seed: int) -> list[str]:
    """The parts that lose more than the tolerance and whose whole interval lies below 0. The interval is widened for the number
    of parts, so that many of them do not make it likely that one blocks by chance."""
    return [
        name
        for name, part in parts.items()
        if part.gain(rules.bootstrap, seed).gain < -rules.domain_tolerance
        and part.gain(rules.bootstrap, seed, TAIL / len(parts)).high < 0
    ]
