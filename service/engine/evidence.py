"""The evidence that a round logs: the target's 32 most likely tokens and their log-probabilities at each emitted position, and
the probabilities p and q of a rejected token under target and draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from service.engine import device
from service.engine.drafters.proposal import Proposal
from service.engine.sampling import SamplingBatch
from service.engine.top_logprobs import Floats, Ids, tail_mass, top_logits


@dataclass(slots=True)
class Evidence:
    """Evidence of one row of a round over n emitted positions; fields as in PositionEvidence.

    p, q: probabilities of the first rejected draft token under target and draft at T = 1; 0 if none was rejected.
    """

    logprobs: Floats
    sampled: Floats
    top_ids: Ids
    top_logprobs: Floats
    tails: Floats
    p: float
    q: float


@dataclass(frozen=True, slots=True)
class PositionEvidence:
    """Evidence of n positions, on the device.

    ids, top: (n, 32) the most likely tokens and their log-probabilities at T = 1. logprobs, sampled: (n,) the emitted token's
    log-probability at T = 1 and after the sampling transform (0 if greedy). tails: (n,) the log of the probability mass outside
    `top`. lse: (n,) the log-sum-exp of the logits, which stays on the device.
    """

    ids: mx.array
    top: mx.array
    logprobs: mx.array
    sampled: mx.array
    tails: mx.array
    lse: mx.array

    @classmethod
    def of(
        cls, logits: mx.array, distribution: mx.array | None, greedy: mx.array, tokens: mx.array
    ) -> PositionEvidence:
        """logits: (n, V). distribution: (n, V) log-probabilities after the sampling transform; None if all rows are greedy.
        greedy: (n,) booleans. tokens: (n,)."""
        ids, top = top_logits(logits.astype(mx.float32))
        lse = logsumexp(logits)
        top = top - lse[:, None]
        at = tokens[:, None]
        sampled = mx.zeros_like(lse)
        if distribution is not None:
            drawn = mx.take_along_axis(distribution, at, axis=-1)[:, 0].astype(mx.float32)
            sampled = mx.where(greedy, 0.0, drawn)
        logprobs = mx.take_along_axis(logits, at, axis=-1)[:, 0].astype(mx.float32) - lse
        return cls(ids, top, logprobs, sampled, tail_mass(top), lse)

    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays that the host reads, in the order of the fields."""
        return self.ids, self.top, self.logprobs, self.sampled, self.tails


@dataclass(frozen=True, slots=True)
class RoundEvidence:
    """Evidence of a round over B rows and K proposed tokens, on the device.

    positions: all B (K + 1) positions, row by row. p, q: (B, K) probabilities of the proposed tokens under target and draft at
    T = 1; None if nothing was drafted.
    """

    positions: PositionEvidence
    p: mx.array | None
    q: mx.array | None

    @classmethod
    def of(
        cls,
        logits: mx.array,
        distribution: mx.array,
        batch: SamplingBatch,
        emitted: mx.array,
        drafted: Proposal | None,
    ) -> RoundEvidence:
        """logits: (B, K+1, V) the target's. distribution: (B, K+1, V) after the sampling transform. emitted: (B, K+1). drafted:
        the draft's proposal, up to K tokens per row."""
        length, width = logits.shape[1:]
        positions = PositionEvidence.of(
            logits.reshape(-1, width),
            distribution.reshape(-1, width) if batch.sampled else None,
            mx.repeat(batch.greedy, length),
            emitted.reshape(-1),
        )
        if drafted is None:
            return cls(positions, None, None)
        count = drafted.tokens.shape[1]
        draft_logits = mx.concatenate(list(drafted.logits), axis=1)
        lse = positions.lse.reshape(-1, length)[:, :count]
        p = probabilities(logits[:, :count], drafted.tokens, lse)
        return cls(positions, p, probabilities(draft_logits, drafted.tokens, logsumexp(draft_logits)))

    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays that the host reads: those of `positions`, then p and q if present."""
        return (*self.positions.arrays(), *(each for each in (self.p, self.q) if each is not None))


def logsumexp(logits: mx.array) -> mx.array:
    """log-sum-exp of logits (..., V) over the vocabulary: (...), float32."""
    return mx.logsumexp(logits.astype(mx.float32), axis=-1)


def probabilities(logits: mx.array, tokens: mx.array, lse: mx.array) -> mx.array:
    """Probabilities (...), float32, of tokens (...) at T = 1. logits: (..., V). lse: (...) their `logsumexp`."""
    return mx.exp(mx.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0].astype(mx.float32) - lse)


def split_rows(
    measured: Sequence[NDArray[Any]], emitted: Sequence[Sequence[int]], drafted: Sequence[Sequence[int]]
) -> list[Evidence]:
    """Each row's evidence, from a round's evidence that was read together with it, so that no further host sync is needed.

    measured: the host's copy of `RoundEvidence.arrays`. emitted: each row's emitted tokens. drafted: each row's tokens that the
    draft proposed and the target verified.
    """
    pq = measured[5:]
    length = len(measured[0]) // len(emitted)
    evidence: list[Evidence] = []
    for row, (new, tried) in enumerate(zip(emitted, drafted, strict=True)):
        mine = slice(row * length, row * length + len(new))
        at = len(new) - 1
        p, q = (float(each[row, at]) for each in pq) if pq and len(new) <= len(tried) else (0.0, 0.0)
        evidence.append(_copied(measured, mine, p, q))
    return evidence


def gather_evidence(
    logits: mx.array,
    distribution: mx.array,
    batch: SamplingBatch,
    emitted: Sequence[Sequence[int]],
    drafted: Sequence[Sequence[int]],
    draft_logits: Sequence[mx.array],
) -> list[Evidence]:
    """Each row's evidence, computed after the round only for its emitted positions and rejected tokens. One more host sync.

    logits, distribution, batch: as in RoundEvidence.of. emitted, drafted: as in split_rows. draft_logits: the proposal's.
    """
    counts = np.array([len(tokens) for tokens in emitted])
    ends = np.cumsum(counts)
    rows = mx.array(np.repeat(np.arange(len(counts)), counts))
    at = mx.array(np.arange(ends[-1]) - np.repeat(ends - counts, counts))
    tokens = mx.array([token for new in emitted for token in new])
    positions = PositionEvidence.of(
        logits[rows, at], distribution[rows, at] if batch.sampled else None, batch.greedy[rows], tokens
    )
    rejected = {
        row: tried[len(new) - 1]
        for row, (new, tried) in enumerate(zip(emitted, drafted, strict=True))
        if len(new) <= len(tried)
    }
    pq: list[mx.array] = []
    if rejected and draft_logits:
        wrong, places = mx.array(list(rejected.values())), [len(emitted[row]) - 1 for row in rejected]
        theirs = mx.stack([draft_logits[place][row, 0] for row, place in zip(rejected, places, strict=True)])
        target_logits = logits[mx.array(list(rejected)), mx.array(places)]
        # The first rejected token is at the position of the row's last emitted token.
        lse = positions.lse[mx.array(ends[list(rejected)] - 1)]
        pq = [probabilities(target_logits, wrong, lse), probabilities(theirs, wrong, logsumexp(theirs))]
    measured = device.read(*positions.arrays(), *pq)
    pq_values = measured[5:]
    pq_by_row: dict[int, tuple[float, float]] = {}
    if pq_values:
        pq_by_row = {row: (float(p), float(q)) for row, p, q in zip(rejected, *pq_values, strict=True)}
    slices = [slice(end - count, end) for end, count in zip(ends.tolist(), counts.tolist(), strict=True)]
    return [_copied(measured, at, *pq_by_row.get(row, (0.0, 0.0))) for row, at in enumerate(slices)]


def _copied(measured: Sequence[NDArray[Any]], at: slice, p: float, q: float) -> Evidence:
    """The evidence of these positions. Copied, because a view would keep what was read for all rows alive."""
    ids, top, logprobs, sampled, tails = (each[at].copy() for each in measured[:5])
    return Evidence(logprobs, sampled, ids, top, tails, p, q)
