"""Holding served answers against the target decoding alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from service.learning.forced import response_logits


def naive_greedy(target: nn.Module, prompt: Sequence[int], count: int, ends: frozenset[int]) -> list[int]:
    """The oracle: the target alone, one token at a time, on mlx-lm's stock cache."""
    return naive_greedy_batch(target, [prompt], [count], ends)[0]


def naive_greedy_batch(
    target: nn.Module, prompts: Sequence[Sequence[int]], counts: Sequence[int], ends: frozenset[int]
) -> list[list[int]]:
    """The same of several prompts of equal length, which need no padding in mlx-lm's stock cache: counts[i] tokens of prompt i,
    fewer where it ends."""
    cache = make_prompt_cache(target)
    feed, outputs = mx.array([list(prompt) for prompt in prompts]), [list[int]() for _ in prompts]

    def over(row: int) -> bool:
        return len(outputs[row]) >= counts[row] or (bool(outputs[row]) and outputs[row][-1] in ends)

    while not all(map(over, range(len(outputs)))):
        tokens = cast("list[int]", mx.argmax(target(feed, cache=cache)[:, -1], axis=-1).tolist())
        for row, token in enumerate(tokens):
            if not over(row):
                outputs[row].append(token)
        # A row that is over goes on unread.
        feed = mx.array(tokens)[:, None]
    return outputs


def forced_mismatches(
    target: nn.Module,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    vocabulary: int,
    tie: float,
    on_step: Callable[[int], None] = lambda done: None,
) -> list[tuple[int, int]]:
    """Of each (prompt, output) in teacher-forced passes of the target: positions where it would have said something else, and
    of these near-ties (`tie`: gap in log-probability below which the pass itself, whose sums are rounded in another order,
    does not decide). on_step: positions looked at so far."""
    found, done = [(0, 0)] * len(texts), 0
    for span in response_logits(target, texts, vocabulary=vocabulary):
        said = mx.array([texts[text][1][i] for text, i in zip(span.text, span.position, strict=True)])
        gap = span.logits.max(axis=-1) - mx.take_along_axis(span.logits, said[:, None], axis=-1)[:, 0]
        wrong, near = gap > 0, (gap > 0) & (gap < tie)
        for text, missed, close in zip(span.text, np.array(wrong).tolist(), np.array(near).tolist(), strict=True):
            found[text] = (found[text][0] + missed, found[text][1] + close)
        done += len(span.text)
        on_step(done)
    return found
