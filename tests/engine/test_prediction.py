"""Predicted answers as a source of look-ups: the target's own tokens, sooner."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.llama import Model
from scipy.stats import chisquare

from service.core import Prompt, Sampling, Source
from service.engine.adapters import bare
from service.engine.costs import Costs
from service.engine.decoder import Decoder
from service.engine.drafters.prediction import LONGEST, NEAR, PredictedText
from service.engine.planner import Planner
from service.engine.request import Request
from service.engine.strategy import CPU, CUDA, METAL, Strategy, using
from tests.support.automaton import Automaton, masked_alone
from tests.support.batches import admit
from tests.support.families import RECURRENT, build
from tests.support.oracle import filtered_logprobs, naive, noisy_copy, tiny_llama
from tests.support.typed import as_floats

VOCABULARY, MOST = 97, 6
STRATEGIES = pytest.mark.parametrize("strategy", [CPU, METAL, CUDA], ids=["CPU", "Metal", "CUDA"])
FREE = Costs({(1, 1): 1.0, (1, 1 + MOST): 1.0}, {1: 0.1}, {1: 0.0}, 0.0, 0.0)
"""Proposed tokens cost nothing, so that whatever is found is proposed."""


def words(seed: int, count: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(4, VOCABULARY) for _ in range(count))


def rounds_of(predicted: Sequence[int], answer: Sequence[int], most: int = MOST) -> tuple[list[int], PredictedText]:
    """How many tokens of each proposal were right, -1 where there was none; what is known of the prediction afterwards."""
    text, said, found = PredictedText(predicted), list[int](), list[int]()
    while len(said) < len(answer):
        text.read(said)
        match = text.propose(most)
        right = 0
        if match is not None:
            while (
                right < len(match[1])
                and len(said) + right < len(answer)
                and match[1][right] == answer[len(said) + right]
            ):
                right += 1
        found.append(-1 if match is None else right)
        said += answer[len(said) : len(said) + right + 1]
    text.read(said)
    return found, text


def test_an_answer_that_is_as_predicted_is_proposed_as_a_whole() -> None:
    answer = words(1, 70)
    found, text = rounds_of(answer, answer)
    assert found == [MOST] * 10 and (text.matched, text.unmatched) == (70, 0)


UNIQUE = tuple(range(1000, 1200))
OTHER = tuple(range(5000, 5020))


@pytest.mark.parametrize(
    ("predicted", "misses", "unmatched"),
    [
        pytest.param((*UNIQUE[:50], *OTHER[:5], *UNIQUE[53:]), 4, 6, id="replaced"),
        pytest.param((*UNIQUE[:50], *OTHER, *UNIQUE[50:]), 1, 21, id="the answer leaves something out"),
        pytest.param((*UNIQUE[:50], *UNIQUE[70:]), 21, 1, id="the answer has more"),
        pytest.param((*UNIQUE[100:], *UNIQUE[:100]), 9, 6, id="moved"),
        pytest.param(UNIQUE[:100], 100, 0, id="only the beginning"),
        pytest.param((*OTHER, *UNIQUE), 2, 21, id="another beginning"),
    ],
)
def test_where_answer_and_prediction_part_it_is_found_again(
    predicted: Sequence[int], misses: int, unmatched: int
) -> None:
    found, text = rounds_of(predicted, UNIQUE, most=1)
    assert found.count(-1) + found.count(0) <= misses + 1
    assert text.unmatched <= unmatched + 2 and text.matched >= len(UNIQUE) - misses - len(found) // 8 - 2


def test_a_changed_place_costs_as_many_rounds_as_its_tokens() -> None:
    changed = (*UNIQUE[:50], 7, *UNIQUE[51:])
    found, _ = rounds_of(changed, UNIQUE)
    # The round in which they part emits the changed token; the next token of the answer is found in the prediction.
    assert len(found) <= len(UNIQUE) // (MOST + 1) + 4 and found.count(-1) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_a_prediction_of_something_else_is_given_up_soon(seed: int) -> None:
    """Texts over few tokens, in which short matches are everywhere."""
    rng = random.Random(seed)
    predicted, answer = ([rng.randrange(40) for _ in range(400)] for _ in range(2))
    found, text = rounds_of(predicted, answer)
    wrong = sum(0 <= right < 2 for right in found)
    assert wrong <= 0.1 * len(answer) and text.matched < 0.2 * len(answer)


def test_weak_matches_count_near_the_last_agreement_alone() -> None:
    far = tuple(range(2000, 2000 + NEAR))
    predicted = (*UNIQUE[:20], *far, 77, *UNIQUE[20:])
    text = PredictedText(predicted)
    text.read([*UNIQUE[:20], 77])
    assert text.propose(MOST) is None
    text.read([*UNIQUE[:20], 77, *UNIQUE[20:24]])
    match = text.propose(MOST)
    assert match is not None and match[0] >= 4 and tuple(match[1]) == UNIQUE[24 : 24 + MOST]


def test_the_strongest_match_is_gone_on_from() -> None:
    predicted = (1, 2, 3, 50, 60, 70, 61, 50, 9, 8, 50, 60, 70, 62)
    text = PredictedText(predicted)
    text.read([4, 9, 8, 50])
    assert text.propose(2) == (2, (60, 70))
    text = PredictedText(predicted)
    text.read([4, 50])
    assert text.propose(2) == (1, (60, 70)), "the nearest of equal ones"


@pytest.fixture(scope="module")
def target() -> Model:
    return tiny_llama(0)


def edited(answer: Sequence[int], seed: int, share: float) -> tuple[int, ...]:
    """The answer with some tokens left out, replaced and added."""
    rng, made = random.Random(seed), list[int]()
    for token in answer:
        kind = rng.randrange(3) if rng.random() < share else None
        made += [rng.randrange(4, VOCABULARY)] * (kind in (0, 1)) + [token] * (kind in (1, None))
    return tuple(made)


def asked(target: Model) -> list[Prompt]:
    """Greedy, seeded and unseeded rows with right, edited and wrong predictions, beside rows without."""
    made: list[Prompt] = []
    for i, share in enumerate([0.0, 0.1, 0.4, None, 0.0, 0.2, 1.0, 0.1]):
        sampling = Sampling(max_tokens=30 + i)
        if i % 3 == 1:
            sampling = replace(sampling, temperature=0.8, seed=i, top_p=0.9)
        if i == 6:
            sampling = replace(sampling, temperature=0.9)
        prompt = Prompt(words(i, 6 + 3 * i), sampling)
        answer = naive(target, prompt.tokens, sampling) if i != 6 else words(99, 20)
        made.append(prompt if share is None else replace(prompt, prediction=edited(answer, i, share)))
    return made


def serve(decoder: Decoder, prompts: Sequence[Prompt]) -> list[Request]:
    rows = [Request(str(i), prompt, frozenset(), None) for i, prompt in enumerate(prompts)]
    decoder.admit(*rows)
    while decoder.unfinished:
        decoder.round()
    return rows


def accepted_of(row: Request) -> int:
    return sum(each.accepted for each in row.rounds if each.source is Source.PREDICTION)


def planned(target: Model, draft: nn.Module | None, key: mx.array | None = None) -> Decoder:
    drafted = 0 if draft is None else 3
    decoder = Decoder(
        target, None if draft is None else bare(draft), vocabulary=VOCABULARY, k=drafted, adaptive=True, lookup=MOST,
        collect=True, key=key,
    )  # fmt: skip
    decoder.planner = Planner(drafted, MOST, FREE)
    return decoder


@STRATEGIES
@pytest.mark.parametrize("drafts", [False, True])
def test_with_predictions_the_tokens_are_the_targets_own(target: Model, strategy: Strategy, drafts: bool) -> None:
    prompts = asked(target)
    for together in (prompts, *[[each] for each in prompts]):
        with using(strategy):
            rows = serve(planned(target, noisy_copy(target, 1, 0.2) if drafts else None), together)
        for row in rows:
            if row.prompt.sampling.greedy or row.prompt.sampling.seed is not None:
                assert row.output == naive(target, row.prompt.tokens, row.prompt.sampling)
            assert {case.position for case in row.cases} <= {
                each.start + each.accepted for each in row.rounds if each.source is Source.DRAFT
            }
        if len(together) == 1 and together[0] is prompts[0]:
            (row,) = rows
            # All but the rounds' own tokens.
            assert accepted_of(row) >= 0.7 * len(row.output)
            timings = row.finished().timings
            assert (timings.predicted_matched, timings.predicted_unmatched) == (len(row.output), 0)


@STRATEGIES
def test_recurrent_targets_and_predictions(strategy: Strategy) -> None:
    target = build("qwen3_next", RECURRENT["qwen3_next"])
    prompt = Prompt(words(3, 12), Sampling(max_tokens=24))
    answer = naive(target, prompt.tokens, prompt.sampling)
    with using(strategy):
        rows = serve(
            planned(target, None), [replace(prompt, prediction=edited(answer, 1, share)) for share in (0.0, 0.2)]
        )
    assert [row.output for row in rows] == [answer, answer] and accepted_of(rows[0]) > 10


@STRATEGIES
def test_a_grammar_goes_before_a_prediction(target: Model, strategy: Strategy) -> None:
    """What a grammar does not allow is not proposed, whatever was predicted."""
    automaton = Automaton(5, VOCABULARY)
    prompt = Prompt(words(4, 10), Sampling(max_tokens=24))
    alone = masked_alone(target, prompt.tokens, prompt.sampling, automaton)
    free = naive(target, prompt.tokens, prompt.sampling)
    assert alone != free
    with using(strategy):
        rows = serve(
            planned(target, None),
            [replace(prompt, prediction=tuple(said), constraint=automaton.copy()) for said in (alone, free)],
        )
    assert [row.output for row in rows] == [alone, alone]


@pytest.mark.usefixtures("exact_costs")
def test_a_draft_length_bounds_predictions_too(target: Model) -> None:
    prompt = Prompt(words(5, 10), Sampling(max_tokens=20))
    answer = tuple(naive(target, prompt.tokens, prompt.sampling))
    for limit in (0, 2):
        (row,) = serve(planned(target, None), [replace(prompt, prediction=answer, num_draft_tokens=limit)])
        assert max(each.drafted for each in row.rounds) == limit and tuple(row.output) == answer


@pytest.mark.usefixtures("exact_costs")
def test_unseeded_sampling_keeps_the_targets_distribution() -> None:
    target = tiny_llama(4)
    sampling = Sampling(temperature=0.6, top_k=6, max_tokens=2)
    text = words(6, 8)

    def distribution() -> list[float]:
        return as_floats(mx.exp(filtered_logprobs(target(mx.array([text]))[0, -1:], sampling)[0]))

    p = distribution()
    likely = [i for i in range(VOCABULARY) if p[i] > 0]
    predicted = min(likely, key=lambda token: abs(p[token] - 0.4))
    prompt = Prompt(text, sampling, prediction=(predicted, 9, 9))
    decoder = planned(target, None, key=mx.random.key(3))
    counts: Counter[int] = Counter()
    proposed = 0
    for start in range(0, 1000, 50):
        rows = [Request(str(start + i), prompt, frozenset(), None) for i in range(50)]
        admit(decoder, rows, room=len(rows))
        decoder.round()
        proposed += sum(row.rounds[0].source is Source.PREDICTION for row in rows)
        counts.update(row.output[0] for row in rows)
        decoder.leave(list(decoder.rows))
    assert proposed > 800 and set(counts) <= set(likely)
    expected = [1000 * p[i] / sum(p[j] for j in likely) for i in likely]
    assert chisquare([counts[i] for i in likely], expected).pvalue > 1e-4


def test_kinds_reach_as_far_as_matches_are_compared() -> None:
    text = PredictedText(UNIQUE)
    kinds = [text.propose(1)]
    for count in range(1, LONGEST + 2):
        text.read(UNIQUE[:count])
        kinds.append(text.propose(1))
    assert [kind[0] for kind in kinds if kind is not None] == [0, 1, 2, 2, 4, 4, 4, 4, 8, 8]
