"""What calls over many tokens compute at a time: said from shapes, and evaluated in parts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchLinear

from service.engine import device
from service.engine.activations import TIMES, Activations
from service.engine.kv.cache import RowCache
from service.engine.strategy import CPU, CUDA, METAL, Strategy, current, using
from service.engine.target import Target
from tests.support.families import IDENTICAL, RECURRENT, build
from tests.support.oracle import tiny_llama

MIB = 2**20


def linear(model: Any) -> list[Any]:
    return [each for layer in model.layers for each in layer.modules() if isinstance(each, nn.Linear)]


def test_they_are_said_from_the_shapes_of_matrices() -> None:
    model = tiny_llama(0)
    outputs = sum(len(each.weight) for each in linear(model))
    made = Activations.of(model)
    assert made == Activations(int(TIMES * 4 * outputs), len(model.layers))
    numbers = sum(each.weight.size for each in linear(model))
    nn.quantize(model, group_size=32, bits=4)
    assert Activations.of(model) == replace(made, copies=4 * numbers)
    nn.quantize(model := tiny_llama(0), group_size=32, bits=4, mode="mxfp4")
    assert Activations.of(model) == replace(made, token=made.token // 2, copies=2 * numbers), "scales of eight bits"
    assert Activations.of(nn.Linear(3, 4)) == Activations(0, 0)


def test_a_token_goes_through_some_experts() -> None:
    model: Any = build("gpt_oss", IDENTICAL["gpt_oss"])
    chosen = model.args.num_experts_per_tok
    experts = [each for layer in model.layers for each in layer.modules() if isinstance(each, SwitchLinear)]
    assert chosen > 1 and experts
    outputs = sum(len(each.weight) for each in linear(model)) + chosen * sum(each.weight.shape[1] for each in experts)
    assert Activations.of(model).token == int(TIMES * 4 * outputs)


def test_a_call_of_a_recurrent_model_is_one_part_beside_pages() -> None:
    model: Any = build("lfm2", RECURRENT["lfm2"])
    for way, layers in ((CUDA, 1), (METAL, len(model.layers)), (CPU, len(model.layers))):
        with using(way):
            made = Activations.of(model)
            recurrent = len(model.layers) - len(model.args.full_attn_idxs)
            assert made.layers == layers and made.token > 0
            # What those layers read is recorded until the call is committed.
            assert made.held == 4 * recurrent * model.args.hidden_size
            assert made.peak_bytes(64) >= 64 * made.held


def test_two_parts_are_there_at_a_time() -> None:
    few, many = Activations(token=MIB, layers=32), Activations(token=4096 * MIB, layers=4)
    with using(CUDA):
        assert [few.parts(n) for n in (1, 512, 513, 2048, 10**6)] == [1, 1, 2, 4, 32]
        assert [few.peak_bytes(n) // MIB for n in (1, 512, 1024, 2048)] == [1, 512, 1024, 1024]
        assert many.parts(1) == 4 and many.peak_bytes(1) == 2048 * MIB
    with using(CPU):
        assert few.peak_bytes(2048) == 128 * MIB, "of two layers"
    quantised = replace(few, copies=1024 * MIB)
    with using(CUDA):
        assert [quantised.parts(n) for n in (300, 301, 512)] == [1, 3, 3]
        assert [quantised.peak_bytes(n) // MIB for n in (300, 2048)] == [300, 1024]
    with using(METAL):
        assert quantised.peak_bytes(2048) == few.peak_bytes(2048)
    assert Activations(0, 0).parts(7) == 1 and Activations(0, 0).peak_bytes(7) == 0


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """What was launched and waited for: arrays by their number in GIVEN."""
    found, numbers = list[tuple[str, list[int]]](), {id(each): i for i, each in enumerate(GIVEN)}

    def noted(kind: str, arrays: Sequence[mx.array]) -> None:
        found.append((kind, [numbers[id(each)] for each in arrays]))

    monkeypatch.setattr(device, "launch", lambda *arrays: noted("launch", arrays[0]))
    monkeypatch.setattr(device, "wait", lambda *arrays: noted("wait", arrays[0]))
    return found


GIVEN = [mx.array(i) for i in range(5)]


def test_a_part_waits_for_the_one_before_the_last(events: list[tuple[str, list[int]]]) -> None:
    made = Activations(token=current().part // 256, layers=4)
    made.evaluate(GIVEN, 1024)
    assert events == [
        ("launch", [0]),
        ("launch", [1]),
        ("wait", [0]),
        ("launch", [2]),
        ("wait", [1]),
        ("launch", [3, 4]),
        ("wait", [0, 1, 2, 3, 4]),
    ]
    events.clear()
    made.evaluate(GIVEN[:2], 1024)
    assert events == [("launch", [0]), ("launch", [1]), ("wait", [0, 1])], "no more parts than arrays"
    events.clear()
    made.evaluate(GIVEN, 1)
    assert events == [("wait", [0, 1, 2, 3, 4])]


def test_small_calls_are_not_waited_for_until_they_are_many(events: list[tuple[str, list[int]]]) -> None:
    made = Activations(token=current().part // 256, layers=4)
    waited = [made.evaluate(GIVEN[:1], 100, wait=False) for _ in range(5)]
    assert waited == [False, False, True, False, False]
    assert [kind for kind, _ in events] == ["launch", "launch", "wait", "launch", "launch"]
    events.clear()
    assert not made.evaluate(GIVEN, 1024, wait=False), "but for the last two parts"
    assert [kind for kind, _ in events] == ["launch", "launch", "wait", "launch", "wait", "launch"]
    assert made.evaluate(GIVEN[:1], 1, wait=False), "behind it"


@pytest.mark.parametrize("way", [CPU, METAL, CUDA], ids=["CPU", "Metal", "CUDA"])
def test_parts_give_what_a_call_gives(way: Strategy) -> None:
    way = replace(way, part=1)
    with using(way):
        target, tokens = Target(tiny_llama(0), None), mx.array([[5, 9, 3, 70, 2, 8]])
        found: list[RowCache] = []
        for parts in (True, False):
            cache = target.cache(1)
            target(tokens, cache)
            if parts:
                with device.counting() as counts:
                    target.activations.evaluate(cache.arrays(), tokens.size)
                assert counts.launches == target.activations.layers
            else:
                device.wait(cache.arrays())
            cache.commit(tokens.size)
            found.append(cache)
        for one, other in zip(*(cache.contents(0) for cache in found), strict=True):
            for mine, theirs in zip(one, other, strict=True):
                assert (mine is None and theirs is None) or mx.array_equal(mine, theirs)  # pyright: ignore[reportArgumentType]
