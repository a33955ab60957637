"""What calls over many tokens compute at a time: said from shapes, and launched in parts."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import pytest

from service.engine import device, work
from service.engine.kv.cache import RowCache
from service.engine.strategy import CPU, CUDA, using
from service.engine.target import Target
from service.engine.work import TIMES, Work
from tests.support.oracle import tiny_llama

MIB = 2**20


def test_it_is_said_from_the_shapes_of_matrices() -> None:
    model = tiny_llama(0)
    made = Work.of(model)
    layers = model.layers
    outputs = sum(each.weight.shape[0] for layer in layers for each in layer.modules() if isinstance(each, nn.Linear))
    assert made == Work(int(TIMES * 4 * outputs), 0, len(layers))
    sizes = sum(each.weight.size for layer in layers for each in layer.modules() if isinstance(each, nn.Linear))
    nn.quantize(model, group_size=32, bits=4)
    assert Work.of(model) == Work(made.token, 4 * sizes, len(layers)), "matrices are widened"
    assert Work.of(nn.Linear(3, 4)) == Work(0, 0, 0)


def test_two_parts_are_there_at_a_time() -> None:
    few, many = Work(token=MIB, call=0, layers=32), Work(token=MIB, call=4096 * MIB, layers=4)
    with using(CUDA):
        assert [few.parts(n) for n in (1, 512, 513, 2048, 10**6)] == [1, 1, 2, 4, 32]
        assert [few.under_way(n) // MIB for n in (1, 512, 1024, 2048)] == [1, 512, 1024, 1024]
        assert many.parts(1) == 4 and many.under_way(0) == 2048 * MIB
    with using(CPU):
        assert few.under_way(2048) == 128 * MIB, "of two layers"
    assert Work(0, 0, 0).parts(7) == 1 and Work(0, 0, 0).under_way(7) == 0


def test_a_part_waits_for_the_one_before_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, list[int]]] = []
    given = [mx.array(i) for i in range(5)]
    numbers = {id(each): i for i, each in enumerate(given)}

    def noted(kind: str, arrays: Sequence[mx.array]) -> None:
        events.append((kind, [numbers[id(each)] for each in arrays]))

    monkeypatch.setattr(device, "launch", lambda *arrays: noted("launch", arrays[0]))
    monkeypatch.setattr(device, "wait", lambda *arrays: noted("wait", arrays[0]))
    Work(token=work.PART // 256, call=0, layers=4).launch(given, 1024)
    assert events == [
        ("launch", [0]),
        ("launch", [1]),
        ("wait", [0]),
        ("launch", [2]),
        ("wait", [1]),
        ("launch", [3, 4]),
    ]


@pytest.mark.parametrize("way", [CPU, CUDA], ids=["rectangles", "pages"])
def test_parts_give_what_a_call_gives(way: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "PART", 1)
    with using(way):  # pyright: ignore[reportArgumentType]
        target, tokens = Target(tiny_llama(0), None), mx.array([[5, 9, 3, 70, 2, 8]])
        found: list[RowCache] = []
        for parts in (True, False):
            cache = target.cache(1)
            target(tokens, cache)
            with device.counting() as counts:
                (target.work.finish if parts else lambda arrays, _: device.wait(arrays))(cache.arrays(), tokens.size)
            assert counts.launches == (target.work.layers if parts else 0)
            cache.commit(tokens.size)
            found.append(cache)
        for one, other in zip(*(cache.contents(0) for cache in found), strict=True):
            assert all(mx.array_equal(a, b) for a, b in zip(one, other, strict=True))
