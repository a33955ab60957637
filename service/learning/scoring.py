"""The held-out scoring step: adapters compared on the same generations, none of which was trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.nn as nn

from service.core import Generation, Score
from service.learning.buffer import limited
from service.learning.offpolicy import acceptance, calls_by_length


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What to score on. golden: the log had too little, so the general set's held-back part was added."""

    generations: tuple[Generation, ...]
    golden: bool


def choose_held_out(
    logged: Sequence[Generation],
    golden: Callable[[], Sequence[Generation]],
    *,
    min_prompts: int,
    min_tokens: int,
    max_prompts: int,
) -> HeldOut:
    """The logged held-out generations, joined by the golden set while they are too few for a verdict. No client and no template
    has more than its share of a say, as in what is learnt from."""
    usable = limited([g for g in logged if g.output and g.prompt.tokens])[:max_prompts]
    if len(usable) >= min_prompts and sum(len(g.output) for g in usable) >= min_tokens:
        return HeldOut(tuple(usable), False)
    added = list(golden())[: max_prompts - len(usable)]
    return HeldOut((*usable, *added), bool(added))


def score(
    model: nn.Module,
    generations: Sequence[Generation],
    *,
    k: int,
    vocabulary: int,
    between: Callable[[], None] = lambda: None,
) -> list[Score]:
    """How `model` would have drafted each generation at draft lengths 1 to k."""
    found = acceptance(model, generations, vocabulary=vocabulary, k=k, between=between)
    return [
        Score(
            generation=generation.id,
            # No tag is empty: whatever clients call their domains, none is taken for those that have none.
            domain=generation.prompt.domain or "",
            tokens=len(generation.output),
            agreed=result.agreed,
            calls=calls_by_length(result.rates, k),
        )
        for generation, result in zip(generations, found, strict=True)
    ]
