"""Generations as the log holds them, made by tiny models."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import mlx.nn as nn

from service.core import Constraint, FailureCase, FinishReason, Generation, Prompt, Provenance, Sampling, Targets
from service.learning.targets import compute_targets
from tests.support.batches import decode

WHO = Provenance("target", "tokenizer", "draft")
VOCABULARY = 97


def generation(
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    id: str = "g",
    sampling: Sampling | None = None,
    targets: Targets | None = None,
    cases: Sequence[FailureCase] = (),
    domain: str | None = None,
) -> Generation:
    return Generation(
        id=id,
        prompt=Prompt(tuple(prompt), sampling or Sampling(), domain=domain),
        output=tuple(output),
        finish=FinishReason.LENGTH,
        rounds=(),
        cases=tuple(cases),
        logprobs=(0.0,) * len(output),
        sampled_logprobs=(0.0,) * len(output),
        targets=targets,
        provenance=WHO,
        created_at=datetime.now(UTC),
    )


def case(position: int, *, tie: bool = False) -> FailureCase:
    return FailureCase(position, drafted=1, target=2, p=0.1, q=0.5, margin=0.0 if tie else 1.0, tie=tie)


def random_texts(count: int, seed: int, *, vocabulary: int = VOCABULARY, longest: int = 40) -> list[Generation]:
    """Random prompts and outputs, without targets."""
    rng = random.Random(seed)

    def tokens(least: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(rng.randint(least, longest))]

    return [generation(tokens(2), tokens(1), id=f"g{i}") for i in range(count)]


def with_targets(model: nn.Module, generations: Sequence[Generation], vocabulary: int = VOCABULARY) -> list[Generation]:
    found = compute_targets(model, generations, vocabulary=vocabulary)
    return [replace(g, targets=targets) for g, targets in zip(generations, found, strict=True)]


def served(
    target: nn.Module,
    draft: nn.Module,
    samplings: Sequence[Sampling],
    *,
    k: int,
    seed: int = 0,
    vocabulary: int = VOCABULARY,
    max_rows: int = 32,
    constraint: Callable[[int], Constraint | None] = lambda row: None,
) -> list[Generation]:
    """The generations that the engine logs when it decodes one random prompt for every sampling. constraint: of each."""
    rng = random.Random(seed)
    prompts = [
        Prompt(
            tuple(rng.randrange(vocabulary) for _ in range(rng.randint(2, 20))), sampling, constraint=constraint(row)
        )
        for row, sampling in enumerate(samplings)
    ]
    rows = decode(target, draft, prompts, k=k, vocabulary=vocabulary, collect=True, seed=seed, max_rows=max_rows)
    made = [row.generation(WHO) for row in rows]
    assert all(g is not None for g in made)
    return [g for g in made if g is not None]
