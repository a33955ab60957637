"""Whether a candidate may replace the adapter that serves. A pure function of both adapters' scores on the same generations and
of what rounds cost where they serve (lifecycle/comparison.py)."""

from __future__ import annotations

from collections.abc import Sequence

from service.core import Score, Verdict
from service.lifecycle.comparison import MIN_CONVERSATIONS, TAIL, Comparison
from service.settings import GateSettings

WORTHWHILE = 0.005
"""A candidate that seems to gain less than this is not worth a swap: the draft's cached prefixes are lost, and the
next run waits for the watch. It also keeps out candidates that differ from the active one by noise alone."""
GOLDEN = "golden set"
"""Its name among the domains of a verdict."""

NO_DOMAIN = "requests without a domain"


def judge(
    candidate: Sequence[Score],
    active: Sequence[Score],
    rules: GateSettings,
    *,
    golden: tuple[Sequence[Score], Sequence[Score]] = ((), ()),
    seconds: Sequence[float] | None = None,
    active_seconds: Sequence[float] | None = None,
    seed: int,
) -> Verdict:
    """Whether `candidate` may replace `active`. golden: the scores of both on the golden set, which only guards: it blocks as a
    domain does and is no part of the gain. seconds: what a round costs that drafts 1, 2, ... tokens with the candidate; None:
    both are compared at the longest draft length, by their calls. active_seconds: what it costs with the active one; None: the
    same.

    Promoted when the gain is worth a swap and the lower end of its two-sided 90 % interval above 0, there are at least
    `min_prompts` generations of five or more conversations and `min_tokens` tokens, and no domain of five or more conversations
    blocks. A domain does when its gain is below -domain_tolerance and surely below 0: its whole interval is, widened for the
    number of domains, so that many of them do not make it likely that one is blocked by chance (docs/decisions.md).

    Raises ValueError when the two lists are not about the same generations and draft lengths, or the costs about others.
    """
    both = Comparison(candidate, active, seconds, active_seconds)
    if both.empty:
        return Verdict(False, "nothing to compare on", 0, 0, 0.0, 0.0, 0.0)
    whole = both.gain(rules.bootstrap, seed)
    guard = Comparison(*golden, seconds, active_seconds)
    domains = {**both.domains(), **({GOLDEN: guard} if guard.conversations >= MIN_CONVERSATIONS else {})}
    parts = {name: each.gain(rules.bootstrap, seed) for name, each in domains.items()}
    certain = {name: each.gain(rules.bootstrap, seed, TAIL / len(domains)).high < 0 for name, each in domains.items()}
    blocked = [name for name in sorted(parts) if parts[name].gain < -rules.domain_tolerance and certain[name]]
    if both.generations < rules.min_prompts:
        promoted, reason = False, f"{both.generations} of {rules.min_prompts} prompts"
    elif both.tokens < rules.min_tokens:
        promoted, reason = False, f"{both.tokens} of {rules.min_tokens} tokens"
    elif both.conversations < MIN_CONVERSATIONS:
        promoted, reason = False, f"{both.conversations} of {MIN_CONVERSATIONS} conversations"
    elif whole.low <= 0:
        promoted, reason = False, f"not proven better: {whole}"
    elif whole.gain < WORTHWHILE:
        promoted, reason = False, f"too little better: {whole}"
    elif blocked:
        promoted, reason = False, f"worse on {', '.join(name or NO_DOMAIN for name in blocked)}: {parts[blocked[0]]}"
    else:
        promoted, reason = True, f"better: {whole}"
    intervals = {name: each.interval for name, each in parts.items()}
    return Verdict(promoted, reason, both.generations, both.tokens, *whole.interval, domains=intervals)
