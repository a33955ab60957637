"""The two exact accept rules, and which row is under which: pure functions of arrays.

Whatever the draft proposed, what comes out has the target's law. The match rule also makes it the target's very tokens:
the target's own choice at each position, of which the draft merely guessed some in advance.
"""

from __future__ import annotations

import mlx.core as mx

from service.engine.drafters.model import Proposal
from service.engine.sampling import SamplingBatch, choose


def accept(
    law: mx.array, batch: SamplingBatch, noise: mx.array | None, proposal: Proposal | None, key: mx.array
) -> tuple[mx.array, mx.array]:
    """What is kept of a proposal of K tokens a row (None: of 0), and the token after it, by each row's own rule.

    law: (B, K+1, V) the target's log-probabilities after the sampling transform. noise: (B, >= K+1, V), shared with the
    draft, None where no row is seeded. Returns accepted (B,) in 0..K and next (B,).
    """
    chosen = choose(law, None if noise is None else noise[:, : law.shape[1]])
    if proposal is None:
        accepted, following = mx.zeros((law.shape[0],), dtype=mx.int32), chosen[:, 0]
    else:
        accepted, following = match(chosen, proposal.tokens.astype(chosen.dtype), proposal.usable)
    if not batch.unseeded:
        return accepted, following
    if proposal is None or proposal.logq is None:
        drawn = mx.random.categorical(law[:, 0], axis=-1, key=key)
        return accepted, mx.where(batch.rejection, drawn.astype(following.dtype), following)
    kept, drawn = reject(law, proposal.logq, proposal.tokens, proposal.usable, key)
    return (
        mx.where(batch.rejection, kept.astype(accepted.dtype), accepted),
        mx.where(batch.rejection, drawn.astype(following.dtype), following),
    )


def emitted(accepted: mx.array, following: mx.array, drafted: mx.array) -> mx.array:
    """Tokens (B, K+1) of which a row says its first accepted[b] + 1: the drafts (B, K) it keeps, then the token after them."""
    padded = mx.concatenate([drafted, following[:, None].astype(drafted.dtype)], axis=1)
    return mx.where(mx.arange(padded.shape[1]) < accepted[:, None], padded, following[:, None])


def match(chosen: mx.array, drafted: mx.array, usable: mx.array) -> tuple[mx.array, mx.array]:
    """Keep drafts while they equal the target's own choices.

    chosen: (B, K+1) target choices (greedy, or Gumbel-max with noise shared with the draft). drafted: (B, K). usable: (B, K)
    false where nothing was proposed. Returns accepted (B,) in 0..K and the token after them (B,).
    """
    kept = mx.cumprod(((chosen[:, :-1] == drafted) & usable).astype(mx.int32), axis=-1)
    accepted = kept.sum(axis=-1)
    return accepted, mx.take_along_axis(chosen, accepted[:, None], axis=-1)[:, 0]


def reject(
    logp: mx.array, logq: mx.array, drafted: mx.array, usable: mx.array, key: mx.array
) -> tuple[mx.array, mx.array]:
    """Speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318).

    logp: (B, K+1, V) target log-probabilities, logq: (B, K, V) the draft's, both after the same transform. drafted: (B, K)
    tokens drawn from q. usable: (B, K) false where nothing was proposed or q is not a distribution (NaN): such a position
    is rejected and the target draws alone. Draft x is kept when u q(x) < p(x), with an independent u per position; at the
    first rejection the next token comes from max(p - q, 0) normalised, or from p where that is 0 everywhere; after K
    keeps, from p.
    Returns accepted (B,) and next (B,).
    """
    rows, k = drafted.shape
    u_key, next_key = mx.random.split(key)
    p_x = mx.take_along_axis(logp[:, :k], drafted[..., None], axis=-1)[..., 0]
    q_x = mx.take_along_axis(logq, drafted[..., None], axis=-1)[..., 0]
    u = mx.random.uniform(shape=(rows, k), key=u_key)
    # uniform draws from [0, 1): log 0 = -inf keeps whatever p allows at all, as u q < p does.
    keep = (mx.log(u) < p_x - q_x) & (p_x > -float("inf")) & usable
    accepted = mx.cumprod(keep.astype(mx.int32), axis=-1).sum(axis=-1)
    at = accepted[:, None, None]
    p = mx.exp(mx.take_along_axis(logp, at, axis=1)[:, 0])
    q = mx.concatenate([mx.where(usable[..., None], mx.exp(logq), 0.0), mx.zeros_like(logp[:, :1])], axis=1)
    residual = mx.maximum(p - mx.take_along_axis(q, at, axis=1)[:, 0], 0.0)
    law = mx.where(residual.sum(axis=-1, keepdims=True) > 0.0, residual, p)
    return accepted, mx.random.categorical(mx.log(law), axis=-1, key=next_key)
