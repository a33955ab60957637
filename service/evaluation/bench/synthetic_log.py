"""A log of any size, as a server leaves it: generations with evidence, written by the store's own code."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import numpy as np

from service.core import (
    TOP_TARGETS,
    FailureCase,
    FinishReason,
    Generation,
    Prompt,
    Provenance,
    Round,
    Sampling,
    Targets,
)
from service.store.generations import Generations

CASES, TOKENS, PROMPT_TOKENS = 25, 64, 96
"""Failure cases, output and prompt tokens of one generation."""
DOMAINS = tuple(f"topic-{i}" for i in range(8))
TIES = 0.04
"""Share of the cases that are near-ties."""
BATCH = 500
START = datetime(2026, 1, 1, tzinfo=UTC)


def fill(
    generations: Generations, who: Provenance, cases: int, on_step: Callable[[int, int], None] = lambda done, of: None
) -> int:
    """Write at least `cases` open failure cases, 25 a generation of 64 tokens; returns how many generations hold them.

    One in five is held out by its prompt's hash, as always. Targets are of full size (12 KB) and alike.
    """
    count = -(-cases // CASES)
    waiting: Future[int] | None = None
    for start in range(0, count, BATCH):
        made = generated(who, start, min(start + BATCH, count))
        if waiting is not None:
            waiting.result()
            on_step(start * CASES, cases)
        waiting = generations.add(made)
    if waiting is not None:
        waiting.result()
    return count


def generated(who: Provenance, first: int, end: int) -> list[Generation]:
    """The generations with these numbers, always the same."""
    targets = _targets()
    return [_generation(number, who, targets) for number in range(first, end)]


def _generation(number: int, who: Provenance, targets: Targets) -> Generation:
    rng = random.Random(number)
    failed = sorted(rng.sample(range(TOKENS), CASES))
    # A round ends at each failure: what it drafted before that was kept.
    edges = [-1, *failed]
    rounds = tuple(Round(0, before + 1, 3, min(at - before - 1, 3), at - before) for before, at in pairwise(edges))
    logprobs = tuple(-rng.random() for _ in range(TOKENS))
    return Generation(
        id=f"{number:032x}",
        prompt=Prompt(
            tokens=tuple(rng.choices(range(49_152), k=PROMPT_TOKENS)),
            sampling=Sampling(max_tokens=TOKENS),
            domain=DOMAINS[number % len(DOMAINS)],
            client=f"client-{number % 100}",
            first_user=f"Question {number} about {DOMAINS[number % len(DOMAINS)]}: " + "what is known of it? " * 10,
        ),
        output=tuple(rng.choices(range(49_152), k=TOKENS)),
        finish=FinishReason.LENGTH,
        rounds=rounds,
        cases=tuple(_case(position, rng) for position in failed),
        logprobs=logprobs,
        sampled_logprobs=(0.0,) * TOKENS,
        targets=targets,
        provenance=who,
        created_at=START + timedelta(seconds=number),
    )


def _case(position: int, rng: random.Random) -> FailureCase:
    tie = rng.random() < TIES
    drafted, target = rng.sample(range(49_152), 2)
    return FailureCase(position, drafted, target, rng.random(), rng.random(), 0.0 if tie else 1.0 + rng.random(), tie)


def _targets() -> Targets:
    rng = np.random.default_rng(0)
    law = np.log(rng.dirichlet(np.full(TOP_TARGETS + 1, 0.2), size=TOKENS) + 1e-6)
    return Targets(
        TOP_TARGETS,
        rng.integers(0, 49_152, (TOKENS, TOP_TARGETS)).astype("<u4").tobytes(),
        np.sort(law[:, :-1], axis=1)[:, ::-1].astype("<f2").tobytes(),
        law[:, -1].astype("<f2").tobytes(),
    )
