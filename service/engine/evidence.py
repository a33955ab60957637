"""What a round showed, for the log: at each emitted token the target's 32 most likely ones and their probabilities, and for a
rejected draft token what target and draft gave it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from service.engine import device
from service.engine.drafters.model import Proposal
from service.engine.sampling import SamplingBatch
from service.engine.top_logprobs import Floats, Ids, tail_mass, top_logits


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


@dataclass(frozen=True, slots=True)
class PositionEvidence:
    """Of n positions, on the device. ids, top: (n, 32) the most likely tokens and their log-probabilities at T = 1. (n,) each:
    logprobs, sampled: the emitted token's log-probability at T = 1 and after the sampling transform (0 where greedy); tails:
    the log of the mass outside `top`; mass: the logits' normaliser, which is not read."""

    ids: mx.array
    top: mx.array
    logprobs: mx.array
    sampled: mx.array
    tails: mx.array
    mass: mx.array

    @classmethod
    def of(
        cls, logits: mx.array, distribution: mx.array | None, greedy: mx.array, tokens: mx.array
    ) -> PositionEvidence:
        """logits: (n, V). distribution: (n, V) log-probabilities after the sampling transform; None where all are greedy.
        greedy: (n,) booleans. tokens: (n,)."""
        ids, top = top_logits(logits.astype(mx.float32))
        mass = log_mass(logits)
        top = top - mass[:, None]
        at = tokens[:, None]
        sampled = mx.zeros_like(mass)
        if distribution is not None:
            drawn = mx.take_along_axis(distribution, at, axis=-1)[:, 0].astype(mx.float32)
            sampled = mx.where(greedy, 0.0, drawn)
        logprobs = mx.take_along_axis(logits, at, axis=-1)[:, 0].astype(mx.float32) - mass
        return cls(ids, top, logprobs, sampled, tail_mass(top), mass)

    def arrays(self) -> tuple[mx.array, ...]:
        """Those that are read, in the order of the fields."""
        return self.ids, self.top, self.logprobs, self.sampled, self.tails


@dataclass(frozen=True, slots=True)
class RoundEvidence:
    """Of a round over B rows and K proposed tokens, on the device: of all (K + 1) B positions, rows one after the other; p, q:
    (B, K) probabilities of the proposed tokens under target and draft at T = 1, None where nothing was drafted."""

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
        what the draft proposed, up to K tokens a row."""
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
        theirs = mx.concatenate(list(drafted.logits), axis=1)
        mass = positions.mass.reshape(-1, length)[:, :count]
        p = probabilities(logits[:, :count], drafted.tokens, mass)
        return cls(positions, p, probabilities(theirs, drafted.tokens, log_mass(theirs)))

    def arrays(self) -> tuple[mx.array, ...]:
        """All that there are."""
        return (*self.positions.arrays(), *(each for each in (self.p, self.q) if each is not None))


def log_mass(logits: mx.array) -> mx.array:
    """log of the sum of exponentials of logits (..., V): (...), float32."""
    return mx.logsumexp(logits.astype(mx.float32), axis=-1)


def probabilities(logits: mx.array, tokens: mx.array, mass: mx.array) -> mx.array:
    """Of tokens (...) under logits (..., V) at T = 1, by their `log_mass` (...): (...), float32."""
    return mx.exp(mx.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0].astype(mx.float32) - mass)


def split_rows(
    measured: RoundEvidence, emitted: Sequence[Sequence[int]], drafted: Sequence[Sequence[int]]
) -> list[Evidence]:
    """Each row's share of a round's evidence. emitted: tokens of each row's round. drafted: the draft's tokens that were tried
    there. The arrays were read with the round."""
    ids, top, logprobs, sampled, tails, *pq = (np.array(each) for each in measured.arrays())
    length = len(ids) // len(emitted)
    found: list[Evidence] = []
    for row, (new, tried) in enumerate(zip(emitted, drafted, strict=True)):
        own = slice(row * length, row * length + len(new))
        at = len(new) - 1
        p, q = (float(each[row, at]) for each in pq) if pq and len(new) <= len(tried) else (0.0, 0.0)
        found.append(Evidence(logprobs[own], sampled[own], ids[own], top[own], tails[own], p, q))
    return found


def gather(
    logits: mx.array,
    distribution: mx.array,
    batch: SamplingBatch,
    emitted: Sequence[Sequence[int]],
    drafted: Sequence[Sequence[int]],
    proposal: Proposal | None,
) -> list[Evidence]:
    """The same after the round was read, for the emitted positions and the rejected tokens alone: less to compute, one wait
    more."""
    counts = np.array([len(tokens) for tokens in emitted])
    ends = np.cumsum(counts)
    rows = mx.array(np.repeat(np.arange(len(counts)), counts))
    at = mx.array(np.arange(ends[-1]) - np.repeat(ends - counts, counts))
    tokens = mx.array([token for new in emitted for token in new])
    found = PositionEvidence.of(
        logits[rows, at], distribution[rows, at] if batch.sampled else None, batch.greedy[rows], tokens
    )
    rejected = {
        row: tried[len(new) - 1]
        for row, (new, tried) in enumerate(zip(emitted, drafted, strict=True))
        if len(new) <= len(tried)
    }
    pq: list[mx.array] = []
    if rejected and proposal is not None:
        wrong, places = mx.array(list(rejected.values())), [len(emitted[row]) - 1 for row in rejected]
        theirs = mx.stack([proposal.logits[place][row, 0] for row, place in zip(rejected, places, strict=True)])
        ours = logits[mx.array(list(rejected)), mx.array(places)]
        # The rejected token stood where the row's last one was emitted.
        mass = found.mass[mx.array(ends[list(rejected)] - 1)]
        pq = [probabilities(ours, wrong, mass), probabilities(theirs, wrong, log_mass(theirs))]
    ids, top, logprobs, sampled, tails, *read = device.read(*found.arrays(), *pq)
    both: dict[int, tuple[float, float]] = {}
    if read:
        both = {row: (float(p), float(q)) for row, p, q in zip(rejected, *read, strict=True)}
    own = [slice(end - count, end) for end, count in zip(ends.tolist(), counts.tolist(), strict=True)]
    return [
        Evidence(logprobs[at], sampled[at], ids[at], top[at], tails[at], *both.get(row, (0.0, 0.0)))
        for row, at in enumerate(own)
    ]
