"""Decides whether a candidate may replace the serving adapter. Pure functions of the scores of the candidate, its
parent and the base draft on the same generations, of the round costs of the serving machines, and of earlier verdicts
(docs/decisions/loop.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.core import Score, Verdict
from service.lifecycle.comparison import MIN_CONVERSATIONS, TAIL, Comparison
from service.lifecycle.online_testing import next_level
from service.settings import GateSettings

WORTHWHILE = 0.005
"""Minimum estimated gain. Below it a swap does not pay: the draft's cached prefixes are lost, and the next run waits
for the watch."""
BOUNDED = 60
"""Minimum number of conversations for bounding a loss against the base draft by its confidence limit, on the golden set
or a domain. With fewer, even a candidate without any loss could hardly prove it."""
GOLDEN = "golden set"
"""Name of the golden set among the domains of a verdict."""
AGAINST_BASE = ", against the base draft"
"""Suffix of a domain's name in a verdict that compares with the base draft."""

NO_DOMAIN = "requests without a domain"


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of one adapter.

    texts: on logged texts. golden: on the golden set, which only guards and is not part of the gain. seconds: cost of a
    round that drafts 1, 2, ... tokens; None: compare target calls at the longest draft length.
    """

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
    """Whether `candidate` may replace `parent`, the serving adapter.

    base: the scores of the base draft; None when it is the parent. history: verdicts of this pair's earlier gates,
    oldest first, with `promoted` False for adapters that were rolled back since.

    A candidate is promoted when

    - there are at least `min_prompts` generations from five or more conversations, and `min_tokens` tokens;
    - its gain over the parent is worth a swap and proven at the level that online testing assigns (`p_value`, `next_level`);
    - neither a domain nor the golden set loses more than `domain_tolerance` against the parent or the base draft with
      an interval entirely below 0;
    - the golden set and every domain of at least BOUNDED conversations are proven to lose at most `domain_tolerance`
      against the base draft, at a level from a separate sequence. A chain of adapters therefore loses no more than a
      single one may.

    Raises ValueError when the scores cover different generations or draft lengths, or the costs cover other draft lengths.
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
        return verdict(False, f"gain too small: {gain}", **tested)
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
    """The golden set and every domain with enough conversations for an interval, sorted by name."""
    costs = candidate.seconds, rival.seconds
    parts = dict(Comparison(candidate.texts, rival.texts, *costs).domains())
    golden = Comparison(candidate.golden, rival.golden, *costs)
    if golden.conversations >= MIN_CONVERSATIONS:
        parts[GOLDEN] = golden
    return dict(sorted(parts.items()))


def _lacking(whole: Comparison, rules: GateSettings) -> str | None:
    """What the texts lack for a verdict, or None."""
    if whole.generations < rules.min_prompts:
        return f"{whole.generations} of {rules.min_prompts} prompts"
    if whole.tokens < rules.min_tokens:
        return f"{whole.tokens} of {rules.min_tokens} tokens"
    if whole.conversations < MIN_CONVERSATIONS:
        return f"{whole.conversations} of {MIN_CONVERSATIONS} conversations"
    return None


def _surely_worse(parts: Mapping[str, Comparison], rules: GateSettings, seed: int) -> list[str]:
    """Parts that lose more than the tolerance with an interval entirely below 0. The interval is widened for the number
    of parts, so that many parts do not make a block by chance likely."""
    return [
        name
        for name, part in parts.items()
        if part.gain(rules.bootstrap, seed).gain < -rules.domain_tolerance
        and part.gain(rules.bootstrap, seed, TAIL / len(parts)).high < 0
    ]
