"""From logits to distributions and draws, for a batch whose rows sample differently.

The filters act on the distribution at T = 1 in mlx-lm's order (top-p, min-p, top-k), then the temperature is applied, so a
row here has the law of `mlx_lm.sample_utils.make_sampler` with the same values. Draft and target pass through the same
transform: the accept rules need p and q to be what was really drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from service.core import AcceptRule, Sampling

_NEVER = -float("inf")


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling of B rows as arrays of shape (B, 1, 1), and what none of the rows needs (so that it is not computed)."""

    rows: tuple[Sampling, ...]
    temperature: mx.array
    top_p: mx.array
    min_p: mx.array
    top_k: mx.array
    greedy: mx.array
    rejection: mx.array
    """(B,) rows under the rejection rule."""
    filtered: bool
    sampled: bool
    seeded: bool
    unseeded: bool

    @classmethod
    def of(cls, rows: Sequence[Sampling], vocabulary: int) -> SamplingBatch:
        """`vocabulary` is the logits' width V."""

        def column(values: list[float]) -> mx.array:
            return mx.array(values, dtype=mx.float32).reshape(-1, 1, 1)

        top_k = [row.top_k if 0 < row.top_k < vocabulary else vocabulary for row in rows]
        return cls(
            rows=tuple(rows),
            temperature=column([1.0 if row.greedy else row.temperature for row in rows]),
            top_p=column([row.top_p for row in rows]),
            min_p=column([row.min_p for row in rows]),
            top_k=mx.array(top_k, dtype=mx.int32).reshape(-1, 1, 1),
            greedy=mx.array([row.greedy for row in rows]),
            rejection=mx.array([row.rule is AcceptRule.REJECTION for row in rows]),
            filtered=any(
                not row.greedy and (row.top_p < 1.0 or row.min_p > 0.0 or 0 < row.top_k < vocabulary) for row in rows
            ),
            sampled=any(not row.greedy for row in rows),
            seeded=any(not row.greedy and row.seed is not None for row in rows),
            unseeded=any(row.rule is AcceptRule.REJECTION for row in rows),
        )


def normaliser(logits: mx.array) -> mx.array:
    """log of the sum of exponentials over the vocabulary, float32, (B, N, 1)."""
    return mx.logsumexp(logits.astype(mx.float32), axis=-1, keepdims=True)


def transform(logits: mx.array, batch: SamplingBatch, lse: mx.array | None = None) -> mx.array:
    """Log-probabilities (B, N, V) of what each row draws from; -inf where a filter removed a token.

    `lse`: the logits' normaliser where it is already at hand. Greedy rows come back at T = 1: their choice is an argmax,
    which no filter changes, and a batch of greedy rows alone comes back as the logits themselves.
    """
    if not batch.sampled:
        return logits
    logp = logits.astype(mx.float32) - (normaliser(logits) if lse is None else lse)
    if batch.filtered:
        logp = mx.where(logp < _threshold(logp, batch), _NEVER, logp)
    logp = logp / batch.temperature
    return logp - mx.logsumexp(logp, axis=-1, keepdims=True)


def _threshold(logp: mx.array, batch: SamplingBatch) -> mx.array:
    """The smallest log-probability each row keeps (B, N, 1). Every filter keeps the head of one descending order, so the
    strictest of the three thresholds is their composition."""
    descending = -mx.sort(-logp, axis=-1)
    mass = mx.cumsum(mx.exp(descending), axis=-1)
    total = mass[..., -1:]
    above = mass - mx.exp(descending)
    kept = mx.maximum((above < batch.top_p * total).sum(axis=-1, keepdims=True), 1)
    kept = mx.where(batch.top_p < 1.0, kept, logp.shape[-1])
    kept = mx.minimum(kept, batch.top_k)
    ranked = mx.take_along_axis(descending, kept - 1, axis=-1)
    by_min_p = mx.where(batch.min_p > 0.0, descending[..., :1] + mx.log(batch.min_p), _NEVER)
    return mx.where(batch.greedy.reshape(-1, 1, 1), _NEVER, mx.maximum(ranked, by_min_p))


def fit(logits: mx.array, vocabulary: int) -> mx.array:
    """Logits (..., W) of a draft as (..., vocabulary), the target's width: what is missing is -inf, what is over is cut."""
    missing = vocabulary - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocabulary]
    never = mx.full((*logits.shape[:-1], missing), _NEVER, dtype=logits.dtype)
    return mx.concatenate([logits, never], axis=-1)


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """The Threefry key of one output position under one seed: SplitMix64 of both, as two 32-bit words."""
    mask = (1 << 64) - 1
    z = (seed ^ (position * 0x9E3779B97F4A7C15)) & mask
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        z = ((z ^ (z >> shift)) * multiplier) & mask
    z ^= z >> 31
    return z >> 32, z & 0xFFFFFFFF


def gumbel(keys: Sequence[tuple[int, int]], vocabulary: int) -> mx.array:
    """Standard Gumbel noise (len(keys), V), a pure function of the keys and of V on every back end. V is the target's width:
    Threefry counts by it, so that another width gives other noise."""
    draw = mx.vmap(lambda key: mx.random.gumbel((vocabulary,), key=key))
    return draw(mx.array(np.array(keys, dtype=np.uint32)))


class SharedNoise:
    """`shared_noise` of a round, made as far as it is asked for: how far a draft goes is not known before."""

    def __init__(self, batch: SamplingBatch, starts: Sequence[int], vocabulary: int) -> None:
        self._made: mx.array | None = None
        self._more = lambda at, n: shared_noise(batch, [start + at for start in starts], n, vocabulary)

    def at(self, position: int) -> mx.array | None:
        """(B, 1, V), of the round's position counted from 0."""
        made = self.first(position + 1)
        return None if made is None else made[:, -1:]

    def first(self, count: int) -> mx.array | None:
        """(B, count, V), what is missing made at once."""
        have = 0 if self._made is None else self._made.shape[1]
        if have < count and (more := self._more(have, count - have)) is not None:
            self._made = more if self._made is None else mx.concatenate([self._made, more], axis=1)
        return None if self._made is None else self._made[:, :count]


def shared_noise(batch: SamplingBatch, starts: Sequence[int], count: int, vocabulary: int) -> mx.array | None:
    """Noise (B, count, V) for output positions starts[b] .. starts[b] + count - 1; zero for rows without a seed or greedy,
    None when no row needs any. Draft and target use the same array, which is what couples them."""
    if not batch.seeded:
        return None
    seeded = [not row.greedy and row.seed is not None for row in batch.rows]
    keys = [
        noise_key(row.seed or 0, start + i) if use else (0, 0)
        for row, start, use in zip(batch.rows, starts, seeded, strict=True)
        for i in range(count)
    ]
    noise = gumbel(keys, vocabulary).reshape(len(starts), count, vocabulary)
    return mx.where(mx.array(seeded).reshape(-1, 1, 1), noise, 0.0)


def choose(logp: mx.array, noise: mx.array | None) -> mx.array:
    """Gumbel-max draw (B, N): argmax of logp + noise. Without noise (greedy) the argmax itself."""
    return mx.argmax(logp if noise is None else logp + noise, axis=-1)


def draw(logp: mx.array, batch: SamplingBatch, noise: mx.array | None, key: mx.array) -> mx.array:
    """One token per row and position (B, N): rows under the match rule by shared noise, the others independently."""
    chosen = choose(logp, noise)
    if not batch.unseeded:
        return chosen
    independent = mx.random.categorical(logp, axis=-1, key=key).astype(chosen.dtype)
    return mx.where(batch.rejection[:, None], independent, chosen)
