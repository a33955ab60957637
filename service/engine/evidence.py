"""What a round showed, for the log: gathered once it is known what was emitted, at those positions alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from service.engine.drafting import Proposal
from service.engine.sampling import SamplingBatch
from service.engine.targets import Floats, Ids, log_mass, tail_mass, top_and_mass, top_logits

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Evidence:
    """One row's share; arrays over the n positions the round emitted. p, q: probabilities of the first rejected draft token
    under target and draft at T = 1; 0 where none was."""

    logprobs: Floats
    sampled: Floats
    top_ids: Ids
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
    tokens, wrong = np.array([token for new in emitted for token in new]), np.array([token or 0 for token in rejected])
    # The rejected token stood where the row's last one was emitted.
    ids, top, mass, said, against = _seen(logits, rows, at, tokens, ends - 1, wrong)
    drawn: Floats = np.zeros_like(mass)
    if batch.sampled:
        where = mx.array(rows), mx.array(at)
        chosen = mx.take_along_axis(law[where], mx.array(tokens)[:, None], axis=-1)[:, 0]
        drawn = np.array(mx.where(batch.greedy[where[0]], 0.0, chosen))
    top, logprobs, p = top - mass[:, None], said - mass, np.exp(against - mass[ends - 1])
    tails: Floats = np.array(tail_mass(mx.array(top)))
    q = _draft_probabilities(proposal, [len(row) - 1 for row in emitted], rejected)
    found: list[Evidence] = []
    for i, (end, count) in enumerate(zip(ends.tolist(), counts.tolist(), strict=True)):
        own = slice(end - count, end)
        seen = logprobs[own], drawn[own], ids[own], top[own], tails[own]
        found.append(Evidence(*seen, p=float(p[i]) if rejected[i] is not None else 0.0, q=q[i]))
    return found


def _seen(
    logits: mx.array, rows: Ints, at: Ints, tokens: Ints, last: Ints, wrong: Ints
) -> tuple[Ids, Floats, Floats, Floats, Floats]:
    """Of logits (B, K+1, V) at positions (rows[i], at[i]): ids and values (n, top) of the largest, log of the sum of
    exponentials (n,), the value of tokens[i] (n,); and at last[b], one of the i, that of wrong[b] (B,)."""
    if mx.default_device().type == mx.cpu:
        host = np.asarray(logits.astype(mx.float32))
        ids, top, mass = top_and_mass([host[place] for place in zip(rows, at, strict=True)])
        return ids, top, mass, host[rows, at, tokens], host[rows[last], at[last], wrong]
    seen = logits[mx.array(rows), mx.array(at)].astype(mx.float32)
    ids, top = top_logits(seen)
    said = mx.take_along_axis(seen, mx.array(tokens)[:, None], axis=-1)[:, 0]
    mass, against = mx.logsumexp(seen, axis=-1), seen[mx.array(last), mx.array(wrong)]
    mx.eval(ids, top, mass, said, against)
    return np.array(ids), np.array(top), np.array(mass), np.array(said), np.array(against)


def _draft_probabilities(
    proposal: Proposal | None, places: Sequence[int], rejected: Sequence[int | None]
) -> list[float]:
    found = [0.0] * len(places)
    for place, logits in enumerate(proposal.logits if proposal is not None else ()):
        rows = [i for i, token in enumerate(rejected) if token is not None and places[i] == place]
        if rows:
            seen = logits[mx.array(rows), 0].astype(mx.float32)
            tokens = mx.array([rejected[i] or 0 for i in rows])[:, None]
            said = np.array(mx.take_along_axis(seen, tokens, axis=-1)[:, 0])
            for i, q in zip(rows, np.exp(said - _log_mass(seen)).tolist(), strict=True):
                found[i] = q
    return found


def _log_mass(logits: mx.array) -> Floats:
    """log of the sum of exponentials (n, V) -> (n,)."""
    if mx.default_device().type != mx.cpu:
        return np.array(mx.logsumexp(logits, axis=-1))
    rows = np.asarray(logits)
    spread = np.empty(rows.shape[1], dtype=np.float32)
    return np.array([log_mass(row, row.max(), spread) for row in rows], dtype=np.float32)
