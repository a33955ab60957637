"""Answers that had to follow a grammar: what draft and target say of them under its masks, made again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.llama import Model

from service.core import AnswerGrammar, BadRequest, Constraint, FinishReason, Generation, Sampling
from service.engine.masks import allowed
from service.learning.batches import collate
from service.learning.examples import build, unpack
from service.learning.losses import Objective, TargetDivergence, forward_kl, jensen_shannon
from service.learning.masks import AnswerMasks, answer_masks, stack_masks, usable
from service.learning.scoring.acceptance import acceptance
from service.learning.scoring.simulate import simulate_rounds
from service.learning.targets import TargetCache, compute_targets, with_targets
from tests.support.automaton import Automaton
from tests.support.logged_texts import VOCABULARY, served
from tests.support.oracle import noisy_copy, tiny_llama
from tests.support.typed import as_float

K = 3


class Automata:
    """masks.Compiler: what `Automaton.grammar` names."""

    def __init__(self, **changes: int) -> None:
        self.changes = changes

    def of_answer(self, grammar: AnswerGrammar) -> Constraint:
        if grammar.text == "broken":
            raise BadRequest("it cannot be compiled", field="grammar")
        return automaton(int(grammar.text.removeprefix("automaton ")), **self.changes)


def automaton(seed: int, most: int = 12) -> Automaton:
    return Automaton(seed, VOCABULARY, most=most, forcing=6)


@pytest.fixture(scope="module")
def pair() -> tuple[Model, Model]:
    target = tiny_llama(1)
    return target, noisy_copy(target, 2, 0.35)


def decoded(pair: tuple[Model, Model], sampling: Sampling, k: int, rows: int = 24) -> list[Generation]:
    """Every third of them is free."""
    samplings = [replace(sampling, seed=i if sampling.seed is not None else None, max_tokens=24) for i in range(rows)]
    return served(*pair, samplings, k=k, constraint=lambda row: automaton(row) if row % 3 else None)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_p=0.9, top_k=30, seed=1)])
def test_rounds_under_masks_equal_those_that_the_engine_logs(pair: tuple[Model, Model], sampling: Sampling) -> None:
    alone, real = decoded(pair, sampling, 0), decoded(pair, sampling, K)
    masks = answer_masks(alone, Automata)
    assert masks.keys() == {g.id for g in alone if g.grammar is not None} and len(masks) == 16
    found = simulate_rounds(pair[1], alone, k=K, adapter=0, vocabulary=VOCABULARY, masks=masks)
    compared = [
        (mine.generation, theirs)
        for mine, theirs in zip(found, real, strict=True)
        if (mine.generation.output, mine.generation.rounds) == (theirs.output, theirs.rounds)
    ]
    assert len(compared) >= 0.9 * len(real), "near-ties go either way"
    for mine, theirs in compared:
        assert [(c.position, c.drafted, c.target, c.tie) for c in mine.cases] == [
            (c.position, c.drafted, c.target, c.tie) for c in theirs.cases
        ]
        assert [c.q for c in mine.cases] == pytest.approx([c.q for c in theirs.cases], rel=1e-3)
    bound = [(mine, theirs) for mine, theirs in compared if theirs.grammar is not None]
    assert sum(len(theirs.cases) for _, theirs in bound) > 10
    free = simulate_rounds(pair[1], alone, k=K, adapter=0, vocabulary=VOCABULARY)
    assert [one.generation.rounds for one in free] != [g.rounds for g in real], "without masks it is another draft"


def test_acceptance_is_that_of_the_rounds(pair: tuple[Model, Model]) -> None:
    """Under the match rule rates are 0 or 1: with a grammar they are those of the masked draft."""
    made = decoded(pair, Sampling(), 1)
    masks = answer_masks(made, Automata)
    found = acceptance(pair[1], made, vocabulary=VOCABULARY, k=1, masks=masks)
    agreed = [sum(r.accepted for r in g.rounds) for g in made]
    tried = [[at for r in g.rounds if r.drafted for at in [r.start]] for g in made]
    mine = [int(a.rates[0, at].sum()) for a, at in zip(found, tried, strict=True)]
    same = sum(one == other for one, other in zip(mine, agreed, strict=True))
    assert same >= len(made) - 1
    plain = acceptance(pair[1], made, vocabulary=VOCABULARY, k=1)
    assert sum(a.rates.sum() for a in found) > sum(a.rates.sum() for a in plain)


def test_targets_are_those_that_the_engine_collects(pair: tuple[Model, Model]) -> None:
    made = decoded(pair, Sampling(), 0)
    masks = answer_masks(made, Automata)
    for g, found in zip(made, compute_targets(pair[0], made, vocabulary=VOCABULARY, masks=masks), strict=True):
        assert g.targets is not None
        (mine, mine_p, mine_tail), (theirs, theirs_p, theirs_tail) = unpack(found), unpack(g.targets)
        possible = np.isfinite(theirs_p)
        assert (np.isfinite(mine_p) == possible).all() and (mine[possible] == theirs[possible]).mean() > 0.99
        assert np.allclose(mine_p[possible], theirs_p[possible], atol=2e-2)
        if g.grammar is not None:
            assert not possible.all() and max(mine_tail.max(), theirs_tail.max()) < -14.0, (
                "at most 12 tokens are allowed"
            )


def test_targets_in_the_cache_are_of_one_grammar(pair: tuple[Model, Model], tmp_path: object) -> None:
    (made,) = served(*pair, [Sampling(max_tokens=12)], k=0, constraint=lambda row: automaton(7))
    bare = replace(made, targets=None)
    calls = 0

    def load() -> tuple[Model, int]:
        nonlocal calls
        calls += 1
        return pair[0], VOCABULARY

    cache = TargetCache(tmp_path, "target")  # pyright: ignore[reportArgumentType]
    masks = answer_masks([made], Automata)
    (unknown,) = with_targets([bare], cache=cache, load_target=load)
    assert unknown.targets is None and not calls, "without its masks nothing is known of it"
    (first,) = with_targets([bare], cache=cache, load_target=load, masks=masks)
    (again,) = with_targets([bare], cache=cache, load_target=load, masks=masks)
    assert calls == 1 and first == again
    (free,) = with_targets([replace(bare, grammar=None)], cache=cache, load_target=load)
    assert calls == 2 and free.targets != first.targets


def test_the_loss_is_of_what_the_masks_allow(pair: tuple[Model, Model]) -> None:
    """The target itself has nothing to learn from its own answers under masks; without them it has."""
    made = decoded(pair, Sampling(), 0)
    masks = answer_masks(made, Automata)
    target, kl = pair[0], forward_kl

    def loss(length: int, vocabulary: int = VOCABULARY) -> tuple[float, int]:
        data = build(made, max_length=length, vocabulary=vocabulary, masks=masks)
        assert not data.skipped
        batch = collate(data.examples)
        return as_float(TargetDivergence(target, kl)(target, batch)), len(data.examples)

    whole, count = loss(128)
    assert whole == pytest.approx(0.0, abs=1e-3) and count == len(made)
    cut, count = loss(20)
    assert count > len(made), "windows have the masks of their own positions"
    bound = [g for g in made if g.grammar is not None]
    unmasked = build([replace(g, grammar=None) for g in bound], max_length=128, vocabulary=VOCABULARY)
    assert as_float(TargetDivergence(target, kl)(target, collate(unmasked.examples))) > 0.5
    assert math.isfinite(cut)
    for objective in (forward_kl, jensen_shannon):
        data = build(made, max_length=128, vocabulary=VOCABULARY, masks=masks)
        shifted = partial(_loss, target, objective, data.examples)
        value, gradient = mx.value_and_grad(shifted)(mx.zeros(()))
        assert math.isfinite(as_float(value)) and math.isfinite(as_float(gradient))


def _loss(target: Model, objective: Objective, examples: Sequence[object], shift: mx.array) -> mx.array:
    batch = collate(examples)  # pyright: ignore[reportArgumentType]
    held = TargetDivergence(target, objective)
    head = held.parts
    assert head is not None
    held.parts = head[0], lambda states: head[1](states) * (1.0 + shift)
    return held(target, batch)


def test_what_has_no_masks_is_skipped(pair: tuple[Model, Model]) -> None:
    made = decoded(pair, Sampling(), 0, rows=6)
    masks = answer_masks(made, Automata)
    some = {name: each for name, each in masks.items() if name != made[1].id}
    data = build(made, max_length=128, vocabulary=VOCABULARY, masks=some)
    assert data.skipped == {"unknown masks": 1} and len(data.examples) == 5
    assert [g.id for g in usable(made, some)] == [g.id for g in made if g is not made[1]]


def test_answers_that_their_grammar_now_forbids_have_no_masks(pair: tuple[Model, Model]) -> None:
    made = decoded(pair, Sampling(), 0, rows=6)
    assert len(answer_masks(made, Automata)) == 4
    assert answer_masks(made, lambda: Automata(most=2)).keys() < answer_masks(made, Automata).keys()
    legal = automaton(1).allowed(made[1].output[:-1])
    other = next(token for token in range(4, VOCABULARY) if token not in legal)
    assert not answer_masks([replace(made[1], output=(*made[1].output[:-1], other))], Automata), "its last token alone"
    broken = replace(made[1], grammar=AnswerGrammar("broken"))
    assert not answer_masks([broken], Automata)
    never = [replace(g, grammar=None) for g in made]
    assert not answer_masks(never, lambda: pytest.fail("nothing has to be compiled"))
    empty = replace(made[1], output=(), finish=FinishReason.CANCELLED)
    assert not answer_masks([empty], Automata)


def test_masks_of_several_answers_are_one_list() -> None:
    one = AnswerMasks(np.array([[1], [6]], dtype=np.uint32), np.array([0, 1, 0], dtype=np.int32))
    assert stack_masks([None, None]) is None
    found = stack_masks([one, None, one.part(slice(1, 2))])
    assert found is not None
    words, at = found
    assert words.tolist() == [[0xFFFFFFFF], [1], [6], [6]]
    assert [each if isinstance(each, int) else each.tolist() for each in at] == [[1, 2, 1], 0, [3]]
    bits = allowed(mx.array(words), 40)
    assert bits.shape == (4, 40) and not bits[:, 32:].any().item(), "tokens beyond the masks are not allowed"
    assert bits[1:3, :4].tolist() == [[True, False, False, False], [False, True, True, False]]
    assert allowed(mx.array(words), 2).tolist() == [[True, True], [True, False], [False, True], [False, True]]
