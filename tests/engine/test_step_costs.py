"""Costs of draft steps differ between adapters: they are measured where weights differ, and the gate counts them."""

import time
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import pytest

from service.core import Score
from service.engine.adapters import Draft
from service.engine.costs import Costs
from service.engine.decoder import Decoder
from service.engine.folding import as_served
from service.engine.planner import Planner
from service.engine.profile import step_ratios
from service.learning import lora
from service.lifecycle import gate
from service.settings import GateSettings
from tests.support.oracle import noisy_copy, tiny_llama
from tests.support.typed import layers_of, leaves

BYTES_A_SECOND = 20e6


class MemoryBound(nn.Module):
    """A model whose calls take as long as reading its weights, as on a GPU; on a CPU quantised products are slower
    instead."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, 0

    @property
    def layers(self) -> list[nn.Module]:
        return layers_of(self.model)

    def __call__(self, tokens: mx.array, cache: list[object] | None = None) -> mx.array:
        self.calls += 1
        time.sleep(bytes_of(self.model) / BYTES_A_SECOND)
        return self.model(tokens, cache=cache)


def bytes_of(model: nn.Module) -> int:
    return sum(array.nbytes for _, array in leaves(model.parameters()))


@cache
def drafts() -> tuple[MemoryBound, MemoryBound]:
    """A four-bit draft, and the same with a zero adapter of so high a rank that a step reads more than twice as much."""
    base, trained = (tiny_llama(1, hidden=128) for _ in range(2))
    for model in (base, trained):
        nn.quantize(model, group_size=32, bits=4)
    lora.wrap(trained, rank=96, scale=2.0, seed=0)
    return MemoryBound(base), MemoryBound(as_served(trained, None))


def test_drafts_of_the_same_shapes_cost_the_same() -> None:
    one, other = (MemoryBound(noisy_copy(tiny_llama(0), seed, 0.1)) for seed in (1, 2))
    assert step_ratios({"0": one, "candidate": other}) == {"0": 1.0, "candidate": 1.0}
    assert one.calls == other.calls == 0, "no chance of timing tells them apart"


def test_an_adapter_of_a_quantised_draft_is_charged_what_its_steps_cost() -> None:
    plain, folded = drafts()
    tokens = mx.array([[5, 6, 7]])
    assert mx.allclose(plain.model(tokens), folded.model(tokens), atol=1e-4), "it agrees with the target as often"
    more = bytes_of(folded) / bytes_of(plain)
    assert more > 2.5
    found = step_ratios({"0": plain, "4": folded, "5": MemoryBound(as_served(folded.model, None))})
    assert found["0"] == 1.0 and 2.0 < found["4"] == found["5"] < 1.5 * more


def test_the_gate_refuses_what_costs_more_than_it_saves() -> None:
    """A candidate that needs 5 % fewer calls, on a draft whose step is a tenth of a target call."""
    plain, folded = drafts()
    ratio = step_ratios({"0": plain, "candidate": folded})["candidate"]
    costs = Planner(3, 0, Costs({(1, 1): 1.0, (1, 4): 1.1}, {1: 0.1}, {1: 0.0}, 0.0, 0.0))

    def scores(share: float) -> list[Score]:
        calls = [(60.0 + i % 7, 45.0 + i % 5, 40.0 + i % 3) for i in range(40)]
        return [Score(str(i), "a", 100, 50, tuple(n * share for n in each)) for i, each in enumerate(calls)]

    rules = GateSettings.model_validate({"min_prompts": 8, "min_tokens": 100, "bootstrap": 200})
    before, serving = scores(1.0), costs.round_seconds()
    slower = costs.round_seconds(ratio)
    parent = gate.Scored(before, seconds=serving)
    free = gate.judge(gate.Scored(scores(0.95), seconds=serving), parent, rules, seed=1)
    true = gate.judge(gate.Scored(scores(0.95), seconds=slower), parent, rules, seed=1)
    assert free.promoted and free.gain == pytest.approx(1 / 0.95 - 1)
    assert not true.promoted and true.gain < 0
    cheap = gate.judge(gate.Scored(scores(1.0), seconds=serving), gate.Scored(before, seconds=slower), rules, seed=1)
    assert cheap.promoted and cheap.gain > 0, "as many calls, each for less"


def test_a_switch_times_the_new_draft() -> None:
    plain, folded = drafts()
    decoder = Decoder(tiny_llama(0), Draft(0, plain), vocabulary=97, k=1, adaptive=True)
    decoder.profile(1)
    assert decoder.planner is not None
    (before,) = decoder.planner.round_seconds()
    assert before > bytes_of(plain) / BYTES_A_SECOND
    decoder.switch(Draft(1, folded))
    (after,) = decoder.planner.round_seconds()
    assert after > 1.5 * before
    decoder.switch(Draft(2, MemoryBound(as_served(folded.model, None))))
    (same,) = decoder.planner.round_seconds()
    assert same == after
    decoder.switch(Draft(0, plain))
    (back,) = decoder.planner.round_seconds()
    assert back < 0.8 * after
