"""The held-out scoring step: adapters compared on the same generations, none of which was trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.nn as nn

from service.core import Generation, Provenance, Score
from service.learning.masks import NO_MASKS, Masks
from service.learning.offpolicy import acceptance, calls_by_length, expected_accepted, predictable_rounds
from service.store.log.generations import Generations
from service.store.log.sampler import conversation, sample

POOL = 2
"""Conversations drawn from, for each text of a gate: so that successive gates share about half of their texts."""


def held_out(stored: Generations, who: Provenance, *, limit: int, run: int) -> list[Generation]:
    """At most `limit` logged generations to judge the candidate of `run` on: none was trained on, equal texts count once, no
    client and no template has more than its share (store.sampler). The next run draws from twice as many conversations anew."""
    texts = sample(stored.held_out_texts(who, POOL * limit), limit, run)
    return [found for found in stored.by_ids([one.id for one in texts]) if found.prompt.tokens]


def score(
    model: nn.Module,
    generations: Sequence[Generation],
    *,
    k: int,
    vocabulary: int,
    masks: Masks = NO_MASKS,
    adapter: int | None = None,
    between: Callable[[], object] = lambda: None,
) -> list[Score]:
    """How `model` would have drafted each generation at draft lengths 1 to k, under its masks where it had to follow a
    grammar. adapter: its id, to compare rounds that it drafted with what is expected of them; None: it drafted none."""
    found = acceptance(model, generations, vocabulary=vocabulary, k=k, masks=masks, between=between)
    drafted = [[] if adapter is None else predictable_rounds(generation, adapter) for generation in generations]
    return [
        Score(
            generation=generation.id,
            # No tag is empty: whatever clients call their domains, none is taken for those that have none.
            domain=generation.prompt.domain or "",
            tokens=len(generation.output),
            agreed=result.agreed,
            calls=calls_by_length(result.rates, k),
            conversation=conversation(generation.prompt),
            rounds=len(rounds),
            accepted=sum(round.accepted for round in rounds),
            predicted=expected_accepted(result.rates, rounds),
        )
        for generation, result, rounds in zip(generations, found, drafted, strict=True)
    ]
