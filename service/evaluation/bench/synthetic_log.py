"""A synthetic log of any size: generations with evidence as a server records them, written by the store's own code."""

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
from service.store.log.generations import Generations

CASES, TOKENS, PROMPT_TOKENS = 25, 64, 96
"""Failure cases, output and prompt tokens of one generation."""
DOMAINS = tuple(f"topic-{i}" for i in range(8))
TIES = 0.04
"""Share of the failure cases that are near-ties."""
BATCH = 500
START = datetime(2026, 1, 1, tzinfo=UTC)


def fill_log(
    generations: Generations, who: Provenance, cases: int, on_step: Callable[[int, int], None] = lambda done, of: None
) -> int:
    """Write at least `cases` failure cases that no run has had, and return the number of generations that hold them.

    Each generation has CASES of them; one in five generations is held out by its prompt's hash, as always. Targets have their
    full size (12 KB) and are all the same. on_step: (cases written, of all). Raises StoreError.
    """
    count = -(-cases // CASES)
    waiting: Future[int] | None = None
    for start in range(0, count, BATCH):
        made = synthetic_generations(who, start, min(start + BATCH, count))
        if waiting is not None:
            waiting.result()
            on_step(start * CASES, cases)
        waiting = generations.add(made)
    if waiting is not None:
        waiting.result()
    return count


def synthetic_generations(who: Provenance, first: int, end: int) -> list[Generation]:
    """Generations number `first` to `end` - 1, the same every time."""
    targets = _targets()
    return [_generation(number, who, targets) for number in range(first, end)]


def _generation(number: int, who: Provenance, targets: Targets) -> Generation:
    rng = random.Random(number)
    failed = sorted(rng.sample(range(TOKENS), CASES))
    # A round ends at each failure; what was drafted before it in the round was accepted.
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
    logprobs = np.log(rng.dirichlet(np.full(TOP_TARGETS + 1, 0.2), size=TOKENS) + 1e-6)
    return Targets(
        TOP_TARGETS,
        rng.integers(0, 49_152, (TOKENS, TOP_TARGETS)).astype("<u4").tobytes(),
        np.sort(logprobs[:, :-1], axis=1)[:, ::-1].astype("<f2").tobytes(),
        logprobs[:, -1].astype("<f2").tobytes(),
    )
