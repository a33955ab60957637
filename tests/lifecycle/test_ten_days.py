"""When runs start, over ten simulated days: a person who asks 20 things a day, and a server that is never idle."""

import numpy as np
import pytest

from tests.support.simulated_days import Outcome, Traffic, World, personal

DAYS = 10


def ten_days(traffic: str, *, before: bool, seed: int) -> Outcome:
    requests = personal(DAYS, seed) if traffic == "personal" else Traffic(rate=3.0)
    return World(requests, DAYS, before=before, seed=seed).run()


def row(name: str, outcomes: list[Outcome]) -> str:
    columns = [
        [one.started, one.promoted, one.minutes, 100 * one.lost, 100 * one.gain, 100 * one.net] for one in outcomes
    ]
    started, promoted, minutes, lost, gain, net = np.mean(columns, axis=0)
    return f"| {name} | {started:.1f} | {promoted:.1f} | {minutes:.0f} | {lost:.2f} % | {gain:+.2f} % | {net:+.2f} % |"


@pytest.mark.parametrize("seeds", [3, pytest.param(50, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("traffic", ["personal", "busy"])
def test_ten_days_gain_as_much_as_before_and_cost_little(traffic: str, seeds: int) -> None:
    found = {before: [ten_days(traffic, before=before, seed=seed) for seed in range(seeds)] for before in (True, False)}
    print("\n".join(row(f"{traffic}, {'before' if before else 'now'}", each) for before, each in found.items()))
    now, before = found[False], found[True]
    assert max(one.lost for one in now) <= 0.05
    assert max(max(one.days) for one in now) <= 120
    # A fixed level promotes a little sooner, noise included. What it gains by the end is less than what its runs cost.
    assert np.mean([one.gain for one in now]) >= 0.85 * np.mean([one.gain for one in before])
    assert np.mean([one.net for one in now]) >= np.mean([one.net for one in before])
    assert np.mean([one.started for one in now]) <= np.mean([one.started for one in before])
    # Of 200 requests some gates have too little to judge by: 82 % promote, where a fixed level promoted in 92 %.
    assert np.mean([one.promoted >= 1 for one in now]) >= 0.75
