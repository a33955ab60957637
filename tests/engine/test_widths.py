"""Drafts with other logit widths than the target do not change outputs."""

import random
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_unflatten

from service.core import Prompt, Sampling
from service.learning.scoring.acceptance import acceptance
from service.models.heads import cut
from tests.support.batches import decode
from tests.support.logged_texts import WHO
from tests.support.oracle import forced, tiny_llama
from tests.support.typed import leaves

WIDTH = 97


@cache
def target() -> nn.Module:
    return tiny_llama(0, vocabulary=WIDTH)


@cache
def draft(width: int, *, listed: bool = False) -> nn.Module:
    """The target with fewer or more output ids; right for ids that both have."""
    model, shared = tiny_llama(0, vocabulary=width), min(width, WIDTH)
    weights = dict(leaves(target().parameters()))
    for name, own in leaves(model.parameters()):
        if own.shape != weights[name].shape:
            weights[name] = mx.concatenate([weights[name][:shared], own[shared:]])
    model.update(tree_unflatten(list(weights.items())))
    if listed:
        cut(model, list(range(0, width, 2)))
    return model


def asked(count: int, tokens: int = 40) -> list[Prompt]:
    rng = random.Random(1)
    samplings = [
        Sampling(temperature=1.5, seed=11, max_tokens=tokens),
        Sampling(temperature=1.2, top_p=0.95, seed=12, max_tokens=tokens),
        Sampling(max_tokens=tokens),
        Sampling(temperature=1.5, top_k=60, seed=2**40, max_tokens=tokens),
    ]
    return [
        Prompt(tuple(rng.randrange(WIDTH) for _ in range(3 + 5 * i)), samplings[i % len(samplings)])
        for i in range(count)
    ]


@pytest.mark.parametrize("listed", [False, True], ids=["whole head", "cut head"])
@pytest.mark.parametrize("width", [60, 96, WIDTH, 98, 130])
def test_output_is_the_targets_own_with_a_draft_of_any_width(width: int, listed: bool) -> None:
    failures: list[int] = []
    rows = decode(
        target(),
        draft(width, listed=listed),
        asked(6),
        k=3,
        vocabulary=WIDTH,
        between=lambda decoder: failures.append(decoder.draft_failures),
    )
    assert max(failures) == 0
    for row in rows:
        assert row.output == forced(target(), row.prompt.tokens, row.output, row.prompt.sampling)
    rounds = [each for row in rows for each in row.rounds]
    assert sum(each.accepted for each in rounds) > 0.05 * sum(each.drafted for each in rounds)
    emitted = {token for row in rows for token in row.output}
    assert width >= WIDTH or max(emitted) >= width, "the target emits ids that the draft lacks"


@pytest.mark.parametrize("width", [60, 130])
def test_the_estimate_of_acceptance_draws_the_same_noise(width: int) -> None:
    """For seeded texts the off-policy estimate equals what the engine accepted, position by position."""
    prompts = [each for each in asked(8) if each.sampling.seed is not None]
    rows = decode(target(), draft(width), prompts, k=1, vocabulary=WIDTH, collect=True)
    for row in rows:
        logged = row.generation(WHO)
        assert logged is not None
        (found,) = acceptance(draft(width), [logged], vocabulary=WIDTH, k=1)
        for each in row.rounds:
            assert each.drafted == 0 or found.rates[0][each.start] == each.accepted
