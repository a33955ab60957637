"""What a draft can be taught to minimise, position by position, over the target's most likely tokens and one bucket for all
others.

logp, logq: (N, top + 1) log-probabilities of target and draft, the last column the mass outside the top. Each answer is (N,),
in nats but for total variation, and 0 where both say the same, but for ARGMAX.
"""

from __future__ import annotations

import math
from enum import StrEnum

import mlx.core as mx

NEVER = -60.0
"""A log-probability that stands for none: finite, so that differences and their gradients are."""
_RARE = math.log(1e-8)
"""Least log-probability of the target that reverse KL divides by: a bucket that was stored as empty is only nearly so."""
_ETA = 3.0
"""How soon LK leaves KL behind as the overlap grows (Nebius, arXiv 2602.23881)."""


class Objective(StrEnum):
    """KL: forward, from target to draft. TV: 1 - Σ min(p, q), one minus the acceptance of rejection sampling. LK: forward KL
    where the two overlap little, -log of the overlap where they overlap much. ARGMAX: cross-entropy of the target's best
    token."""

    KL = "kl"
    REVERSE_KL = "reverse_kl"
    TV = "tv"
    JSD = "jsd"
    LK = "lk"
    ARGMAX = "argmax"


LEARNT = Objective.JSD
"""What a run minimises (docs/learning.md has the tables, docs/decisions.md the streams)."""


def each(objective: Objective, logp: mx.array, logq: mx.array) -> mx.array:
    """The objective's value at each position, (N,); logp, logq: (N, top + 1)."""
    match objective:
        case Objective.KL:
            return forward_kl(logp, logq)
        case Objective.REVERSE_KL:
            return forward_kl(logq, mx.maximum(logp, _RARE))
        case Objective.TV:
            return 1.0 - _overlap(logp, logq)
        case Objective.JSD:
            logp, logq = mx.maximum(logp, NEVER), mx.maximum(logq, NEVER)
            middle = mx.logaddexp(logp, logq) - math.log(2.0)
            return 0.5 * (forward_kl(logp, middle) + forward_kl(logq, middle))
        case Objective.LK:
            overlap = mx.maximum(_overlap(logp, logq), 1e-8)
            # A position's own overlap says whether it is still warming up.
            share = mx.exp(-_ETA * mx.stop_gradient(overlap))
            return share * forward_kl(logp, logq) - (1.0 - share) * mx.log(overlap)
        case Objective.ARGMAX:
            best = mx.argmax(logp[:, :-1], axis=-1, keepdims=True)
            # A poisoned target must not pass for a sound one.
            return -mx.take_along_axis(logq, best, axis=-1)[:, 0] + 0.0 * logp.max(axis=-1)


def forward_kl(logp: mx.array, logq: mx.array) -> mx.array:
    """Σ p log(p / q), of which a term is 0 where p is. NaN stays NaN: a poisoned target must not pass for an empty one."""
    none = logp == -float("inf")
    safe = mx.where(none, 0.0, logp)
    return mx.where(none, 0.0, mx.exp(safe) * (safe - mx.where(none, 0.0, logq))).sum(axis=-1)


def _overlap(logp: mx.array, logq: mx.array) -> mx.array:
    """Σ min(p, q): exact over the top, and the upper end of what the rest can hold."""
    return mx.minimum(mx.exp(logp), mx.exp(logq)).sum(axis=-1)
