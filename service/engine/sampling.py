"""Sampling for a batch whose rows have different parameters: the transform from logits to distributions, seeded noise, draws.

Filters apply to the distribution at T = 1 in mlx-lm's order (top-p, min-p, top-k), then the temperature. A row's distribution
equals that of `mlx_lm.sample_utils.make_sampler` with the same values. The logits of draft and target go through the same
transform, because the accept rules need the p and q from which tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from service.core import AcceptRule, Sampling

_NEVER = -float("inf")


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of B rows, as arrays.

    temperature, top_p, min_p, top_k: (B, 1, 1). bias: (B, 1, V), float32; None: no row has one. greedy, rejection: (B,)
    booleans; rejection: rows that use rejection sampling. filtered, sampled, seeded, unseeded: whether any row needs filters,
    is not greedy, has a seed, uses rejection sampling. Work that no row needs is skipped.
    """

    rows: tuple[Sampling, ...]
    temperature: mx.array
    top_p: mx.array
    min_p: mx.array
    top_k: mx.array
    bias: mx.array | None
    greedy: mx.array
    rejection: mx.array
    filtered: bool
    sampled: bool
    seeded: bool
    unseeded: bool

    @classmethod
    def of(cls, rows: Sequence[Sampling], vocabulary: int) -> SamplingBatch:
        """The parameters of these rows. vocabulary: the logits' width V."""

        def column(values: list[float]) -> mx.array:
            return mx.array(values, dtype=mx.float32).reshape(-1, 1, 1)

        top_k = [row.top_k if 0 < row.top_k < vocabulary else vocabulary for row in rows]
        return cls(
            rows=tuple(rows),
            temperature=column([1.0 if row.greedy else row.temperature for row in rows]),
            top_p=column([row.top_p for row in rows]),
            min_p=column([row.min_p for row in rows]),
            top_k=mx.array(top_k, dtype=mx.int32).reshape(-1, 1, 1),
            bias=_bias(rows, vocabulary),
            greedy=mx.array([row.greedy for row in rows]),
            rejection=mx.array([row.rule is AcceptRule.REJECTION for row in rows]),
            filtered=any(
                not row.greedy and (row.top_p < 1.0 or row.min_p > 0.0 or 0 < row.top_k < vocabulary) for row in rows
            ),
            sampled=any(not row.greedy for row in rows),
            seeded=any(not row.greedy and row.seed is not None for row in rows),
            unseeded=any(row.rule is AcceptRule.REJECTION for row in rows),
        )

    def leaves(self) -> tuple[Any, ...]:
        """What a traced call needs of it; less if all rows are greedy."""
        parameters = (self.temperature, self.top_p, self.min_p, self.top_k) if self.sampled else (None,) * 4
        return (
            *parameters,
            self.bias,
            self.greedy,
            self.rejection,
            self.filtered,
            self.sampled,
            self.seeded,
            self.unseeded,
        )

    @classmethod
    def of_leaves(cls, leaves: Sequence[Any]) -> SamplingBatch:
        """The inverse of `leaves`, without the rows' settings."""
        return cls((), *leaves)


def _bias(rows: Sequence[Sampling], vocabulary: int) -> mx.array | None:
    if not any(row.logit_bias for row in rows):
        return None
    bias = np.zeros((len(rows), 1, vocabulary), dtype=np.float32)
    for i, row in enumerate(rows):
        for token, added in row.logit_bias:
            bias[i, 0, token] += added
    return mx.array(bias)


def biased(logits: mx.array, batch: SamplingBatch) -> mx.array:
    """Logits (B, N, V) with each row's bias added."""
    return logits if batch.bias is None else logits + batch.bias.astype(logits.dtype)


def normaliser(logits: mx.array) -> mx.array:
    """log-sum-exp of logits (B, N, V) over the vocabulary: (B, N, 1), float32."""
    return mx.logsumexp(logits.astype(mx.float32), axis=-1, keepdims=True)


def transform(logits: mx.array, batch: SamplingBatch, lse: mx.array | None = None) -> mx.array:
    """The distribution that each row draws from: log-probabilities (B, N, V), -inf where a filter removed a token.

    logits: (B, N, V). lse: their `normaliser`, computed if None. Greedy rows are returned unfiltered at T = 1, and a batch of
    only greedy rows as its logits, because only their argmax is used.
    """
    if not batch.sampled:
        return logits
    logp = logits.astype(mx.float32) - (normaliser(logits) if lse is None else lse)
    if batch.filtered:
        logp = mx.where(logp < _threshold(logp, batch), _NEVER, logp)
    logp = logp / batch.temperature
    return logp - mx.logsumexp(logp, axis=-1, keepdims=True)


def _threshold(logp: mx.array, batch: SamplingBatch) -> mx.array:
    """The smallest log-probability (B, N, 1) that passes all filters. Each filter keeps the most likely tokens down to a
    threshold, so the highest of the three thresholds applies them all."""
    descending = -mx.sort(-logp, axis=-1)
    mass = mx.cumsum(mx.exp(descending), axis=-1)
    total = mass[..., -1:]
    above = mass - mx.exp(descending)
    count = mx.maximum((above < batch.top_p * total).sum(axis=-1, keepdims=True), 1)
    count = mx.where(batch.top_p < 1.0, count, logp.shape[-1])
    count = mx.minimum(count, batch.top_k)
    by_count = mx.take_along_axis(descending, count - 1, axis=-1)
    by_min_p = mx.where(batch.min_p > 0.0, descending[..., :1] + mx.log(batch.min_p), _NEVER)
    return mx.where(batch.greedy.reshape(-1, 1, 1), _NEVER, mx.maximum(by_count, by_min_p))


def fit(logits: mx.array, vocabulary: int) -> mx.array:
    """A draft's logits (..., W) at the target's width (..., vocabulary): padded with -inf, or truncated."""
    missing = vocabulary - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocabulary]
    padding = mx.full((*logits.shape[:-1], missing), _NEVER, dtype=logits.dtype)
    return mx.concatenate([logits, padding], axis=-1)


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """The Threefry key of an output position under a seed: SplitMix64 of both, as two 32-bit words."""
    mask = (1 << 64) - 1
    z = (seed ^ (position * 0x9E3779B97F4A7C15)) & mask
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        z = ((z ^ (z >> shift)) * multiplier) & mask
    z ^= z >> 31
    return z >> 32, z & 0xFFFFFFFF


def gumbel(keys: Sequence[tuple[int, int]], vocabulary: int) -> mx.array:
    """Standard Gumbel noise (len(keys), V), the same on every back end for the same keys and V.

    vocabulary: the target's width V. Threefry's counter depends on it, so another width gives different noise.
    """
    draw = mx.vmap(lambda key: mx.random.gumbel((vocabulary,), key=key))
    return draw(mx.array(np.array(keys, dtype=np.uint32)))


class SharedNoise:
    """The `shared_noise` of a round, computed on demand because the draft length is not known in advance."""

    def __init__(self, batch: SamplingBatch, starts: Sequence[int], vocabulary: int) -> None:
        self._noise: mx.array | None = None
        self._compute = lambda at, n: shared_noise(batch, [start + at for start in starts], n, vocabulary)

    def at(self, position: int) -> mx.array | None:
        """Noise (B, 1, V) of one position of the round, counted from 0; None if no row is seeded."""
        noise = self.first(position + 1)
        return None if noise is None else noise[:, -1:]

    def first(self, count: int) -> mx.array | None:
        """Noise (B, count, V) of the round's first positions; None if no row is seeded."""
        have = 0 if self._noise is None else self._noise.shape[1]
        if have < count and (more := self._compute(have, count - have)) is not None:
            self._noise = more if self._noise is None else mx.concatenate([self._noise, more], axis=1)
        return None if self._noise is None else self._noise[:, :count]


def shared_noise(batch: SamplingBatch, starts: Sequence[int], count: int, vocabulary: int) -> mx.array | None:
    """Gumbel noise (B, count, V) for output positions starts[b] to starts[b] + count - 1, the same for draft and target.

    Zero for greedy rows and rows without a seed; None if no row is seeded.
    """
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
    """Gumbel-max draw (B, N) from logp (B, N, V): argmax of logp + noise. noise None: argmax of logp (greedy)."""
    return mx.argmax(logp if noise is None else logp + noise, axis=-1)


def draw(logp: mx.array, batch: SamplingBatch, noise: mx.array | None, key: mx.array) -> mx.array:
    """One token for each row and position (B, N): with shared noise under the match rule, independently under rejection
    sampling."""
    chosen = choose(logp, noise)
    if not batch.unseeded:
        return chosen
    independent = mx.random.categorical(logp, axis=-1, key=key).astype(chosen.dtype)
    return mx.where(batch.rejection[:, None], independent, chosen)
