"""Rounds and failure cases computed from a finished text equal those of decoding with the draft."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.llama import Model

from service.core import Generation, Sampling
from service.learning.scoring.expected import expected_calls
from service.learning.scoring.simulate import simulate_rounds, walk_rounds
from tests.support.logged_texts import VOCABULARY, generation, served
from tests.support.oracle import noisy_copy, tiny_llama

Decoded = Callable[[Sampling, int, int], list[Generation]]


@pytest.fixture(scope="module")
def pair() -> tuple[Model, Model]:
    target = tiny_llama(1)
    return target, noisy_copy(target, 2, 0.35)


@pytest.fixture(scope="module")
def decoded(pair: tuple[Model, Model]) -> Decoded:
    """decoded(sampling, times, k) -> generations that the pair logs at draft length k, `times` of each text length."""

    @cache
    def run(sampling: Sampling, times: int, k: int) -> list[Generation]:
        lengths = [1, 2, 7, 24, 40] * times
        samplings = [replace(sampling, seed=i % 7 or None, max_tokens=n) for i, n in enumerate(lengths)]
        if not sampling.greedy:
            samplings = [one for one in samplings if one.seed is not None]
        return served(*pair, samplings, k=k)

    return run


@pytest.mark.parametrize("times", [4, pytest.param(6, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("k", "sampling"),
    [
        pytest.param(k, sampling, marks=() if (i, k) in {(0, 6), (1, 1), (2, 3)} else pytest.mark.nightly)
        for i, sampling in enumerate(
            [Sampling(), Sampling(temperature=0.7, top_p=0.9, top_k=30), Sampling(repetition_penalty=1.4)]
        )
        for k in (1, 3, 6)
    ],
)
def test_rounds_equal_those_that_the_engine_logs(
    pair: tuple[Model, Model], decoded: Decoded, k: int, sampling: Sampling, times: int
) -> None:
    draft, alone, real = pair[1], decoded(sampling, times, 0), decoded(sampling, times, k)
    compared = 0
    for mine, theirs in zip(simulate_rounds(draft, alone, k=k, adapter=0, vocabulary=VOCABULARY), real, strict=True):
        if mine.generation.output != theirs.output or mine.generation.rounds != theirs.rounds:
            continue  # a near-tie, which rounding decides
        compared += 1
        assert 0 <= mine.agreed <= len(theirs.output)
        assert [(c.position, c.drafted, c.target, c.tie) for c in mine.generation.cases] == [
            (c.position, c.drafted, c.target, c.tie) for c in theirs.cases
        ]
        for one, other in zip(mine.generation.cases, theirs.cases, strict=True):
            assert one.q == pytest.approx(other.q, rel=1e-3)
            # Beyond the stored top-k the probability is unknown but small.
            assert one.p == pytest.approx(other.p, rel=2e-2) or (one.p == 0.0 and other.p < 1 / 32)
            # Stored in half precision.
            assert one.margin == pytest.approx(other.margin, abs=2e-2)
    assert compared >= 0.9 * len(real)
    if not sampling.greedy:
        # The draft's choice with the noise, not always its argmax.
        greedy = [replace(g, prompt=replace(g.prompt, sampling=Sampling())) for g in alone]
        best = simulate_rounds(draft, greedy, k=k, adapter=0, vocabulary=VOCABULARY)
        assert [one.generation.rounds for one in best] != [g.rounds for g in real]
    assert sum(len(g.cases) for g in real) > 20


@given(st.lists(st.tuples(*[st.booleans()] * 3), max_size=40), st.integers(1, 3), st.integers(1, 6), st.booleans())
def test_rounds_cover_the_text(flags: list[tuple[bool, ...]], depths: int, k: int, waits: bool) -> None:
    accepts = np.array(flags, dtype=np.bool_).reshape(-1, 3).T[:depths]
    found = walk_rounds(accepts, k, 0 if waits else k)
    assert [start for start, *_ in found] == np.cumsum([0, *(r[3] for r in found)])[:-1].tolist()
    assert sum(r[3] for r in found) == len(flags)
    for i, (start, drafted, accepted, emitted) in enumerate(found):
        whole = 0 if waits and i == 0 else k
        assert drafted == (whole if start + emitted < len(flags) else min(whole, emitted)), "none behind the end"
        assert accepted <= drafted and accepted <= emitted <= accepted + 1
        right = [accepts[min(place, depths - 1), start + place] for place in range(min(drafted, len(flags) - start))]
        assert all(right[:accepted])
        assert accepted == drafted or start + accepted == len(flags) or not right[accepted]
    if not waits:
        # One call per round, and only one possible outcome.
        assert expected_calls(accepts.astype(np.float64), k) == len(found)


def test_rounds_need_a_greedy_or_seeded_text_with_targets() -> None:
    target = tiny_llama(1)
    (made,) = served(target, target, [Sampling(max_tokens=4)], k=0)
    for wrong in (replace(made, targets=None), generation([1], [2], sampling=Sampling(temperature=1.0))):
        with pytest.raises(ValueError, match="greedy and seeded"):
            simulate_rounds(target, [wrong], k=2, adapter=0, vocabulary=VOCABULARY)
