"""The two accept rules of speculative decoding, as pure functions of arrays.

Both are exact. Rejection sampling yields the target's distribution. The match rule, for greedy or seeded rows, yields token by
token what the target alone would choose.
"""

from __future__ import annotations

import mlx.core as mx

from service.engine.drafters.proposal import Proposal
from service.engine.sampling import SamplingBatch, choose


def accept(
    distribution: mx.array, batch: SamplingBatch, noise: mx.array | None, proposal: Proposal | None, key: mx.array
) -> tuple[mx.array, mx.array]:
    """Verify a proposal of K tokens per row (None: K = 0), each row by its accept rule.

    distribution: (B, K+1, V) the target's log-probabilities after the sampling transform. noise: (B, >= K+1, V), shared with
    the draft; None if no row is seeded. Returns the number of accepted tokens (B,), 0 to K, and the token after them (B,): the
    corrected or the bonus token.
    """
    chosen = choose(distribution, None if noise is None else noise[:, : distribution.shape[1]])
    if proposal is None:
        accepted, following = mx.zeros((distribution.shape[0],), dtype=mx.int32), chosen[:, 0]
    else:
        accepted, following = match(chosen, proposal.tokens.astype(chosen.dtype), proposal.usable)
    if not batch.unseeded:
        return accepted, following
    if proposal is None or proposal.logq is None:
        drawn = mx.random.categorical(distribution[:, 0], axis=-1, key=key)
        return accepted, mx.where(batch.rejection, drawn.astype(following.dtype), following)
    sampled, drawn = reject(distribution, proposal.logq, proposal.tokens, proposal.usable, key)
    return (
        mx.where(batch.rejection, sampled.astype(accepted.dtype), accepted),
        mx.where(batch.rejection, drawn.astype(following.dtype), following),
    )


def finite_positions(logits: mx.array) -> mx.array:
    """Whether a token can be chosen from logits (..., V), at each position: (...) booleans.

    False if a logit is NaN or +inf, or all are -inf. A single -inf is valid, since masked vocabularies contain them. Checking
    the maximum is sufficient because MLX's reduction propagates NaN on every back end, and it costs less than another pass over
    all values.
    """
    return mx.isfinite(mx.max(logits, axis=-1))


def emitted_tokens(accepted: mx.array, following: mx.array, drafted: mx.array) -> mx.array:
    """Tokens (B, K+1), of which row b emits the first accepted[b] + 1: its accepted tokens, then the token after them.

    accepted, following: (B,) as returned by `accept`. drafted: (B, K) the proposal.
    """
    padded = mx.concatenate([drafted, following[:, None].astype(drafted.dtype)], axis=1)
    return mx.where(mx.arange(padded.shape[1]) < accepted[:, None], padded, following[:, None])


def match(chosen: mx.array, drafted: mx.array, usable: mx.array) -> tuple[mx.array, mx.array]:
    """The match rule: accept proposed tokens as long as they equal the target's choices.

    chosen: (B, K+1) the target's choices: argmax, or Gumbel-max with noise shared with the draft. drafted: (B, K). usable: (B,
    K) false where nothing was proposed. Returns accepted (B,), 0 to K, and the token after them (B,).
    """
    matched = mx.cumprod(((chosen[:, :-1] == drafted) & usable).astype(mx.int32), axis=-1)
    accepted = matched.sum(axis=-1)
    return accepted, mx.take_along_axis(chosen, accepted[:, None], axis=-1)[:, 0]


def reject(
    logp: mx.array, logq: mx.array, drafted: mx.array, usable: mx.array, key: mx.array
) -> tuple[mx.array, mx.array]:
    """Rejection sampling (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318).

    logp: (B, K+1, V) the target's log-probabilities. logq: (B, K, V) the draft's, after the same transform. drafted: (B, K)
    tokens drawn from q. usable: (B, K) false where nothing was proposed or q is not a distribution (NaN). Such a position is
    rejected and its token drawn from p.

    Token x is accepted when u q(x) < p(x), with an independent uniform u for each position. The token after the first rejection
    is drawn from the normalised max(p - q, 0), or from p where that is 0 everywhere. After K accepted tokens it is drawn from
    p. Returns accepted (B,) and that token (B,).
    """
    rows, k = drafted.shape
    u_key, next_key = mx.random.split(key)
    p_x = mx.take_along_axis(logp[:, :k], drafted[..., None], axis=-1)[..., 0]
    q_x = mx.take_along_axis(logq, drafted[..., None], axis=-1)[..., 0]
    u = mx.random.uniform(shape=(rows, k), key=u_key)
    # u is in [0, 1). log 0 = -inf accepts every token with p(x) > 0, as u q(x) < p(x) does.
    accept_each = (mx.log(u) < p_x - q_x) & (p_x > -float("inf")) & usable
    accepted = mx.cumprod(accept_each.astype(mx.int32), axis=-1).sum(axis=-1)
    at = accepted[:, None, None]
    p = mx.exp(mx.take_along_axis(logp, at, axis=1)[:, 0])
    q = mx.concatenate([mx.where(usable[..., None], mx.exp(logq), 0.0), mx.zeros_like(logp[:, :1])], axis=1)
    residual = mx.maximum(p - mx.take_along_axis(q, at, axis=1)[:, 0], 0.0)
    weights = mx.where(residual.sum(axis=-1, keepdims=True) > 0.0, residual, p)
    return accepted, mx.random.categorical(mx.log(weights), axis=-1, key=next_key)
