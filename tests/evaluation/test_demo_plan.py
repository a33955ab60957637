"""How the demo is sized by what was measured, and what it announces."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import pytest

from service.evaluation.demo_plan import (
    FULL,
    LEVELS,
    QUICK,
    RESERVE,
    DemoPlan,
    Goal,
    duration,
    plan_demo,
    stage_seconds,
)
from service.evaluation.machine_speed import MachineSpeed

BATCH = 8
TWO_CORES = MachineSpeed(
    start=4.0, load=4.0, served=0.5, alone=1.3, checked=0.42, scored=0.07, training_step=1.75, tokens=21.0
)
"""Seconds of two cores at 100 GFLOP/s."""


def slower(speed: MachineSpeed, factor: float) -> MachineSpeed:
    """Everything takes `factor` times as long."""
    return replace(speed, **{f.name: getattr(speed, f.name) * factor for f in fields(speed) if f.name != "tokens"})


def size(plan: DemoPlan) -> float:
    return plan.scale.min_tokens


@pytest.mark.parametrize("goal", [QUICK, FULL], ids=["quick", "full"])
def test_a_slower_machine_is_announced_more_or_shown_less(goal: Goal) -> None:
    plans = [plan_demo(slower(TWO_CORES, 1.2**i / 100), goal, BATCH) for i in range(50)]
    assert [size(plan) for plan in plans] == sorted(map(size, plans), reverse=True)
    assert size(plans[0]) == LEVELS[-1] * goal.floor.min_tokens and size(plans[-1]) == goal.floor.min_tokens
    for plan, after in pairwise(plans):
        assert size(after) < size(plan) or after.seconds > plan.seconds
        assert plan.seconds <= goal.seconds or size(plan) == goal.floor.min_tokens


def test_the_floor_shows_the_whole_loop_however_slow_the_machine_is() -> None:
    plan = plan_demo(slower(TWO_CORES, 100), QUICK, BATCH)
    for name in ("max_tokens", "min_tokens", "epochs", "answers_after", "held_out", "stepwise", "turns", "gate_texts"):
        assert getattr(plan.scale, name) == getattr(QUICK.floor, name) > 0
    # A promotion may take as long as the demo does.
    assert plan.scale.limit_seconds > plan.seconds > 100 * QUICK.seconds / 2
    assert plan.scale.pause_seconds > 100


def test_two_cores_are_announced_four_to_five_minutes() -> None:
    """What such a machine took, with its packages there."""
    plan = plan_demo(TWO_CORES, QUICK, BATCH)
    assert 240 <= plan.seconds <= 300
    twice = plan_demo(slower(TWO_CORES, 2), QUICK, BATCH)
    assert twice.seconds == pytest.approx(2 * plan.seconds, rel=0.02)


@pytest.mark.parametrize("name", [f.name for f in fields(MachineSpeed) if f.name != "tokens"])
def test_each_measured_speed_counts(name: str) -> None:
    scale = plan_demo(TWO_CORES, QUICK, BATCH).scale
    longer = replace(TWO_CORES, **{name: 2 * getattr(TWO_CORES, name)})
    assert sum(stage_seconds(longer, scale, BATCH).values()) > 1.01 * sum(
        stage_seconds(TWO_CORES, scale, BATCH).values()
    )


def test_the_announced_time_is_the_sum_of_the_stages_with_a_reserve() -> None:
    plan = plan_demo(TWO_CORES, QUICK, BATCH)
    assert plan.seconds == pytest.approx(RESERVE * sum(stage_seconds(TWO_CORES, plan.scale, BATCH).values()))
    # 1,000 tokens of 21 a text, of which four in five are learnt from, and a quarter as many replayed: 3 x 8 steps.
    assert stage_seconds(TWO_CORES, plan.scale, BATCH)["train"] == pytest.approx(2.0 * 8.0 + 24 * 1.75)


def test_durations_in_words() -> None:
    spoken = {
        7: "10 seconds",
        84: "80 seconds",
        95: "1.5 minutes",
        236: "4 minutes",
        262: "4.5 minutes",
        610: "10 minutes",
    }
    assert {seconds: duration(seconds) for seconds in spoken} == spoken
