"""How many tokens are scored: the budget, and that the texts which fit in it are drawn fairly."""

from dataclasses import replace

import mlx.nn as nn
import numpy as np
import pytest

from service.core import Generation
from service.learning.scoring.budget import FEWEST_TOKENS, LONGEST_SHARE, token_budget, token_count, within_budget
from service.settings import GateSettings
from tests.support.lifecycle_server import generation


def texts(lengths: list[int]) -> list[Generation]:
    made = [generation(f"g{i}") for i in range(len(lengths))]
    return [
        replace(one, prompt=replace(one.prompt, tokens=(1,) * (length - 5)), output=(2,) * 5)
        for one, length in zip(made, lengths, strict=True)
    ]


LENGTHS = [int(n) for n in np.random.default_rng(1).lognormal(6, 1.2, 200)]
"""From tens to some ten thousand tokens."""


@pytest.mark.parametrize("budget", [5_000, 30_000, 100_000])
def test_the_texts_that_are_drawn_never_exceed_the_budget(budget: int) -> None:
    drawn = [within_budget(texts(LENGTHS), budget, seed) for seed in range(30)]
    totals = [sum(map(token_count, each)) for each in drawn]
    assert max(totals) <= budget
    assert np.mean(totals) >= 0.5 * budget, "most of it is used"
    assert len({tuple(one.id for one in each) for each in drawn}) > 1


def test_long_and_short_texts_are_drawn_with_the_same_probability() -> None:
    every = texts(LENGTHS)
    counts = dict.fromkeys((one.id for one in every), 0)
    for seed in range(400):
        for one in within_budget(every, 60_000, seed):
            counts[one.id] += 1
    fits = [counts[one.id] > 0 for one in every if token_count(one) <= LONGEST_SHARE * 60_000]
    assert all(fits) and len(fits) == sum(count > 0 for count in counts.values())
    by_length = np.array([counts[one.id] for one in sorted(every, key=token_count)])
    thirds = [part.mean() for part in np.array_split(by_length, 3)]
    assert thirds == pytest.approx([by_length.mean()] * 3, rel=0.12)


def test_a_budget_that_is_large_enough_leaves_all_and_one_long_text_does_not_starve_the_others() -> None:
    every = texts(LENGTHS)
    assert within_budget(every, sum(LENGTHS), 0) == every
    whole = texts([100] * 20 + [50_000])
    assert within_budget(whole, 3000, 0) == whole[:20]
    assert within_budget(texts([5000]), 1000, 0) == within_budget([], 1000, 0) == []


class Slow(nn.Module):
    """A model that is never called."""


def budget(lengths: list[int], *, seconds: float = 0.0, **gate: int) -> int:
    return token_budget(
        Slow(), texts(lengths), GateSettings(**gate), adapters=3, seconds=seconds, vocabulary=9, between=lambda: None
    )


def test_the_setting_is_shared_by_the_adapters() -> None:
    assert budget([100_000] * 50, max_tokens=30_000) == 10_000


def test_few_tokens_are_scored_whatever_that_takes() -> None:
    assert budget([50] * 200) == budget([]) == FEWEST_TOKENS // 3


@pytest.mark.parametrize("speed", [1_000.0, 100_000.0])
def test_by_default_as_much_is_scored_as_there_is_time_for(speed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.learning.scoring.budget._tokens_per_second", lambda *_: speed)
    assert budget([2_000] * 200, seconds=30.0, min_prompts=5) == max(int(speed * 10), FEWEST_TOKENS // 3)
    # A verdict needs 30 prompts, however slow the machine is.
    assert budget([20_000] * 200, seconds=0.0) == 31 * 20_000
