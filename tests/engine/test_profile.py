"""Call costs are timed repeatedly, so that a short load on the machine does not distort them."""

import time

import mlx.core as mx
import mlx.nn as nn
import pytest

from service.engine.adapters import bare
from service.engine.costs import USUALLY_HELD, Costs, Load
from service.engine.decoder import Decoder
from service.engine.planner import Choice, Planner
from service.engine.profile import Profile
from service.models.heads import cut, shallow_copy
from tests.support.oracle import noisy_copy, tiny_llama

SLOW = 0.03


class BusyMachine:
    """Delays every call while it is busy. calls: number of calls until it is idle again."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def work(self) -> None:
        self.calls -= 1
        if self.calls >= 0:
            time.sleep(SLOW)


class DelayedModel(nn.Module):
    """A model on that machine."""

    def __init__(self, model: nn.Module, machine: BusyMachine) -> None:
        super().__init__()
        self.model = model
        self._machine = machine

    @property
    def layers(self) -> object:
        return self.model.layers

    def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
        self._machine.work()
        return self.model(tokens, cache=cache)


def pair(calls: int) -> tuple[nn.Module, nn.Module]:
    target, machine = tiny_llama(0), BusyMachine(calls)
    return DelayedModel(target, machine), DelayedModel(noisy_copy(target, 1, 0.1), machine)


def round_of(costs: Costs) -> float:
    return costs.round(Load(1, USUALLY_HELD), 1)


def test_a_busy_moment_at_the_start_is_forgotten() -> None:
    """One pass makes at least twenty calls."""
    assert round_of(Profile(*pair(0), rows=[1], most=1).measure()) < SLOW
    assert round_of(Profile(*pair(20), rows=[1], most=1).measure()) < SLOW


def test_costs_measured_on_a_busy_machine_are_measured_again() -> None:
    machine = BusyMachine(10**6)
    target = tiny_llama(0)
    profile = Profile(
        DelayedModel(target, machine), DelayedModel(noisy_copy(target, 1, 0.1), machine), rows=[1], most=1, rest=1.0
    )
    first = profile.measure()
    assert round_of(first) > 2 * SLOW
    assert profile.settle() is None, "nothing was timed since"
    machine.calls = 0
    deadline = time.monotonic() + 30.0
    while not profile.again():
        assert time.monotonic() < deadline, "it was never due"
        time.sleep(0.01)
    while profile.again():
        pass
    assert not profile.again(), "it is not due so soon"
    costs = profile.settle()
    assert costs is not None and round_of(costs) < SLOW
    length = Planner(1, 0, first)
    length.learn(costs)
    assert length.round_seconds()[0] == round_of(costs)


def test_timing_restores_the_drafts_extra_ids() -> None:
    """Draft steps are timed with extra ids, which must not be left in the head."""
    target = tiny_llama(0)
    draft = shallow_copy(noisy_copy(target, 1, 0.1))
    cut(draft, list(range(0, 97, 2)))
    token = mx.array([[5]])
    before = draft(token)
    profile = Profile(target, draft, rows=[1], most=1, rest=0.0)
    profile.measure()
    while mx.array_equal(draft(token), before):
        assert profile.again()
    assert profile.settle() is not None
    assert mx.array_equal(draft(token), before)


def test_nearly_equal_costs_keep_their_corrections() -> None:
    of = Costs({(1, 1): 0.05, (1, 3): 0.06}, {1: 0.01}, {1: 0.0}, 0.0, 0.0)
    length = Planner(2, 0, of)
    load = Load(1, 0)
    for turn in range(200):
        choice = Choice(2 * (turn % 2), (0,))
        length.observe(load, choice, [None], [0], length.seconds(load, 0, 0) * (1.0 if not choice.drafted else 2.0))
    corrected = length.seconds(load, 2, 2)
    assert corrected > 1.1 * of.round(load, 2)
    length.learn(Costs({(1, 1): 0.0495, (1, 3): 0.059}, {1: 0.0099}, {1: 0.0}, 0.0, 0.0))
    assert length.seconds(load, 2, 2) == corrected
    other = Costs({(1, 1): 0.05, (1, 3): 0.05}, {1: 0.005}, {1: 0.0}, 0.0, 0.0)
    length.learn(other)
    assert length.seconds(load, 2, 2) == pytest.approx(other.round(load, 2))


def test_a_model_that_fails_during_timing_does_not_end_the_engine() -> None:
    """It is not timed again either."""

    class Broken(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self._broken = model, False

        @property
        def layers(self) -> object:
            return self.model.layers

        def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
            if self._broken:
                raise RuntimeError("no memory")
            return self.model(tokens, cache=cache)

    target = Broken(tiny_llama(0))
    profile = Profile(target, None, rows=[1], most=1, rest=0.01)
    profile.measure()
    target._broken = True
    time.sleep(0.02)
    assert not profile.again() and not profile.again()


def test_a_decoder_without_rows_measures_in_time() -> None:
    target = tiny_llama(0)
    decoder = Decoder(target, bare(noisy_copy(target, 1, 0.1)), vocabulary=97, k=2, adaptive=True)
    assert not decoder.idle(), "nothing was measured yet"
    decoder.profile(1)
    assert not decoder.idle(), "it was just measured"
