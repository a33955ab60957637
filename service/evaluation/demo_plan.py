"""How much `redraft demo` shows on a machine, and how long that takes. Pure functions of measured speeds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from service.evaluation.machine_speed import MachineSpeed

LEVELS = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Multiples of a floor's traffic, training and checks."""
RESERVE = 1.1
"""Factor on the sum of the stages. Time that is left of the announced time goes into more timed turns."""
TRAINED = 0.8
"""Share of the answers that a run learns from; the others are held out."""
BUSY = 3.0
"""A client rests this many times as long as the server takes for one answer to each client, while a run shares its cores."""
LEAST_PAUSE = 1.0
GOLDEN, GOLDEN_LENGTH = 60, 2.0
"""Texts of the golden set that the gate scores, at most, and how long they are, in answers."""

# Counts that no setting gives, from one run on two cores.
SERVER_CHECKS = 7.0
"""Start-up checks and timed calls of a server, in answers decoded alone."""
CHILD_START = 2.0
"""Start of a training run until its first step, in starts of Python and loads of the pair."""
HALF_CORES = 2.0
"""A training run has half of the cores: its passes take this many times as long."""
STEPWISE = 2.0
"""An answer decoded token by token on mlx-lm's cache, in answers that are served."""
ARM_CHECKS = 7.0
"""Timed calls of the three ways of decoding, in answers decoded alone."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is shown.

    clients: streams at a time. pause_seconds: how long each client waits before its next request while a run, which shares the
    processor, is under way. max_tokens: of one answer. min_tokens: recorded output tokens that start a training run. epochs,
    replay: of that run. answers_after: answers that the new adapter still drafts. held_out: prompts on which the gain is
    measured. stepwise: answers that the target also decodes token by token, beyond the teacher-forced pass over all of them.
    turns: of the timing of one stream, at least. gate_texts: held-out texts, and golden ones, that the gate scores at most.
    limit_seconds: for a promotion.
    """

    clients: int
    pause_seconds: float
    max_tokens: int
    min_tokens: int
    epochs: int
    replay: float
    answers_after: int
    held_out: int
    stepwise: int
    turns: int
    gate_texts: int
    limit_seconds: float


@dataclass(frozen=True, slots=True)
class Goal:
    """floor: the least that shows the whole loop. seconds: more is shown up to this duration."""

    floor: Scale
    seconds: float


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """seconds: what the demo takes from now on, with `scale`, on the machine that was measured."""

    scale: Scale
    seconds: float


QUICK = Goal(Scale(4, 0.0, 32, 1_000, 3, 0.2, 4, 20, 4, 6, 24, 900.0), 240.0)
FULL = Goal(Scale(8, 0.0, 64, 2_500, 3, 0.3, 24, 60, 20, 12, 200, 1200.0), 660.0)


def plan_demo(speed: MachineSpeed, goal: Goal, batch_size: int) -> DemoPlan:
    """The largest of LEVELS that takes no longer than the goal's seconds, or the floor where none does.

    batch_size: examples in a training step. The limit for a promotion grows with the time that the demo takes.
    """
    plans = [_plan(speed, goal, level, batch_size) for level in LEVELS]
    fitting = [plan for plan in plans if plan.seconds <= goal.seconds]
    return max(fitting, key=lambda plan: plan.scale.min_tokens, default=plans[0])


def _plan(speed: MachineSpeed, goal: Goal, level: float, batch_size: int) -> DemoPlan:
    floor = goal.floor
    scale = replace(
        floor,
        pause_seconds=max(BUSY * floor.clients * speed.served, LEAST_PAUSE),
        min_tokens=round(floor.min_tokens * level),
        answers_after=round(floor.answers_after * level),
        held_out=round(floor.held_out * level),
        stepwise=round(floor.stepwise * level),
        gate_texts=min(round(floor.gate_texts * level), max(floor.gate_texts, 200)),
    )
    seconds = RESERVE * sum(stage_seconds(speed, scale, batch_size).values())
    limit = floor.limit_seconds * max(1.0, seconds / goal.seconds)
    return DemoPlan(replace(scale, limit_seconds=limit), seconds)


def stage_seconds(speed: MachineSpeed, scale: Scale, batch_size: int) -> dict[str, float]:
    """Seconds of each stage, by name."""
    gathered = scale.min_tokens / speed.tokens / TRAINED
    steps = scale.epochs * math.ceil(TRAINED * gathered / (1 - scale.replay) / batch_size)
    held_out, golden = min(scale.gate_texts, (1 - TRAINED) * gathered), min(scale.gate_texts, GOLDEN)
    training = CHILD_START * (speed.start + speed.load) + steps * speed.training_step
    gate = 2 * HALF_CORES * (held_out + GOLDEN_LENGTH * golden) * speed.scored
    meanwhile = (training + gate) / (scale.pause_seconds / scale.clients + speed.served)
    after = scale.answers_after + scale.clients
    return {
        "start": speed.start + speed.load + SERVER_CHECKS * speed.alone,
        "gather": gathered * speed.served,
        "train": training,
        "gate": gate,
        "after": after * speed.served,
        "load": speed.load,
        "check": (gathered + meanwhile + after) * speed.checked + STEPWISE * scale.stepwise * speed.served,
        "held-out": scale.held_out * (speed.served + 4 * speed.scored),
        "time": (ARM_CHECKS + 3 * scale.turns) * speed.alone,
    }


def duration(seconds: float) -> str:
    """In words, rounded: "50 seconds", "4 minutes", "4.5 minutes"."""
    if seconds < 90:
        return f"{max(round(seconds / 10), 1) * 10} seconds"
    halves = round(seconds / 30) / 2
    return f"{halves:g} minutes"
