"""Simulated days of a server: its requests, its runs and what they gain, under the rules that decide when a run starts.

Only the world is simulated: how many texts and failure cases answers bring, how long a run takes, what it truly gains and how
exactly a gate measures that. When a run starts is decided by `service.lifecycle.policy`, at which level its gate tests by
`service.lifecycle.online_testing`. `before` holds the rules as they were: no readiness, no moment, no daily minutes, no wait
after refusals, a fixed level, and a watch that blocks runs until it has decided, for a week at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from statistics import NormalDist, median

import numpy as np

from service.core import Progress, RunState, TrainingRun, Trigger, Verdict
from service.lifecycle import policy
from service.lifecycle.gate import WORTHWHILE
from service.settings import GateSettings, TrainingSettings
from service.store.log.held_out import HeldOut
from service.store.log.training_texts import UntrainedCounts
from service.store.registry.run_history import TYPICAL, RunTimes

TICK = 15.0
TOKENS, CASES = 300, 24
"""Output tokens and failure cases of an answer."""
HELD_OUT_SHARE = 0.2
SPREAD = 0.06
"""Standard deviation of one conversation's relative difference between two adapters (docs/decisions/loop.md, "The gate")."""
POTENTIAL, HALF = 0.10, 400
"""What a draft can gain on this traffic in all, and after how many texts it has half of that."""
SLOWER = 0.19
"""Share of its speed that a server lost while a run took its turns, measured on a GPU (policy.SLOWDOWN is the allowance)."""
START_SECONDS, SECONDS_PER_TEXT = 30.0, 0.5
FIRST = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Traffic:
    """requests: arrivals in seconds from the start, sorted; None: busy all the time, at `rate` a second. answer_seconds: how
    long one takes."""

    requests: tuple[float, ...] | None = None
    rate: float = 0.0
    answer_seconds: float = 15.0


def personal(days: int, seed: int) -> Traffic:
    """Twenty requests a day, in bursts between 9 and 21 o'clock."""
    rng = np.random.default_rng(seed)
    arrivals: list[float] = []
    for day in range(days):
        bursts = rng.uniform(9, 21, 5) * 3600
        arrivals += [day * 86400 + burst + 40.0 * i for burst in bursts for i in range(4)]
    return Traffic(tuple(sorted(arrivals)))


@dataclass
class Outcome:
    """gain: true gain over the base draft at the end. lost: share of the serving time that training took. net: mean gain over
    all days, weighed by the time that answers took, less what training took."""

    started: int = 0
    promoted: int = 0
    minutes: float = 0.0
    lost: float = 0.0
    gain: float = 0.0
    net: float = 0.0
    days: list[float] = field(default_factory=list[float])
    """Minutes of each day's runs."""


class World:
    """One server for some days. before: under the former rules."""

    def __init__(self, traffic: Traffic, days: int, *, before: bool, seed: int) -> None:
        self.traffic, self.days, self.before = traffic, days, before
        self.rng = np.random.default_rng(seed)
        self.training, self.gate = TrainingSettings(), GateSettings()
        self.answers = self.learnt = self.untrained_from = 0.0
        self.gates: list[Verdict] = []
        self.runs: list[TrainingRun] = []
        self.durations: list[float] = []
        self.watch: tuple[float, float, float] | None = None
        """Of the undecided watch: when it began, at how many answers, and the true gain."""
        self.true_gain = 0.0
        self.busy = policy.BusyTime()
        self.lost = self.served = self.gained = 0.0
        self.outcome = Outcome(days=[0.0] * days)

    def run(self) -> Outcome:
        """Simulate all days."""
        now, busy_until = 0.0, 0.0
        arrivals = list(self.traffic.requests or ())
        training_until = -1.0
        while now < self.days * 86400:
            now += TICK
            while arrivals and arrivals[0] <= now:
                busy_until = arrivals.pop(0) + self.traffic.answer_seconds
                self.answers += 1
                self.served += self.traffic.answer_seconds
                self.gained += self.true_gain * self.traffic.answer_seconds
                if busy_until - self.traffic.answer_seconds < training_until:
                    self.lost += SLOWER * self.traffic.answer_seconds
            if self.traffic.requests is None:
                self.answers += self.traffic.rate * TICK
                self.served += TICK
                self.gained += self.true_gain * TICK
                self.lost += SLOWER * TICK if now < training_until else 0.0
            idle = 0.0 if self.traffic.requests is None else max(now - busy_until, 0.0)
            self.busy.add(TICK, busy=idle == 0.0)
            self._watch(now)
            if now >= training_until and self._starts(now, idle):
                training_until = now + self._train(now)
        self.outcome.lost = self.lost / max(self.served, 1.0)
        self.outcome.gain = self.true_gain
        self.outcome.net = (self.gained - self.lost) / max(self.served, 1.0)
        return self.outcome

    def _starts(self, now: float, idle: float) -> bool:
        new = (1 - HELD_OUT_SHARE) * (self.answers - self.untrained_from)
        counts = UntrainedCounts(int(new * CASES), int(new * TOKENS), int(new))
        runs = self.runs[-16:][::-1]
        if self.before:
            runs = [replace(run, state=RunState.PROMOTED) for run in runs[:1]]
        at = FIRST + timedelta(seconds=now)
        hindered = policy.hindrance(
            runs, at, cooldown_seconds=self.training.cooldown_seconds, watching=self._blocked(now)
        )
        decision = policy.decide(
            counts, hindered, min_cases=self.training.min_cases, min_tokens=self.training.min_tokens
        )
        if not isinstance(decision, Trigger):
            return False
        if self.before:
            return True
        held_out = min(int(HELD_OUT_SHARE * self.answers), self.gate.max_prompts)
        day = at - timedelta(hours=24)
        seconds = sum(length for run, length in zip(self.runs, self.durations, strict=True) if run.created_at > day)
        times = RunTimes(seconds, median(self.durations[-TYPICAL:]) if self.durations else None)
        texts = HeldOut(held_out, held_out, held_out * TOKENS)
        return not (
            policy.used_up(times, self.training.minutes_per_day)
            or policy.wrong_moment(idle, self.busy.share, times, self.gates, wanted=self.training.idle_seconds)
            or policy.unjudgeable(texts, self.gate, policy.levels(self.gates)[0])
        )

    def _train(self, now: float) -> float:
        """Do a run at once, as it will end; how long it takes."""
        new = (1 - HELD_OUT_SHARE) * (self.answers - self.untrained_from)
        texts = min(max(new, self.training.window), (1 - HELD_OUT_SHARE) * self.answers, self.training.max_generations)
        seconds = START_SECONDS + SECONDS_PER_TEXT * texts
        self.learnt += min(new, self.training.max_generations)
        self.untrained_from = self.answers
        reached = POTENTIAL * self.learnt / (self.learnt + HALF)
        true = (1 + reached) / (1 + self.true_gain) - 1
        held_out = min(int(HELD_OUT_SHARE * self.answers), self.gate.max_prompts)
        promoted = self._judge(true, held_out)
        end = FIRST + timedelta(seconds=now + seconds)
        state = RunState.PROMOTED if promoted else RunState.REJECTED
        self.runs.append(
            TrainingRun(
                len(self.runs) + 1, state, Trigger.CASES, 1, 0, 0, 0, Progress(), None, None, None,
                FIRST + timedelta(seconds=now), end,
            )
        )  # fmt: skip
        self.durations.append(seconds)
        if promoted:
            self.watch = (now + seconds, self.answers, true)
            self.true_gain = reached
        self.outcome.started += 1
        self.outcome.promoted += promoted
        self.outcome.minutes += seconds / 60
        self.outcome.days[min(int(now / 86400), self.days - 1)] += seconds / 60
        return seconds

    def _judge(self, true: float, held_out: int) -> bool:
        if held_out < self.gate.min_prompts:
            self.gates.append(Verdict(False, "too few", held_out, 0, 0.0, 0.0, 0.0))
            return False
        error = SPREAD / math.sqrt(held_out)
        gain = float(self.rng.normal(true, error))
        p_value = 1 - NormalDist().cdf(gain / error)
        level = 0.05 if self.before else policy.levels(self.gates)[0]
        promoted = p_value <= level and gain >= WORTHWHILE
        self.gates.append(Verdict(promoted, "", held_out, 0, gain, 0.0, 0.0, p_value=p_value, level=level))
        return promoted

    def _watch(self, now: float) -> None:
        """End the watch when what was answered since proves the gain, when there is all that it wants, or after a week."""
        if self.watch is None:
            return
        since, answers, true = self.watch
        compared = self.answers - answers
        # Four looks shared 5 % before; an e-value of 40 takes about as much as 3.2 standard deviations.
        proven = compared >= 12 and true * math.sqrt(compared) / SPREAD > (2.5 if self.before else 3.2)
        if proven or compared >= self.gate.watch_generations or now - since > 7 * 86400:
            self.watch = None

    def _blocked(self, now: float) -> bool:
        if self.watch is None or self.before:
            return self.watch is not None
        since, answers, _ = self.watch
        return self.answers - answers < self.gate.watch_generations / 4 and now - since < 86400
