"""Timing at start: few calls, of which the least time counts, and nothing is left behind in the models."""

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from service.engine import device, profile
from service.engine.adapters import Draft, bare
from service.engine.costs import USUALLY_HELD, Costs, Load
from service.engine.decoder import Decoder
from service.engine.kv.cache import RowCache
from service.engine.planner import Planner
from service.engine.profile import EXTRA_IDS, SWEEPS, Seeds, measure, sizes
from service.engine.replay import FIRST_CALLS, Replay
from service.engine.strategy import CPU, CUDA, METAL, Strategy, using
from service.models.heads import cut, cut_head, shallow_copy
from tests.support.oracle import noisy_copy, tiny_llama

SLOW = 0.03


class Machine:
    """Delays every call while it is busy. busy: number of calls until it is idle. delay: extra seconds of a call, by rows
    and tokens."""

    def __init__(self, busy: int = 0, delay: Callable[[int, int], float] = lambda rows, tokens: 0.0) -> None:
        self.busy, self.delay = busy, delay
        self.calls: list[tuple[int, ...]] = []
        """The shape of each call's tokens."""

    def work(self, tokens: mx.array) -> None:
        self.calls.append(tokens.shape)
        if len(self.calls) <= self.busy:
            time.sleep(SLOW)
        if seconds := self.delay(*tokens.shape):
            time.sleep(seconds)


class Timed(nn.Module):
    """A model on that machine."""

    def __init__(self, model: nn.Module, machine: Machine) -> None:
        super().__init__()
        self.model = model
        self._machine = machine

    @property
    def layers(self) -> object:
        return self.model.layers

    def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
        self._machine.work(tokens)
        return self.model(tokens, cache=cache)


@pytest.fixture
def no_longer_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is timed SWEEPS times, however short it is."""
    monkeypatch.setattr(profile, "SHORT_SECONDS", 0.0)


def round_of(costs: Costs) -> float:
    return costs.round(Load(1, USUALLY_HELD), 1)


@pytest.mark.usefixtures("no_longer_than_needed")
def test_a_busy_moment_at_the_start_does_not_count() -> None:
    """The sweep that compiles and the first timed one are slow."""
    target, machine = tiny_llama(0), Machine(busy=20)
    costs = measure(Timed(target, machine), Timed(noisy_copy(target, 1, 0.1), machine), rows=[1], most=1)
    assert round_of(costs) < SLOW and len(machine.calls) > 20


@pytest.mark.parametrize("most", [pytest.param(4, marks=pytest.mark.nightly), 8])
@pytest.mark.usefixtures("no_longer_than_needed")
def test_sixteen_rows_take_few_calls(most: int) -> None:
    """Three sizes of batches, every length over one row alone, each call once to compile and SWEEPS times to be timed."""
    target, machine, steps = tiny_llama(0), Machine(), Machine()
    draft = Timed(noisy_copy(target, 1, 0.1), steps)
    measure(Timed(target, machine), draft, rows=sizes(16), most=most)
    assert sizes(16) == [1, 4, 16] and sizes(3) == [1, 3] and sizes(1) == [1]
    prepared = 4  # A first call over each batch, and one at each number of positions held.
    target_calls = (most + 1) + 4 + 4 + 2
    assert len(machine.calls) <= prepared + (1 + SWEEPS) * target_calls
    probes = 2  # Whether the draft can be split.
    assert len(steps.calls) <= prepared + probes + (1 + SWEEPS) * (4 + 2)
    for rows in sizes(16):
        assert {(rows, 1), (rows, 2), (rows, most + 1)} <= set(machine.calls), "what the first rounds run was run once"
    with using(CUDA):
        fewer = Machine()
        measure(Timed(target, fewer), None, rows=sizes(16), most=8)
    assert {tokens for rows, tokens in fewer.calls if rows == 1} == {1, 2, 3, 4, 6, 8}


@pytest.mark.usefixtures("no_longer_than_needed")
def test_calls_that_may_be_planned_are_timed() -> None:
    """On CUDA those of up to 64 tokens, and so the batches over which few proposals fit."""
    machine = Machine()
    with using(CUDA):
        measure(Timed(tiny_llama(0), machine), None, rows=sizes(64), most=15)
    planned = {1: (1, 2, 3, 4, 6, 8, 12, 16), 4: (1, 2, 6, 16), 16: (1, 2, 3, 4), 32: (1, 2), 64: (1,)}
    assert set(machine.calls) == {(rows, tokens) for rows, lengths in planned.items() for tokens in lengths}


def test_the_table_holds_what_calls_take() -> None:
    target, steps = tiny_llama(0), Machine(delay=lambda rows, tokens: 0.006)
    machine = Machine(delay=lambda rows, tokens: 0.01 * (1 + rows * tokens / 4))
    draft = Timed(noisy_copy(target, 1, 0.1), steps)
    costs = measure(Timed(target, machine), draft, rows=[1, 4], most=2)
    # A machine with other work wakes a sleeper late, never early.
    for rows, tokens in ((1, 1), (1, 3), (4, 1), (4, 3), (2, 2)):
        least = 0.01 * (1 + rows * tokens / 4)
        assert 0.99 * least < costs.call(Load(rows, 64), tokens) < least + 0.1
    assert 0.99 * 0.006 < costs.draft(Load(1, 64)) < 0.1
    assert costs.call(Load(4, 512), 3) >= costs.call(Load(4, 64), 3)


@pytest.mark.parametrize(("strategy", "alone"), [(CPU, False), (METAL, True)])
def test_a_call_by_itself_is_timed_where_others_follow_before_it_is_read(
    strategy: Strategy, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every wait takes 0.05 s here: a quarter of it a call where four are queued."""
    wait = device.wait

    def slowly(*arrays: object) -> None:
        time.sleep(0.05)
        wait(*arrays)

    monkeypatch.setattr(device, "wait", slowly)
    with using(strategy):
        costs = measure(tiny_llama(0), None, rows=[1, 4], most=1)
    assert set(costs.alone) == ({1, 4} if alone else set())
    assert all(0.025 < seconds < 0.1 for seconds in costs.alone.values())


def test_timing_restores_the_drafts_extra_ids() -> None:
    """Draft steps are timed with extra ids, which must not be left in the head."""
    target, widths = tiny_llama(0), list[int]()
    draft = shallow_copy(noisy_copy(target, 1, 0.1))
    cut(draft, list(range(0, 97, 2)))
    head = cut_head(draft)
    assert head is not None
    token = mx.array([[5]])
    before, also = draft(token), head.allow_extra_ids

    def watched(ids: mx.array | None) -> None:
        widths.append(0 if ids is None else ids.shape[1])
        also(ids)

    object.__setattr__(head, "allow_extra_ids", watched)
    measure(target, draft, rows=[1], most=1)
    assert EXTRA_IDS in widths and widths[-1] == 0
    assert mx.array_equal(draft(token), before)


def test_the_same_costs_keep_their_corrections() -> None:
    """Adapters of the same shapes cost the same, and a switch between them forgets nothing."""
    target = tiny_llama(0)
    drafts = [noisy_copy(target, seed, 0.1) for seed in (1, 2)]
    load, timed = Load(1, 0), Costs({(1, 1): 0.05, (1, 3): 0.06}, {1: 0.01}, {1: 0.0}, 0.0, 0.0)
    seeds, planner = Seeds(timed, drafts[0]), Planner(2, 0, timed)
    for _ in range(8):
        planner.costs.observe(load, 2, 2, 2.0 * timed.round(load, 2))
    planner.reseed(seeds.switch(drafts[1]))
    assert planner.costs.seconds(load, 2, 2) == pytest.approx(2.0 * timed.round(load, 2))
    planner.reseed(timed.scaled(0.5))
    assert planner.costs.seconds(load, 2, 2) == pytest.approx(timed.scaled(0.5).round(load, 2))


def test_a_draft_that_cannot_be_timed_keeps_the_costs() -> None:
    """It fails where it drafts, and is reported there."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = mx.zeros((3,))

        def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
            raise RuntimeError("no memory")

    target = tiny_llama(0)
    decoder = Decoder(target, bare(noisy_copy(target, 1, 0.1)), vocabulary=97, k=2, adaptive=True)
    decoder.profile(1)
    assert decoder.planner is not None
    before = decoder.planner.round_seconds()
    decoder.switch(Draft(1, Broken()))
    assert decoder.planner.round_seconds() == before
    decoder.switch(bare(noisy_copy(target, 2, 0.1)))
    assert decoder.planner.round_seconds() == before


@pytest.mark.usefixtures("no_longer_than_needed")
def test_each_call_is_traced_once_and_made_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a trace takes as long as ten calls, and all of them together are what a start waits for."""
    traced, made = list[Replay](), list[int]()
    new_trace, replayed = Replay._new_trace, Replay.__call__

    def tracing(replay: Replay, *arguments: Any) -> Callable[..., Any]:
        traced.append(replay)
        return new_trace(replay, *arguments)

    def calling(replay: Replay, arguments: Any, cache: RowCache, count: int) -> Any:
        made.append(count)
        return replayed(replay, arguments, cache, count)

    monkeypatch.setattr(Replay, "_new_trace", tracing)
    monkeypatch.setattr(Replay, "__call__", calling)
    target = tiny_llama(0)
    with using(CUDA):
        rows = sizes(64)
        kinds = len(profile._calls(target, None, rows, 10))
        traced.clear()
        made.clear()
        measure(target, None, rows=rows, most=10)
        queued = profile._queued()
    assert 0 < len(traced) <= kinds
    # One to begin with, those before it is timed, and the timed ones; over one token a row each by itself too.
    alone = len(rows) * (FIRST_CALLS + SWEEPS)
    assert len(made) <= len(rows) + 1 + kinds * (FIRST_CALLS + SWEEPS * queued) + alone


def test_kernels_are_compiled_before_calls_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    measured = profile.measure

    def timed(*given: Any, **named: Any) -> Costs:
        order.append("timed")
        return measured(*given, **named)

    monkeypatch.setattr(profile, "measure", timed)
    monkeypatch.setattr("service.engine.decoder.warm_up", lambda *given: order.append("warmed up"))
    for way in (CUDA, CPU):
        with using(way):
            target = tiny_llama(0)
            made = Decoder(target, bare(noisy_copy(target, 1, 0.1)), vocabulary=97, k=1, adaptive=True)
            made.profile(1)
            assert made.planner is not None
    assert order == ["warmed up", "timed", "timed"], "a CPU has nothing to compile"
