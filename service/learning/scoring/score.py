"""Scores of adapters on the same held-out generations, none of which was trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import mlx.nn as nn

from service.core import AcceptRule, Generation, Provenance, Round, Score, Source
from service.learning.masks import NO_MASKS, Masks
from service.learning.scoring.acceptance import acceptance
from service.learning.scoring.expected import calls_by_length, expected_accepted
from service.store.log.generations import Generations
from service.store.log.held_out import draw
from service.store.log.sampler import Text, conversation


def held_out(
    stored: Generations, who: Provenance, *, limit: int, run: int, seeds: Sequence[Text] = ()
) -> list[Generation]:
    """The generations that a gate measures on (`store.log.held_out.draw`), newest first."""
    texts = draw(stored, who, limit=limit, run=run, seeds=seeds)
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
    """How `model` would have drafted each generation at draft lengths 1 to `k`.

    vocabulary: width of the target's logits. masks: of answers that had to follow a grammar. adapter: the model's id,
    to compare the rounds it drafted with the expectation; None: it drafted none. between: called before every model
    call.
    """
    found = acceptance(model, generations, vocabulary=vocabulary, k=k, masks=masks, between=between)
    drafted = [[] if adapter is None else predictable_rounds(generation, adapter) for generation in generations]
    return [
        Score(
            generation=generation.id,
            # Tags are never empty, so "" cannot be a client's domain.
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


def predictable_rounds(generation: Generation, adapter: int) -> list[Round]:
    """The rounds drafted by `adapter` whose accepted tokens are fully determined by its acceptance rates. Excludes texts that

    - are sampled without a seed: their draft lengths depend on proposed tokens, which are not in the text;
    - had to follow a grammar: on a GPU, later tokens of a proposal are drafted without its mask;
    - were started by another adapter, whose keys and values the row still has.
    """
    exact = generation.prompt.sampling.rule is AcceptRule.MATCH and generation.grammar is None
    if not exact or any(round.adapter != adapter for round in generation.rounds):
        return []
    return [round for round in generation.rounds if round.drafted and round.source is Source.DRAFT]


def scores_message(scores: Mapping[str, Sequence[Score]]) -> dict[str, list[dict[str, object]]]:
    """Scores by adapter, in the form that the child sends."""
    return {name: [asdict(one) for one in each] for name, each in scores.items()}
