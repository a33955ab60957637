"""The cost model: lines through what was timed, corrected by whole rounds of each kind."""

import random
from dataclasses import replace

import pytest

from service.engine.costs import ESTABLISHED, FIRST, STALE, Costs, Load, RoundCosts

ONE = Load(1, 0)
SEEDS = Costs({(1, 1): 0.050, (1, 4): 0.062}, {1: 0.009}, {1: 0.0}, 0.0, 0.0)


def flat(verify: dict[tuple[int, int], float], step: dict[int, float]) -> Costs:
    """Costs that do not depend on the number of cached positions."""
    return Costs(verify, step, {1: 0.0}, 0.0, 0.0)


def settled(load: Load = ONE) -> RoundCosts:
    """Plain rounds and rounds of three drafted tokens in turn, as the seeds promise."""
    costs = RoundCosts(SEEDS, 3)
    rng = random.Random(0)
    for turn in range(100):
        drafted = 3 * (turn % 2)
        costs.observe(load, drafted, drafted, SEEDS.round(load, drafted) * rng.uniform(0.95, 1.05))
    return costs


def test_costs_are_interpolated_and_extrapolated_linearly() -> None:
    found = flat({(1, 1): 10.0, (1, 5): 18.0, (4, 1): 13.0, (4, 5): 25.0}, {1: 2.0, 4: 5.0})
    assert found.call(Load(1, 7), 3) == 14.0 and found.call(ONE, 9) == 26.0
    assert found.call(Load(2, 0), 1) == 11.0 and found.call(Load(7, 0), 1) == 16.0
    assert found.call(Load(2, 0), 5) == pytest.approx(18 + 7 / 3)
    assert found.draft(ONE) == 2.0 and found.draft(Load(3, 9)) == 4.0
    assert flat({(2, 1): 7.0}, {2: 1.0}).call(Load(9, 0), 9) == 7.0


def test_costs_grow_with_the_positions_of_the_rows() -> None:
    found = Costs({(1, 1): 10.0, (1, 5): 18.0}, {1: 2.0}, {1: 0.01, 5: 0.03}, 0.001, 0.0)
    assert found.call(Load(1, 100), 1) == 11.0 and found.call(Load(4, 100), 5) == 30.0
    assert found.call(Load(1, 100), 3) == 16.0 and found.draft(Load(3, 200)) == pytest.approx(2.6)


def test_before_any_round_the_seeds_count() -> None:
    seeds = Costs({(1, 1): 10.0, (1, 5): 18.0, (4, 1): 13.0}, {1: 2.0, 4: 3.0}, {1: 0.01, 5: 0.03}, 0.001, 0.5)
    costs = RoundCosts(seeds, 6)
    for load in (Load(1, 0), Load(2, 100), Load(6, 30, ragged=True)):
        for drafted in range(7):
            assert costs.seconds(load, drafted, drafted) == pytest.approx(seeds.round(load, drafted))
        assert costs.seconds(load, 0, 4) == pytest.approx(seeds.call(load, 5)), "a look-up needs no draft steps"
        assert costs.extra(load, 2, 5) == pytest.approx(seeds.round(load, 5) - seeds.round(load, 2))
    assert costs.read() == 0.5
    half = seeds.scaled(0.5)
    assert half.draft(Load(2, 100)) == seeds.draft(Load(2, 100)) / 2 and half.read == 0.25
    assert half.call(Load(2, 100), 3) == seeds.call(Load(2, 100), 3)


def test_a_kind_that_was_not_timed_costs_what_the_nearest_does() -> None:
    """Plain rounds take what the seeds say; look-ups over four rows turn out twice, drafted rounds over sixteen three times as
    dear. Each tells of others that do the same, over up to twice or half as many rows."""
    costs = RoundCosts(SEEDS, 15)
    for rows, drafted, proposed, ratio in ((1, 0, 0, 1.0), (4, 0, 3, 2.0), (16, 3, 3, 3.0), (16, 0, 0, 1.0)):
        load = Load(rows, 0)
        expected = SEEDS.round(load, drafted) if drafted else SEEDS.call(load, proposed + 1)
        for _ in range(FIRST):
            costs.observe(load, drafted, proposed, ratio * expected)
    for rows, drafted, proposed, ratio in (
        (4, 0, 2, 2.0),
        (8, 0, 7, 2.0),
        (2, 0, 1, 2.0),
        (24, 1, 1, 3.0),
        (32, 7, 7, 3.0),
        (8, 2, 2, 3.0),
        (16, 0, 0, 1.0),
        # Too far from all that were timed: as rounds usually are.
        (16, 0, 3, 1.5),
        (1, 3, 3, 1.5),
    ):
        load = Load(rows, 0, ragged=True)
        seed = SEEDS.round(load, drafted) if drafted else SEEDS.call(load, proposed + 1)
        assert costs.seconds(load, drafted, proposed) == pytest.approx(ratio * seed), (rows, drafted, proposed)


def test_rows_tell_more_than_lengths() -> None:
    costs = RoundCosts(SEEDS, 15)
    for rows, drafted, ratio in ((16, 7, 3.0), (8, 1, 2.0)):
        for _ in range(FIRST):
            costs.observe(Load(rows, 0), drafted, drafted, ratio * SEEDS.round(Load(rows, 0), drafted))
    assert costs.seconds(Load(16, 0), 1, 1) == pytest.approx(3.0 * SEEDS.round(Load(16, 0), 1))


def test_look_ups_cost_what_a_round_by_itself_does() -> None:
    """Nothing is launched behind the round before them."""
    costs = RoundCosts(replace(SEEDS, alone={1: 0.010, 9: 0.018}), 3)
    for rows, more in ((1, 0.010), (5, 0.014)):
        load = Load(rows, 0)
        assert costs.seconds(load, 0, 2) == pytest.approx(SEEDS.call(load, 3) + more)
        assert costs.seconds(load, 0, 0) == pytest.approx(SEEDS.call(load, 1))
        assert costs.seconds(load, 2, 2) == pytest.approx(SEEDS.round(load, 2))
        by_itself = replace(load, alone=True)
        assert costs.seconds(by_itself, 0, 0) == pytest.approx(SEEDS.call(load, 1) + more), "so do others, if none is"
        assert costs.seconds(by_itself, 2, 2) == pytest.approx(SEEDS.round(load, 2) + more)
        drafted = replace(load, drafts_alone=True)
        assert costs.seconds(drafted, 0, 0) == pytest.approx(SEEDS.call(load, 1))
        assert costs.seconds(drafted, 2, 2) == pytest.approx(SEEDS.round(load, 2) + more), "or none that drafts"


def test_a_kind_costs_the_median_of_its_first_rounds() -> None:
    """What is done once, such as compiling, does not count; and what was never timed costs what other kinds do."""
    costs = RoundCosts(SEEDS, 15)
    plain = SEEDS.round(ONE, 0)
    for seconds in (20 * plain, 2.9 * plain, 3.1 * plain):
        assert not costs.established(ONE, 0, 0)
        costs.observe(ONE, 0, 0, seconds)
    assert costs.established(ONE, 0, 0) and not costs.established(ONE, 3, 3)
    assert costs.seconds(ONE, 0, 0) == pytest.approx(3 * plain)
    assert costs.seconds(ONE, 3, 3) == pytest.approx(3 * SEEDS.round(ONE, 3))
    assert costs.plain_rounds(ONE, 6 * plain) == pytest.approx(2.0)


def test_what_makes_plain_rounds_of_a_batch_dear_makes_others_dear() -> None:
    """Else drafts would look cheap in a batch in which only plain rounds were timed."""
    costs, batch = RoundCosts(SEEDS, 3), Load(8, 0)
    for _ in range(ESTABLISHED):
        for drafted in (0, 3):
            costs.observe(ONE, drafted, drafted, SEEDS.round(ONE, drafted))
        costs.observe(batch, 0, 0, 1.5 * SEEDS.round(batch, 0))
    assert costs.seconds(batch, 3, 3) == pytest.approx(1.5 * SEEDS.round(batch, 3), rel=0.05)
    assert costs.seconds(ONE, 1, 1) == pytest.approx(SEEDS.round(ONE, 1), rel=0.05)


def test_ragged_and_equal_rounds_have_costs_of_their_own() -> None:
    """Attention over rows of unlike lengths takes another way. Until it was timed, the other's cost is the best guess."""
    costs, equal, ragged = RoundCosts(SEEDS, 3), Load(4, 100), Load(4, 100, ragged=True)
    promised = SEEDS.round(equal, 3)
    for _ in range(FIRST):
        costs.observe(equal, 0, 0, SEEDS.round(equal, 0))
        costs.observe(equal, 3, 3, 2.0 * promised)
    assert costs.seconds(equal, 3, 3) == costs.seconds(ragged, 3, 3) == pytest.approx(2.0 * promised)
    assert not costs.established(ragged, 3, 3)
    for _ in range(ESTABLISHED):
        costs.observe(ragged, 3, 3, 5.0 * promised)
    assert costs.seconds(ragged, 3, 3) == pytest.approx(5.0 * promised)
    assert costs.seconds(equal, 3, 3) == pytest.approx(2.0 * promised)
    first = RoundCosts(SEEDS, 3)
    for _ in range(FIRST):
        first.observe(ragged, 3, 3, 5.0 * promised)
    assert first.seconds(equal, 3, 3) == pytest.approx(5.0 * promised)


def test_a_draft_shares_costs_up_to_its_next_stop_and_a_look_up_has_its_own() -> None:
    costs = RoundCosts(SEEDS, 15)
    for _ in range(FIRST):
        costs.observe(ONE, 5, 5, 2.0 * SEEDS.round(ONE, 5))
        costs.observe(ONE, 0, 5, SEEDS.call(ONE, 6))
    assert [costs.established(ONE, k, k) for k in (3, 4, 7, 8)] == [False, True, True, False]
    assert [costs.established(ONE, 0, n) for n in (4, 5, 6)] == [False, True, False]
    assert costs.seconds(ONE, 7, 7) == pytest.approx(2.0 * SEEDS.round(ONE, 7))


def test_one_slow_round_changes_little() -> None:
    costs = settled()
    before = costs.seconds(ONE, 3, 3)
    costs.observe(ONE, 3, 3, 60.0)
    assert costs.seconds(ONE, 3, 3) < 1.1 * before


def test_a_round_with_other_work_is_not_timed() -> None:
    costs = settled()
    before = costs.seconds(ONE, 3, 3)
    costs.observe(ONE, 3, 3, None)
    assert costs.seconds(ONE, 3, 3) == before


def test_a_kind_that_becomes_dearer_is_corrected_and_the_machine_is_not() -> None:
    costs = settled()
    ratio = costs.seconds(ONE, 3, 3) / costs.seconds(ONE, 0, 0)
    for turn in range(200):
        costs.observe(ONE, 3 * (turn % 2), 3 * (turn % 2), 3.0 * SEEDS.round(ONE, 3 * (turn % 2)))
    assert costs.seconds(ONE, 3, 3) / costs.seconds(ONE, 0, 0) == pytest.approx(ratio, rel=0.1)
    for turn in range(300):
        costs.observe(ONE, 3 * (turn % 2), 3 * (turn % 2), SEEDS.round(ONE, 3 * (turn % 2)) * (1 + turn % 2))
    assert costs.seconds(ONE, 3, 3) / costs.seconds(ONE, 0, 0) > 1.5 * ratio


def test_costs_of_slow_moments_are_forgotten_each_time_later() -> None:
    costs = RoundCosts(SEEDS, 3)
    lasted: list[int] = []
    for _ in range(3):
        for _ in range(FIRST):
            costs.observe(ONE, 3, 3, 9.0)
        rounds = 0
        while costs.established(ONE, 3, 3):
            costs.observe(ONE, 0, 0, SEEDS.round(ONE, 0))
            rounds += 1
        assert costs.seconds(ONE, 3, 3) == pytest.approx(SEEDS.round(ONE, 3), rel=0.1)
        lasted.append(rounds)
    assert lasted == [STALE + 1, 2 * STALE + 1, 4 * STALE + 1]


def test_other_seeds_end_all_corrections() -> None:
    costs = settled()
    for _ in range(FIRST):
        costs.observe(ONE, 1, 1, 1.0)
    other = replace(SEEDS, step={1: 0.005})
    costs.reseed(other)
    assert [costs.seconds(ONE, k, k) for k in range(4)] == pytest.approx([other.round(ONE, k) for k in range(4)])
