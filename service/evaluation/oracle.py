"""The oracle: the target alone, on mlx-lm's own caches, token by token or teacher-forced on a given text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from service.learning.teacher_forcing import response_logits


@dataclass(frozen=True, slots=True)
class Mismatches:
    """positions: output positions whose token is not the target's argmax. near_ties: of these, where the gap between the two
    log-probabilities is within the rounding of passes of different shapes."""

    positions: int = 0
    near_ties: int = 0


def prefilled_cache(model: nn.Module, prompt: Sequence[int], chunk: int = 512) -> list[Any]:
    """A cache of mlx-lm's with all of the prompt but its last token, evaluated, with which decoding starts. chunk: prompt
    tokens of a call."""
    cache: list[Any] = make_prompt_cache(model)
    for start in range(0, len(prompt) - 1, chunk):
        model(mx.array([prompt[start : min(start + chunk, len(prompt) - 1)]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    return cache


def naive_greedy(target: nn.Module, prompt: Sequence[int], count: int, ends: frozenset[int]) -> list[int]:
    """The target's greedy output, one token at a time: `count` tokens, or up to and with the first of `ends`."""
    return naive_greedy_batch(target, [prompt], [count], ends)[0]


def naive_greedy_batch(
    target: nn.Module, prompts: Sequence[Sequence[int]], counts: Sequence[int], ends: frozenset[int]
) -> list[list[int]]:
    """Greedy outputs of several prompts of equal length, which mlx-lm's cache needs no padding for: counts[i] tokens of prompt
    i, or up to and with the first of `ends`."""
    cache = make_prompt_cache(target)
    feed, outputs = mx.array([list(prompt) for prompt in prompts]), [list[int]() for _ in prompts]

    def finished(row: int) -> bool:
        return len(outputs[row]) >= counts[row] or (bool(outputs[row]) and outputs[row][-1] in ends)

    while not all(map(finished, range(len(outputs)))):
        tokens = cast("list[int]", mx.argmax(target(feed, cache=cache)[:, -1], axis=-1).tolist())
        for row, token in enumerate(tokens):
            if not finished(row):
                outputs[row].append(token)
        # Finished rows stay in the batch; their tokens are ignored.
        feed = mx.array(tokens)[:, None]
    return outputs


def forced_mismatches(
    target: nn.Module,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    vocabulary: int,
    tie: float,
    on_step: Callable[[int], None] = lambda done: None,
) -> list[Mismatches]:
    """Compares each (prompt, output) with the target's argmax, in teacher-forced passes.

    vocabulary: width that logits are cut to. tie: a difference of log-probabilities below this counts as a near-tie, which the
    pass cannot decide: it sums in another order than decoding does. on_step: positions compared so far.
    """
    found, done = [Mismatches()] * len(texts), 0
    for span in response_logits(target, texts, vocabulary=vocabulary):
        tokens = mx.array([texts[text][1][i] for text, i in zip(span.text, span.position, strict=True)])
        gap = span.logits.max(axis=-1) - mx.take_along_axis(span.logits, tokens[:, None], axis=-1)[:, 0]
        wrong, near = gap > 0, (gap > 0) & (gap < tie)
        for text, missed, close in zip(span.text, np.array(wrong).tolist(), np.array(near).tolist(), strict=True):
            found[text] = Mismatches(found[text].positions + missed, found[text].near_ties + close)
        done += len(span.text)
        on_step(done)
    return found
