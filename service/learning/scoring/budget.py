"""The token budget of scoring, and the selection of texts that fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import mlx.nn as nn
import numpy as np

from service.core import Generation
from service.learning.scoring.acceptance import acceptance
from service.settings import GateSettings

RUN_SHARE = 0.25
"""Fraction of a run's time that scoring may take."""
FEWEST_TOKENS = 2**16
"""Minimum number of scored tokens if `gate.max_tokens` is not set: a short run would leave too few to judge on."""
LONGEST_SHARE = 1 / 8
"""Maximum fraction of the budget for one text, so that it does not displace all others."""
TIMED_TOKENS = 4096
"""Maximum tokens of the texts used to measure speed, unless a single text has more."""


def token_count(generation: Generation) -> int:
    """Tokens that one adapter reads to score the generation."""
    return len(generation.prompt.tokens) + len(generation.output)


def token_budget(
    model: nn.Module,
    texts: Sequence[Generation],
    gate: GateSettings,
    *,
    adapters: int,
    seconds: float,
    vocabulary: int,
    between: Callable[[], object],
) -> int:
    """Tokens that each of `adapters` adapters may be scored on.

    `gate.max_tokens` divided among them, if it is set. Otherwise as many as `model` reads in `seconds`, by its measured
    speed on some of these texts; at least FEWEST_TOKENS in total, and at least as many as `gate.min_prompts` texts
    have, which a verdict needs.
    """
    if gate.max_tokens is not None:
        return gate.max_tokens // adapters
    lengths = [token_count(text) for text in texts]
    if not lengths or sum(lengths) * adapters <= FEWEST_TOKENS:
        return FEWEST_TOKENS // adapters
    measured = int(seconds * _tokens_per_second(model, texts, vocabulary, between) / adapters)
    needed = int(np.mean(lengths) * gate.min_prompts + max(lengths))
    return max(measured, FEWEST_TOKENS // adapters, needed)


def within_budget(texts: Sequence[Generation], budget: int, seed: int) -> list[Generation]:
    """The texts that fit into `budget` tokens, in their order: all of them, or a systematic sample by length with a
    random start.

    Each text is drawn with the same probability, so that an estimate from the sample favours neither long nor short
    texts. If not all fit, texts longer than LONGEST_SHARE of the budget are left out.
    """
    lengths = np.array([token_count(text) for text in texts], dtype=np.int64)
    if lengths.sum() <= budget:
        return list(texts)
    fitting = np.flatnonzero(lengths <= LONGEST_SHARE * budget)
    longest_first = fitting[np.argsort(lengths[fitting], kind="stable")][::-1]
    # The smallest step that fits even with the worst start, which takes the longest text of each stratum.
    step = next(
        (n for n in range(1, len(fitting)) if lengths[longest_first[::n]].sum() <= budget), max(len(fitting), 1)
    )
    start = int(np.random.default_rng(seed).integers(step))
    chosen = set(longest_first[start::step].tolist())
    return [text for i, text in enumerate(texts) if i in chosen]


def _tokens_per_second(
    model: nn.Module, texts: Sequence[Generation], vocabulary: int, between: Callable[[], object]
) -> float:
    """Scoring speed of one adapter, without throttling and pauses."""
    timed, tokens = [texts[0]], token_count(texts[0])
    for text in texts[1:]:
        tokens += token_count(text)
        if tokens > TIMED_TOKENS:
            break
        timed.append(text)
    seconds = 1.0
    # The first call of a shape takes longer.
    for _ in range(2):
        between()
        started = time.perf_counter()
        acceptance(model, timed, vocabulary=vocabulary)
        seconds = max(time.perf_counter() - started, 1e-6)
    return sum(map(token_count, timed)) / seconds
