"""Ratios of speeds that were measured in turns, and what is said of them."""

from __future__ import annotations

import random

import pytest
from scipy import stats

from service.evaluation.paired_speed import SpeedRatio, speed_ratio


def turns(true_ratio: float, noise: float, count: int, seed: int, drift: float = 0.0) -> SpeedRatio:
    """Two speeds in turns on a machine whose own speed wanders by `drift` from turn to turn."""
    rng, machine = random.Random(seed), 1.0
    ours, theirs = list[float](), list[float]()
    for _ in range(count):
        machine *= rng.lognormvariate(0.0, drift)
        ours.append(20.0 * machine * true_ratio * rng.lognormvariate(0.0, noise))
        theirs.append(20.0 * machine * rng.lognormvariate(0.0, noise))
    return speed_ratio(ours, theirs)


@pytest.mark.parametrize("count", [6, 12])
def test_the_interval_holds_the_true_ratio_nine_times_in_ten(count: int) -> None:
    found = [turns(1.2, 0.1, count, seed) for seed in range(2000)]
    held = sum(one.low <= 1.2 <= one.high for one in found) / len(found)
    assert held == pytest.approx(0.9, abs=0.02)


def test_it_is_student_s_interval_of_the_logarithms() -> None:
    one = speed_ratio([22.0, 26.0, 24.0, 30.0], [20.0, 20.0, 20.0, 20.0])
    logs = [0.0953102, 0.2623643, 0.1823216, 0.4054651]
    mean, error = sum(logs) / 4, stats.sem(logs)
    low, high = stats.t.interval(0.9, 3, mean, error)
    assert [one.ratio, one.low, one.high] == pytest.approx([2.71828**mean, 2.71828**low, 2.71828**high], rel=0.01)


def test_a_machine_that_slows_down_meanwhile_affects_both() -> None:
    one = turns(1.25, 0.02, 8, 0, drift=0.5)
    assert 1.2 < one.low < one.high < 1.3


@pytest.mark.parametrize(
    ("ratio", "noisy", "words"),
    [
        (SpeedRatio(1.25, 1.1, 1.4), False, "1.25 times as fast (1.10 to 1.40 times)"),
        (SpeedRatio(0.8, 0.7, 0.95), False, "0.80 times as fast (0.70 to 0.95 times)"),
        (SpeedRatio(1.01, 0.95, 1.06), False, "as fast: 0.95 to 1.06 times"),
        (SpeedRatio(1.05, 0.95, 1.15), True, "cannot be told: 0.95 to 1.15 times, this machine is too noisy now"),
        (SpeedRatio(0.95, 0.85, 1.05), True, "cannot be told: 0.85 to 1.05 times, this machine is too noisy now"),
    ],
)
def test_what_is_said_of_a_ratio(ratio: SpeedRatio, noisy: bool, words: str) -> None:
    assert ratio.noisy is noisy
    assert str(ratio) == words


def test_noise_as_beside_other_work_is_called_noise() -> None:
    """8.3, 9.1, 9.3 tokens/s in one run and 6.3, 6.0, 5.9 in another were the same three speeds."""
    assert sum(turns(1.0, 0.4, 8, seed).noisy for seed in range(200)) > 170
    assert not any(turns(1.3, 0.02, 8, seed).noisy for seed in range(200))


def test_one_turn_gives_no_interval() -> None:
    with pytest.raises(ValueError, match="1 turns"):
        speed_ratio([1.0], [2.0])
