"""Holding served answers against the target decoding alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache


def naive_greedy(target: nn.Module, prompt: Sequence[int], count: int, ends: frozenset[int]) -> list[int]:
    """The oracle: the target alone, one token at a time, on mlx-lm's stock cache."""
    cache = make_prompt_cache(target)
    feed, out = mx.array([list(prompt)]), list[int]()
    while len(out) < count and not (out and out[-1] in ends):
        token = cast("int", mx.argmax(target(feed, cache=cache)[0, -1]).item())
        out.append(token)
        feed = mx.array([[token]])
    return out


def forced_mismatches(
    target: nn.Module, prompt: Sequence[int], output: Sequence[int], vocabulary: int, tie: float
) -> tuple[int, int]:
    """Of one teacher-forced pass over prompt and output: positions where the target would have said something else, and of
    these near-ties (`tie`: gap in log-probability below which the pass itself, whose sums are rounded in another order, does
    not decide)."""
    tokens = mx.array([[*prompt, *output[:-1]]])
    logits = target(tokens)[0, len(prompt) - 1 :, :vocabulary].astype(mx.float32)
    said = mx.array(list(output))
    gap = logits.max(axis=-1) - mx.take_along_axis(logits, said[:, None], axis=-1)[:, 0]
    wrong = gap > 0
    near = wrong & (gap < tie)
    return cast("int", wrong.sum().item()), cast("int", near.sum().item())
