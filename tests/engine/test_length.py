"""How many tokens are drafted: a pure rule, held to tables; and a decoder that follows it says what the target says."""

import random
from collections.abc import Callable
from itertools import groupby

import pytest
from batches import decode
from oracle import naive, relative, tiny_llama

from service.core import Prompt, Sampling
from service.engine.decoder import Decoder
from service.engine.length import CYCLE, DraftLength

Cost = Callable[[int, int], float]


def play(length: DraftLength, rounds: int, *, accept: float, cost: Cost, rows: int = 1, seed: int = 0) -> list[int]:
    """The lengths chosen in a world where each drafted token is kept with the same probability."""
    rng, chosen = random.Random(seed), []
    for _ in range(rounds):
        k = length.choose(rows)
        kept = [next((i for i in range(k) if rng.random() >= accept), k) for _ in range(rows)]
        length.observe(rows, k, kept, cost(rows, k) * rng.uniform(0.9, 1.1))
        chosen.append(k)
    return chosen


def usual(chosen: list[int]) -> int:
    """What most of the later rounds drafted."""
    late = chosen[len(chosen) // 2 :]
    return max(set(late), key=late.count)


def one_stream(rows: int, k: int) -> float:
    """Weight traffic: a longer verification costs little, a draft step a fifth of a target call."""
    return 0.050 + 0.013 * k


def full_batch(rows: int, k: int) -> float:
    """Arithmetic: every position costs."""
    return 0.060 + 0.045 * k


@pytest.mark.parametrize(
    ("accept", "cost", "least", "most"),
    [
        (0.9, one_stream, 4, 4),
        (0.6, one_stream, 1, 3),
        (0.1, one_stream, 0, 0),
        (0.9, full_batch, 1, 4),
        (0.5, full_batch, 0, 0),
        (0.0, full_batch, 0, 0),
    ],
)
def test_it_settles_on_what_pays(accept: float, cost: Cost, least: int, most: int) -> None:
    assert least <= usual(play(DraftLength(4), 1000, accept=accept, cost=cost)) <= most


@pytest.mark.parametrize("accept", [0.0, 0.3, 0.5, 0.7, 0.95])
@pytest.mark.parametrize("cost", [one_stream, full_batch])
def test_it_comes_within_a_few_percent_of_the_best_fixed_length(accept: float, cost: Cost) -> None:
    def rate(k: int) -> float:
        return sum(accept**i for i in range(k + 1)) / cost(1, k)

    chosen = play(DraftLength(4), 4000, accept=accept, cost=cost)[CYCLE:]
    tokens = sum(sum(accept**i for i in range(k + 1)) for k in chosen)
    assert tokens / sum(cost(1, k) for k in chosen) > 0.95 * max(rate(k) for k in range(5))


def test_a_parked_draft_is_still_looked_at_and_comes_back_when_it_got_better() -> None:
    length = DraftLength(3)
    parked = play(length, 640, accept=0.1, cost=one_stream)
    late = parked[320:]
    assert late.count(0) > 0.8 * len(late) and max(len(list(run)) for k, run in groupby(late) if k == 0) < CYCLE
    # No restart: it is seen in the probes alone.
    assert usual(play(length, 1600, accept=0.9, cost=one_stream)) == 3


def test_after_a_swap_the_new_draft_gets_its_chance_at_once() -> None:
    length = DraftLength(3)
    assert usual(play(length, 640, accept=0.05, cost=one_stream)) == 0
    length.restart()
    chosen = play(length, 40, accept=0.9, cost=one_stream)
    assert chosen[0] > 0 and chosen.count(3) > 20


def test_each_batch_size_has_costs_of_its_own() -> None:
    length = DraftLength(3)

    def cost(rows: int, k: int) -> float:
        return one_stream(rows, k) if rows == 1 else full_batch(rows, k)

    alone, together = [], []
    for turn in range(60):
        alone += play(length, 8, accept=0.6, cost=cost, rows=1, seed=turn)
        together += play(length, 8, accept=0.6, cost=cost, rows=8, seed=turn)
    assert usual(alone) > 0 and usual(together) == 0


def test_one_slow_round_changes_little() -> None:
    length = DraftLength(3)
    play(length, 320, accept=0.9, cost=one_stream)
    before = length.seconds(1, 3)
    length.observe(1, 3, [3], 60.0)
    assert length.seconds(1, 3) < 1.3 * before


def test_a_round_that_did_other_work_tells_nothing_of_time() -> None:
    length = DraftLength(3)
    play(length, 64, accept=0.5, cost=one_stream)
    before, expected = length.seconds(1, 3), length.expected(3)
    length.observe(1, 3, [3], None)
    assert length.seconds(1, 3) == before and length.expected(3) > expected


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "seeded"])
def test_whatever_it_chooses_the_tokens_are_the_targets_own(greedy: bool) -> None:
    target, rng = tiny_llama(0), random.Random(5)
    asked = [
        Prompt(
            tuple(rng.randrange(4, 97) for _ in range(rng.randint(2, 40))),
            Sampling(max_tokens=60) if greedy else Sampling(temperature=0.8, seed=i, max_tokens=60),
        )
        for i in range(12)
    ]
    lengths: set[int] = set()

    def between(decoder: Decoder) -> None:
        # Costs that no machine has: every length gets its turn, with rows that fell behind in between.
        if decoder.length is not None:
            for size in (1, 2, 4, 8):
                for k in range(5):
                    decoder.length.observe(size, k, [], rng.choice([0.001, 1.0]))

    rows = decode(target, relative(target, 1, 0.1), asked, k=4, vocabulary=97, adaptive=True, between=between)
    for row in rows:
        assert row.output == naive(target, row.prompt.tokens, row.prompt.sampling)
        lengths |= {round.drafted for round in row.rounds}
    assert len(lengths) > 2
    assert sum(round.accepted for row in rows for round in row.rounds) > 0
