"""Draft length by confidence: the rule on tables, and in simulations where confidence predicts acceptance."""

import random
from collections import Counter
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from scipy.stats import chisquare

from service.core import Prompt, Sampling
from service.engine.acceptance import Acceptance, Calibration, expected_tokens
from service.engine.adapters import bare
from service.engine.costs import Costs, Load
from service.engine.decoder import Decoder
from service.engine.drafters.model import confidence, read_confidences
from service.engine.planner import Choice, DraftSteps, Match, Planner
from service.engine.request import Request
from service.models.heads import cut, cut_head
from tests.support.oracle import filtered_logprobs, noisy_copy, tiny_llama
from tests.support.typed import as_floats

ONE, VOCABULARY = Load(1, 0), 97
USUAL = ((0.8,) * 8,)
ALONE = (None,)
"""No look-up matches."""
COSTS = Costs({(1, 1): 0.048, (1, 9): 0.084}, {1: 0.0063}, {1: 0.0}, 0.0, 0.0)
"""As on 2 CPU cores: a call over nine tokens costs 1.75 calls over one token, a draft step an eighth of one."""


def draft_steps_taken(steps: DraftSteps, sure: Sequence[float]) -> int:
    """Tokens drafted for one row whose tokens have these confidences."""
    asked = 0
    for stop in steps.stops:
        if not steps.more([[q] for q in sure[asked:stop]]):
            return stop
        asked = stop
    return steps.most


def test_observed_acceptance_overrides_the_stated_confidence() -> None:
    calibration = Calibration()
    initial = [calibration.rate(i / 20) for i in range(21)]
    assert initial == sorted(initial) and initial[0] > 0 and initial[-1] < 1
    for _ in range(300):
        calibration.observe(0.95, False)
        calibration.observe(0.35, True)
    assert calibration.rate(0.95) < 0.1 and calibration.rate(0.35) > 0.9
    assert calibration.rate(0.55) == initial[11], "other confidences are unaffected"


def test_drafting_stops_where_confidence_is_low() -> None:
    def drafted(*sure: float, pace: float = 30.0) -> int:
        return draft_steps_taken(Planner(8, 0, COSTS).steps(ONE, Choice(3, (0,), pace, USUAL, ALONE), [True]), sure)

    assert drafted(*[0.99] * 8) == 8
    assert drafted(0.1, *[0.99] * 7) == 1
    assert drafted(0.99, 0.99, 0.1, *[0.99] * 5) == drafted(0.99, 0.1, *[0.99] * 6) == 3
    # Uncertainty accumulates, and the threshold depends on what the time is worth.
    assert drafted(*[0.7] * 8) == 3 and drafted(*[0.85] * 8) == 7
    assert drafted(*[0.5] * 8, pace=0.1) == 8 and drafted(*[0.99] * 8, pace=200.0) == 1


def test_a_row_continues_by_its_own_acceptance_rate() -> None:
    """The same confidence in a row whose tokens are rarely accepted."""
    goes_on = [
        Planner(8, 0, COSTS).steps(ONE, Choice(3, (0,), 30.0, ((rate,) * 8,), ALONE), [True]).more([[0.6]])
        for rate in (0.8, 0.4)
    ]
    assert goes_on == [True, False]


def test_a_batch_continues_for_its_confident_rows() -> None:
    costs = Costs({(4, 1): 0.060, (4, 9): 0.140}, {4: 0.012}, {1: 0.0}, 0.0, 0.0)

    def goes_on(*sure: float, looked_up: tuple[int, ...] = (0, 0, 0, 0)) -> bool:
        found = tuple(expected_tokens([0.8] * 8) if n else None for n in looked_up)
        choice = Choice(3, looked_up, 80.0, 4 * USUAL, found)
        return Planner(8, 8, costs).steps(Load(4, 0), choice, [True] * 4).more([sure])

    assert goes_on(0.99, 0.99, 0.99, 0.1) and not goes_on(0.99, 0.1, 0.1, 0.1)
    # A longer look-up would be cut to the draft length; a look-up that ends here needs no draft step.
    assert goes_on(0.1, 0.1, 0.1, 0.1, looked_up=(3, 3, 3, 0))
    assert not goes_on(0.99, 0.99, 0.99, 0.1, looked_up=(1, 1, 1, 0))


def test_greedy_and_sampled_confidences_are_calibrated_separately() -> None:
    planner = Planner(8, 0, COSTS)
    for _ in range(300):
        steps = planner.steps(ONE, Choice(3, (0,), 30.0, USUAL, ALONE), [True])
        steps.more([[0.6]])
        steps.observe([0])
    assert not planner.steps(ONE, Choice(3, (0,), 30.0, USUAL, ALONE), [True]).more([[0.6]])
    assert planner.steps(ONE, Choice(3, (0,), 30.0, USUAL, ALONE), [False]).more([[0.6]])
    planner.restart()
    assert planner.steps(ONE, Choice(3, (0,), 30.0, USUAL, ALONE), [True]).more([[0.6]]), (
        "another draft, another confidence"
    )


def test_positions_that_were_not_verified_are_not_counted() -> None:
    calibration = Calibration()
    steps = DraftSteps(8, [calibration], lambda drafted, reach: True)
    steps.more([[0.95]])
    steps.more([[0.25], [0.55]])
    before = calibration.rate(0.55)
    steps.observe([1])
    assert (
        calibration.rate(0.55) == before
        and calibration.rate(0.95) > Calibration().rate(0.95)
        and calibration.rate(0.25) < Calibration().rate(0.25)
    )


def test_a_fixed_length_needs_no_host_sync() -> None:
    steps = DraftSteps(5)
    assert steps.stops == () and steps.most == 5
    steps.observe([3, 2])


def test_confidence_is_the_softmax_over_the_reduced_vocabulary() -> None:
    model = tiny_llama(0)
    reduced = list(range(4, 60, 3))
    cut(model, reduced)
    head = cut_head(model)
    assert head is not None
    logits = model(mx.array([[5, 9], [7, 8]]))[:, -1:]
    distribution = np.exp(np.array(logits[:, 0, mx.array(reduced)]))
    distribution /= distribution.sum(axis=-1, keepdims=True)
    drawn = mx.array([[reduced[3]], [reduced[7]]])
    confidences = read_confidences([confidence(logits, drawn, head), confidence(logits, drawn, None)])
    assert np.allclose(confidences, [[distribution[0, 3], distribution[1, 7]]] * 2, atol=1e-5)


@pytest.mark.parametrize("doubtful", [0.3, 0.6])
def test_confidence_beats_every_fixed_length_where_it_predicts_acceptance(doubtful: float) -> None:
    """A share of the tokens has low confidence and is accepted one time in three; the others 19 times in 20."""

    def simulated_tokens(seed: int) -> list[tuple[float, bool]]:
        rng = random.Random(seed)
        kinds = [(0.3, 1 / 3) if rng.random() < doubtful else (0.95, 0.95) for _ in range(8)]
        return [(sure, rng.random() < rate) for sure, rate in kinds]

    def accepted_of(tokens: list[tuple[float, bool]], k: int) -> int:
        return next((i for i, (_, accepted) in enumerate(tokens[:k]) if not accepted), k)

    def fixed(k: int) -> float:
        return sum(accepted_of(simulated_tokens(i), k) + 1 for i in range(3000)) / (3000 * COSTS.round(ONE, k))

    planner, tokens, seconds = Planner(8, 0, COSTS), 0, 0.0
    for i in range(3000):
        tokens_drafted, choice, steps = simulated_tokens(i), planner.choose(ONE, [None]), None
        k = choice.drafted
        if k:
            steps = planner.steps(ONE, choice, [True])
            k = draft_steps_taken(steps, [sure for sure, _ in tokens_drafted])
            choice = choice.with_drafted(k)
        accepted = accepted_of(tokens_drafted, k)
        planner.observe(ONE, choice, [None], [accepted], COSTS.round(ONE, k))
        if k and steps is not None:
            steps.observe([accepted])
        tokens += accepted + 1
        seconds += COSTS.round(ONE, k)
    assert tokens / seconds > 1.03 * max(fixed(k) for k in range(9))


class StopsAtLowConfidence(Planner):
    """Drafts three tokens if the confidence in the first is high, else one."""

    def choose(
        self,
        load: Load,
        matches: Sequence[Match | None],
        own: Sequence[Acceptance] | None = None,
        *,
        drafts: bool = True,
    ) -> Choice:
        return Choice(3, (0,) * load.rows)

    def steps(
        self, load: Load, choice: Choice, greedy: Sequence[bool], drafts: Sequence[bool] | None = None
    ) -> DraftSteps:
        return DraftSteps(3, [Calibration()] * load.rows, lambda drafted, reach: reach[0] > Calibration().rate(0.15))


@pytest.mark.parametrize("draws", [120, pytest.param(2000, marks=pytest.mark.nightly)])
def test_a_draft_that_stops_by_its_own_samples_keeps_the_distribution(draws: int) -> None:
    """The joint distribution of both tokens of an answer: whether the second is drafted depends on the first."""
    target, sampling = tiny_llama(4), Sampling(temperature=1.0, top_k=3, max_tokens=2)
    decoder = Decoder(
        target, bare(noisy_copy(target, 5, 0.1)), vocabulary=VOCABULARY, k=3, adaptive=True, key=mx.random.key(3)
    )
    decoder.planner = StopsAtLowConfidence(3, 0, COSTS)

    def distribution(tokens: Sequence[int]) -> dict[int, float]:
        weights = as_floats(mx.exp(filtered_logprobs(target(mx.array([list(tokens)]))[0, -1:], sampling)[0]))
        return {i: p / sum(weights) for i, p in enumerate(weights) if p > 0}

    text = (5, 9, 11, 7)
    p = {(a, b): x * y for a, x in distribution(text).items() for b, y in distribution((*text, a)).items()}
    counts, drafted = Counter[tuple[int, int]](), Counter[int]()
    for i in range(draws):
        row = Request(str(i), Prompt(text, sampling), frozenset(), None)
        decoder.admit(row)
        while row.finish is None:
            decoder.round()
        counts[row.output[0], row.output[1]] += 1
        drafted[row.rounds[0].drafted] += 1
    assert drafted.keys() == {1, 3} and min(drafted.values()) > draws / 10
    assert counts.keys() <= p.keys()
    assert chisquare([counts[pair] for pair in p], [draws * share for share in p.values()]).pvalue > 1e-4
