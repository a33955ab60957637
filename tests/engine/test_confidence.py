"""How far a draft goes by how sure it is: a rule held to tables, and in worlds where its confidence says something."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from service.engine.confidence import Steps, Trust
from service.engine.costs import Costs, Load
from service.engine.length import Choice, DraftLength

ONE = Load(1, 0)
COSTS = Costs({(1, 1): 0.048, (1, 9): 0.084}, {1: 0.0063}, {1: 0.0}, 0.0, 0.0)
"""As on 2 CPU cores: a call over nine tokens costs 1.75 of one over one, a draft step an eighth of it."""


def gone(steps: Steps, sure: Sequence[float]) -> int:
    """Tokens drafted of so sure ones, one row."""
    asked = 0
    for stop in steps.stops:
        if not steps.more([[q] for q in sure[asked:stop]]):
            return stop
        asked = stop
    return steps.most


def test_what_was_seen_of_a_probability_goes_before_what_it_says() -> None:
    trust = Trust()
    said = [trust.rate(i / 20) for i in range(21)]
    assert said == sorted(said) and said[0] > 0 and said[-1] < 1
    for _ in range(300):
        trust.observe(0.95, False)
        trust.observe(0.35, True)
    assert trust.rate(0.95) < 0.1 and trust.rate(0.35) > 0.9
    assert trust.rate(0.55) == said[11], "others keep theirs"


def test_a_draft_stops_where_it_is_in_doubt() -> None:
    def drafted(*sure: float, pace: float = 30.0) -> int:
        return gone(DraftLength(8, 0, COSTS).steps(ONE, Choice(3, (0,), pace), [True]), sure)

    assert drafted(*[0.99] * 8) == 8
    assert drafted(0.1, *[0.99] * 7) == 1
    assert drafted(0.99, 0.99, 0.1, *[0.99] * 5) == drafted(0.99, 0.1, *[0.99] * 6) == 3
    # Doubts add up, and what is in doubt depends on what else the time is worth.
    assert drafted(*[0.5] * 8) == 3 and drafted(*[0.7] * 8) == 7
    assert drafted(*[0.5] * 8, pace=0.1) == 8 and drafted(*[0.99] * 8, pace=200.0) == 1


def test_a_batch_goes_on_for_the_rows_that_are_sure() -> None:
    costs = Costs({(4, 1): 0.060, (4, 9): 0.140}, {4: 0.012}, {1: 0.0}, 0.0, 0.0)

    def goes_on(*sure: float, looked_up: tuple[int, ...] = (0, 0, 0, 0)) -> bool:
        return DraftLength(8, 8, costs).steps(Load(4, 0), Choice(3, looked_up, 100.0), [True] * 4).more([sure])

    assert goes_on(0.99, 0.99, 0.99, 0.1) and not goes_on(0.99, 0.1, 0.1, 0.1)
    assert not goes_on(0.99, 0.99, 0.99, 0.1, looked_up=(2, 2, 2, 0)), "what is looked up needs no draft step"


def test_greedy_and_drawn_tokens_are_trusted_apart() -> None:
    length = DraftLength(8, 0, COSTS)
    for _ in range(300):
        steps = length.steps(ONE, Choice(3, (0,), 30.0), [True])
        steps.more([[0.6]])
        steps.observe([0])
    assert not length.steps(ONE, Choice(3, (0,), 30.0), [True]).more([[0.6]])
    assert length.steps(ONE, Choice(3, (0,), 30.0), [False]).more([[0.6]])
    length.restart()
    assert length.steps(ONE, Choice(3, (0,), 30.0), [True]).more([[0.6]]), "another draft, another confidence"


def test_what_was_never_reached_is_not_counted() -> None:
    trust = Trust()
    steps = Steps(8, [trust], lambda drafted, reach: True)
    steps.more([[0.95]])
    steps.more([[0.25], [0.55]])
    before = trust.rate(0.55)
    steps.observe([1])
    assert (
        trust.rate(0.55) == before and trust.rate(0.95) > Trust().rate(0.95) and trust.rate(0.25) < Trust().rate(0.25)
    )


def test_without_a_worth_nothing_is_asked() -> None:
    steps = Steps(5)
    assert steps.stops == () and steps.most == 5
    steps.observe([3, 2])


@pytest.mark.parametrize("doubtful", [0.3, 0.6])
def test_it_beats_every_fixed_length_where_confidence_tells(doubtful: float) -> None:
    """A share of the tokens is in doubt and kept one time in three, the others are kept 19 times in 20."""

    def world(seed: int) -> list[tuple[float, bool]]:
        rng = random.Random(seed)
        kinds = [(0.3, 1 / 3) if rng.random() < doubtful else (0.95, 0.95) for _ in range(8)]
        return [(sure, rng.random() < kept) for sure, kept in kinds]

    def kept_of(tokens: list[tuple[float, bool]], k: int) -> int:
        return next((i for i, (_, kept) in enumerate(tokens[:k]) if not kept), k)

    def fixed(k: int) -> float:
        return sum(kept_of(world(i), k) + 1 for i in range(3000)) / (3000 * COSTS.round(ONE, k))

    length, tokens, seconds = DraftLength(8, 0, COSTS), 0, 0.0
    for i in range(3000):
        told, choice = world(i), length.choose(ONE, [None])
        k = choice.drafted
        if k:
            steps = length.steps(ONE, choice, [True])
            k = gone(steps, [sure for sure, _ in told])
            choice = choice.having(k)
        kept = kept_of(told, k)
        length.observe(ONE, choice, [None], [kept], COSTS.round(ONE, k))
        if k:
            steps.observe([kept])
        tokens += kept + 1
        seconds += COSTS.round(ONE, k)
    assert tokens / seconds > 1.03 * max(fixed(k) for k in range(9))


def test_where_asking_is_dear_the_length_is_the_usual_one() -> None:
    """As on an accelerator whose rounds take a few milliseconds."""
    costs = replace(COSTS, asked={1: 0.03 * COSTS.round(ONE, 3)})
    steps = DraftLength(8, 0, costs).steps(ONE, Choice(3, (0,), 30.0), [True])
    assert steps.most == 3 and not steps.stops
    costs = replace(COSTS, asked={1: 0.01 * COSTS.round(ONE, 3)})
    assert DraftLength(8, 0, costs).steps(ONE, Choice(3, (0,), 30.0), [True]).stops == (1, 3, 7)
