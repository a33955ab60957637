"""Model calls that are traced and replayed: when they are, and that they compute what the calls do."""

import gc
import itertools
import logging
import random
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
import pytest

from service.core import Prompt, Sampling
from service.engine import attention, replay
from service.engine.adapters import Draft
from service.engine.decoder import Decoder
from service.engine.drafters.model import DraftCalls
from service.engine.kv import paged_layer
from service.engine.kv.cache import RowCache
from service.engine.kv.layer import RowLayer
from service.engine.kv.paged_layer import PagedLayer
from service.engine.replay import FIRST_CALLS, Replay
from service.engine.strategy import CPU, CUDA, METAL, Strategy, using
from service.engine.target import Target
from service.models.heads import cut
from tests.support.batches import serve
from tests.support.cuda import NEEDS_CUDA, row_calls
from tests.support.oracle import noisy_copy, tiny_llama
from tests.support.pages import pages_of
from tests.support.typed import as_int

V = 97


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    with using(CUDA):
        yield


class Counted(nn.Module):
    """A model whose calls in Python are counted. asks: it reads an array, which no trace can."""

    def __init__(self, inner: Any, *, asks: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.asks = asks
        self.calls = 0

    @property
    def layers(self) -> list[nn.Module]:
        return self.inner.layers

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        self.calls += 1
        if self.asks and as_int(tokens[0, 0]) < 0:
            raise ValueError("no such token")
        return self.inner(tokens, cache=cache)


def rows(target: Target, lengths: Sequence[int]) -> RowCache:
    """A cache of rows of these lengths."""
    cache, texts = target.cache(0), random.Random(0)
    for length in lengths:
        row = target.cache(1)
        target(mx.array([[texts.randrange(4, V) for _ in range(length)]]), row)
        row.commit(length)
        cache.append(row)
    return cache


def test_a_shape_is_traced_once_and_rows_may_be_of_other_lengths() -> None:
    counted, plain = Counted(tiny_llama(0)), Target(tiny_llama(0), None)
    target = Target(counted, None)
    ours, theirs = rows(target, [20, 7, 1]), rows(plain, [20, 7, 1])
    counted.calls = 0
    lengths = [20, 7, 1]
    for turn in range(6):
        tokens = mx.array([[5 + turn, 6, 7]] * 3)
        found, wanted = target.verify(tokens, ours), plain(tokens, theirs)
        assert mx.allclose(found, wanted, atol=1e-5).item()
        lengths = [n + 1 + (i + turn) % 3 for i, n in enumerate(lengths)]
        ours.truncate(lengths)
        theirs.truncate(lengths)
    assert counted.calls == 2, "as it is, traced, and replayed"
    target.verify(mx.array([[5, 6]] * 3), ours)
    assert counted.calls == 3, "another shape"


def test_calls_that_follow_each_other_before_a_truncation_see_each_other() -> None:
    target = Target(tiny_llama(0), None)
    ours, theirs = rows(target, [9, 4]), rows(target, [9, 4])
    for turn in range(5):
        tokens = mx.array([[5 + turn], [9 + turn]])
        assert mx.allclose(target.verify(tokens, ours), target(tokens, theirs), atol=1e-5).item()
    ours.commit(5)
    assert ours.lengths.host == [14, 9]


def test_keys_and_values_are_written_in_place() -> None:
    target = Target(tiny_llama(0), None)
    cache = rows(target, [9, 4])
    target.pool.grow(3000)
    buffers = pages_of(cache).buffers()
    mx.eval(buffers)
    held = sum(array.nbytes for array in buffers)
    del buffers
    for turn in range(FIRST_CALLS + 3):
        base = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(target.verify(mx.array([[5], [6]]), cache), cache.arrays())
        cache.truncate([9 + turn, 4])
        assert mx.get_peak_memory() - base < held / 2


@NEEDS_CUDA
def test_what_is_written_in_place_is_what_would_be_scattered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(0, hidden=256)
    model.set_dtype(mx.bfloat16)
    ours, theirs = Target(model, None), Target(model, None)
    monkeypatch.setattr(theirs.pool, "in_place", False)
    caches, lengths = [rows(target, [20, 7, 1]) for target in (ours, theirs)], [20, 7, 1]
    for turn in range(FIRST_CALLS + 40):
        # The second call is handed over while the first is under way.
        for count in (3, 1):
            tokens = mx.array([[5 + turn % 50, 6, 7][:count]] * 3)
            found, wanted = (target.verify(tokens, cache) for target, cache in zip((ours, theirs), caches, strict=True))
            mx.async_eval(found, wanted)
            lengths = [n + 1 + (i + turn) % count for i, n in enumerate(lengths)]
            for cache in caches:
                cache.truncate(lengths)
        assert mx.array_equal(found, wanted).item()
    for row, length in enumerate(lengths):
        for one, other in zip(caches[0].contents(row), caches[1].contents(row), strict=True):
            for mine, same in zip(one, other, strict=True):
                assert mine is not None and same is not None and mine.shape[1] == length
                assert mx.array_equal(mine, same).item()


def test_whoever_reads_what_is_written_in_place_waits_for_the_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU nothing is written in place: what returns stands for the write. MLX orders calls by their inputs alone."""
    writes, waits = list[mx.array](), list[mx.array | None]()

    def write_in_place(keys: mx.array, *rest: mx.array) -> mx.array:
        writes.append(mx.zeros(1))
        return writes[-1]

    def gather_pages(
        pool: mx.array, table: mx.array, ends: mx.array, width: int, written: mx.array | None = None
    ) -> mx.array:
        waits.append(written)
        return attention.gather_pages(pool, table, ends, width)

    monkeypatch.setattr("service.engine.kv.pool.write_in_place", write_in_place)
    monkeypatch.setattr(paged_layer, "gather_pages", gather_pages)
    cache = RowCache(tiny_llama(0), 2)
    cache.storage.pool.in_place = True
    layer = cache.attention[0]
    assert isinstance(layer, PagedLayer)
    for _ in range(2):
        mask = layer.make_mask(2)
        keys, values = layer.update_and_fetch(mx.ones((2, 2, 2, 8)), mx.ones((2, 2, 2, 8)))
        call = layer.row_call(keys, values, mask)
        assert call is not None and call.written is writes[-1]
    assert [id(each) for each in waits] == [id(writes[0])] * 2 + [id(writes[1])] * 2
    assert cache.arrays()[-1] is writes[-1], "nothing else would run it"
    assert cache.arrays() == []


def test_calls_have_the_same_kernels_before_they_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row alone, a token at a time: MLX has kernels of its own for it, of attention and of rope, which round otherwise."""
    model = tiny_llama(0)
    target = Target(model, None)
    cache, found, offsets = rows(target, [9]), row_calls(monkeypatch), list[object]()
    offset: Any = RowLayer.offset.fget  # pyright: ignore[reportFunctionMemberAccess]

    def noted(layer: RowLayer) -> object:
        offsets.append(offset(layer))
        return offsets[-1]

    monkeypatch.setattr(RowLayer, "offset", property(noted))
    for _ in range(FIRST_CALLS + 1):
        target.verify(mx.array([[5]]), cache)
        cache.commit(1)
    assert len(found) == 2 * len(model.layers) and None not in found
    assert len(offsets) >= len(found) and all(isinstance(each, mx.array) for each in offsets)


def test_only_so_many_traces_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_TRACES", 2)
    counted = Counted(tiny_llama(0))
    target = Target(counted, None)
    cache = rows(target, [9])

    def calls(count: int) -> int:
        counted.calls = 0
        target.verify(mx.array([[5] * count]), cache)
        cache.truncate([9])
        return counted.calls

    assert [calls(n) for n in (1, 1, 2, 3)] == [1, 1, 1, 1], "the first of all twice"
    assert [calls(n) for n in (3, 2)] == [0, 0], "the last two"
    assert [calls(1) for _ in range(2)] == [1, 0]
    assert [calls(n) for n in (2, 1, 3)] == [0, 0, 1], "the one that was used longest ago has gone"


def test_a_version_that_no_longer_drafts_is_freed_at_once(target: Any) -> None:
    """Its weights are the device's memory, which Python's collector does not see: it may come too late."""
    versions = [Draft(number, noisy_copy(target, number, 0.1)) for number in range(3)]
    modules = {version.adapter: [ref(each) for each in version.model.modules()] for version in versions}
    decoder = Decoder(target, versions.pop(0), vocabulary=V, k=3)
    rounds = itertools.count(1)
    left: dict[int, int] = {}

    def between(decoder: Decoder) -> None:
        if next(rounds) % 15 == 0 and versions:
            before = decoder.batch.drafter
            assert before is not None
            left[before.draft.adapter] = len(decoder.rows)
            decoder.switch(versions.pop(0))

    gc.collect()
    gc.disable()
    try:
        prompts = [Prompt(tuple(range(5 + i, 15 + 2 * i)), Sampling(max_tokens=30)) for i in range(12)]
        serve(decoder, prompts, max_rows=4, between=between)
        alive = {adapter: sum(each() is not None for each in modules[adapter]) for adapter in modules}
    finally:
        gc.enable()
    assert left.keys() == {0, 1} and all(left.values()), "switched between rounds"
    assert alive == {0: 0, 1: 0, 2: len(modules[2])}


def test_a_model_that_cannot_be_traced_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    target, plain = Target(Counted(tiny_llama(0), asks=True), None), Target(tiny_llama(0), None)
    ours, theirs = rows(target, [9, 4]), rows(plain, [9, 4])
    with caplog.at_level(logging.WARNING, "service.engine.replay"):
        for turn in range(6):
            tokens = mx.array([[5 + turn], [9]])
            assert mx.array_equal(target.verify(tokens, ours), plain(tokens, theirs)).item()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("strategy", [CPU, METAL], ids=["CPU", "Metal"])
def test_other_devices_run_calls_as_they_are(strategy: Strategy) -> None:
    with using(strategy):
        counted = Counted(tiny_llama(0))
        target = Target(counted, None)
        cache = rows(target, [9])
        counted.calls = 0
        for _ in range(FIRST_CALLS + 3):
            target.verify(mx.array([[5]]), cache)
        assert counted.calls == FIRST_CALLS + 3


def test_long_calls_and_empty_caches_run_as_they_are() -> None:
    counted = Counted(tiny_llama(0))
    run = Replay(counted, lambda arrays, cache: (counted(arrays[0], cache.layers),), traces_first=True)
    cache = RowCache(counted, 1)
    run([mx.array([[5, 6]])], cache, 2)
    for _ in range(3):
        run([mx.array([[5] * 33])], cache, 33)
    assert counted.calls == 4
    cache.commit(101)
    assert cache.lengths.host == [101]


def test_a_whole_draft_with_a_cut_head_is_not_traced_with_the_ids_of_one_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service.engine.drafters.model.split", lambda model: None)
    draft = tiny_llama(0)
    cut(draft, list(range(4, 40)))
    head: Any = draft.lm_head
    calls, cache = DraftCalls.of(draft).replayed(draft), RowCache(draft, 1)
    calls.logits(mx.array([[5, 6]]), cache)
    for extra in (50, 60, 70, 80):
        head.allow_extra_ids(mx.array([[extra]]))
        logits = calls.logits(mx.array([[5]]), cache)
        assert [i for i in (50, 60, 70, 80) if mx.isfinite(logits[0, 0, i]).item()] == [extra]
