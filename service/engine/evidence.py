"""What a round showed, for the log: gathered once it is known what was emitted, at those positions alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from service.engine.drafting import Proposal
from service.engine.sampling import SamplingBatch
from service.engine.targets import tail_mass, top_logits

Floats = NDArray[np.float32]


@dataclass(slots=True)
class Evidence:
    """One row's share; arrays over the n positions the round emitted. p, q: probabilities of the first rejected draft token
    under target and draft at T = 1; 0 where none was."""

    logprobs: Floats
    sampled: Floats
    top_ids: NDArray[np.uint32]
    top_logprobs: Floats
    tails: Floats
    p: float
    q: float


def gather(
    logits: mx.array,
    law: mx.array,
    batch: SamplingBatch,
    emitted: Sequence[Sequence[int]],
    drafted: Sequence[Sequence[int]],
    proposal: Proposal | None,
) -> list[Evidence]:
    """logits: (B, K+1, V) the target's, evaluated; law: (B, K+1, V) after the sampling transform. emitted: the tokens of
    each row's round. drafted: the draft's tokens that were tried there."""
    rejected = [
        tried[len(new) - 1] if len(new) <= len(tried) else None for new, tried in zip(emitted, drafted, strict=True)
    ]
    counts = np.array([len(tokens) for tokens in emitted])
    ends = np.cumsum(counts)
    rows = np.repeat(np.arange(len(counts)), counts)
    at = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    where, tokens = (mx.array(rows), mx.array(at)), mx.array([token for new in emitted for token in new])[:, None]
    # Where every position was emitted, as in rounds without a proposal, nothing needs to be copied.
    every = len(rows) == logits.shape[0] * logits.shape[1]
    seen = (logits.reshape(-1, logits.shape[-1]) if every else logits[where]).astype(mx.float32)
    ids, top = top_logits(seen)
    mass = log_mass(seen)
    logprobs = mx.take_along_axis(seen, tokens, axis=-1)[:, 0] - mass
    sampled = mx.zeros_like(mass)
    if batch.sampled:
        drawn = mx.take_along_axis(law[where], tokens, axis=-1)[:, 0]
        sampled = mx.where(batch.greedy[where[0]], 0.0, drawn)
    top = top - mass[:, None]
    # The rejected token stood where the row's last one was emitted.
    last, wrong = mx.array(ends - 1), mx.array([token or 0 for token in rejected])
    p = mx.exp(seen[last, wrong] - mass[last])
    told = (logprobs, sampled, ids, top, tail_mass(top), p)
    mx.eval(told)
    parts = [np.array(a) for a in told]
    q = _draft_probabilities(proposal, [len(row) - 1 for row in emitted], rejected)
    found: list[Evidence] = []
    for i, (end, count) in enumerate(zip(ends.tolist(), counts.tolist(), strict=True)):
        own = slice(end - count, end)
        found.append(
            Evidence(
                *(part[own] for part in parts[:5]), p=float(parts[5][i]) if rejected[i] is not None else 0.0, q=q[i]
            )
        )
    return found


def _draft_probabilities(
    proposal: Proposal | None, places: Sequence[int], rejected: Sequence[int | None]
) -> list[float]:
    found = [0.0] * len(places)
    for place, logits in enumerate(proposal.logits if proposal is not None else ()):
        rows = [i for i, token in enumerate(rejected) if token is not None and places[i] == place]
        if rows:
            seen = logits[mx.array(rows), 0].astype(mx.float32)
            tokens = mx.array([rejected[i] or 0 for i in rows])[:, None]
            q = mx.exp(mx.take_along_axis(seen, tokens, axis=-1)[:, 0] - log_mass(seen))
            for i, value in zip(rows, np.array(q).tolist(), strict=True):
                found[i] = value
    return found


def log_mass(logits: mx.array) -> mx.array:
    """log of the sum of exponentials (n, V) -> (n,). On the CPU by NumPy, whose exponential works on vectors there: MLX's takes
    10 ns an element, which at 16 rows was a fifth of a round. Row by row in one row's memory, which stays in the processor:
    fresh memory for all of them is dearer to get than the exponentials are."""
    if mx.default_device().type != mx.cpu:
        return mx.logsumexp(logits, axis=-1)
    mx.eval(logits)
    rows = np.asarray(logits)
    found, spread = np.empty(rows.shape[0], dtype=np.float32), np.empty(rows.shape[1], dtype=np.float32)
    for i, (values, most) in enumerate(zip(rows, rows.max(axis=-1), strict=True)):
        np.subtract(values, most, out=spread)
        found[i] = most + np.log(np.exp(spread, out=spread).sum())
    return mx.array(found)
