"""The logged part of the target's distribution: the 32 most likely tokens and the probability mass of the rest."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from service.core import TOP_TARGETS, Targets

_BLOCK = 32

Floats = NDArray[np.float32]
Ids = NDArray[np.uint32]


def top_logits(logits: mx.array, count: int = TOP_TARGETS) -> tuple[mx.array, mx.array]:
    """The `count` largest logits along the last axis, descending: ids (uint32) and values, both (..., min(count, V)).

    Exact two-stage selection: the largest values are in the `count` blocks with the largest maxima, so only these are searched
    instead of the whole vocabulary. A block is strided over the vocabulary, because maxima over columns vectorise.
    """
    *lead, vocabulary = logits.shape
    count = min(count, vocabulary)
    if vocabulary <= count * _BLOCK:
        ids = mx.argpartition(-logits, kth=count - 1, axis=-1)[..., :count] if count < vocabulary else None
        candidates = logits if ids is None else mx.take_along_axis(logits, ids, axis=-1)
    else:
        padding = -vocabulary % _BLOCK
        if padding:
            logits = mx.concatenate([logits, mx.full((*lead, padding), -float("inf"), dtype=logits.dtype)], axis=-1)
        blocks = logits.reshape(*lead, _BLOCK, -1)
        best = mx.argpartition(-blocks.max(axis=-2), kth=count - 1, axis=-1)[..., None, :count]
        inside = mx.take_along_axis(blocks, best, axis=-1).reshape(*lead, -1)
        where = (mx.arange(_BLOCK)[:, None] * blocks.shape[-1] + best).reshape(*lead, -1)
        picked = mx.argpartition(-inside, kth=count - 1, axis=-1)[..., :count]
        candidates = mx.take_along_axis(inside, picked, axis=-1)
        ids = mx.take_along_axis(where, picked, axis=-1)
    order = mx.argsort(-candidates, axis=-1)
    values = mx.take_along_axis(candidates, order, axis=-1)
    ids = order if ids is None else mx.take_along_axis(ids, order, axis=-1)
    return ids.astype(mx.uint32), values


def tail_mass(logprobs: mx.array) -> mx.array:
    """log of the probability mass outside log-probabilities (..., n): (...); -inf if rounding leaves none."""
    return mx.log(mx.maximum(-mx.expm1(mx.minimum(mx.logsumexp(logprobs, axis=-1), 0.0)), 0.0))


def pack(ids: Sequence[np.ndarray], logprobs: Sequence[np.ndarray], tails: Sequence[np.ndarray]) -> Targets:
    """The Targets of one generation from the arrays of its rounds: ids and logprobs (n, top), tails (n,)."""
    return Targets(
        top=ids[0].shape[-1],
        ids=np.concatenate(ids).astype("<u4").tobytes(),
        logprobs=np.concatenate(logprobs).astype("<f2").tobytes(),
        tail=np.concatenate(tails).astype("<f2").tobytes(),
    )
