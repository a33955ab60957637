"""Rows in pages of a pool: nothing is lost while it grows, pages are shared and given back, nobody takes more than it uses."""

import gc
import random
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.llama import Model

from service.core import FinishReason, Prompt, Sampling
from service.engine import device
from service.engine.adapters import bare
from service.engine.decoder import Decoder
from service.engine.footprint import row_bytes
from service.engine.kv.budget import Budget
from service.engine.kv.buffers import compaction_order
from service.engine.kv.cache import RowCache
from service.engine.kv.pages import FEWEST
from service.engine.kv.pool import FIRST_PAGES, Page, Pool
from service.engine.kv.prefix import Owner, PrefixCache
from service.engine.request import PADDING_LENGTH, Request
from service.engine.rounds import Plan, Step
from service.engine.strategy import CUDA, PAGE, using
from tests.support.batches import serve
from tests.support.oracle import forced, tiny_llama
from tests.support.pages import assert_given_back, cached, numbers_of, pages_of, rows_pages, taken

V, K = 97, 4


@pytest.fixture(autouse=True)
def on_cuda() -> Generator[None]:
    with using(CUDA):
        yield


@contextmanager
def without_collector() -> Generator[None]:
    """What nobody refers to must be gone at once: the collector may come much later."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def tokens(number: int, count: int) -> tuple[int, ...]:
    rng = random.Random(number)
    return tuple(rng.randrange(4, V) for _ in range(count))


def request(text: Sequence[int], answer: int, *, store: bool = True) -> Request:
    return Request("", Prompt(tuple(text), Sampling(max_tokens=answer), store=store), frozenset(), None)


def finish(decoder: Decoder, rows: Sequence[Request]) -> None:
    """Every text is the target's own."""
    while decoder.unfinished:
        decoder.round()
    for row in rows:
        assert row.output == forced(decoder.batch.target.model, row.prompt.tokens, row.output, row.prompt.sampling)


def leave_free(pool: Pool, count: int) -> list[Page]:
    """Take all free pages but so many."""
    return pool.take(len(pool.free) - count)


def small_pools(decoder: Decoder, count: int) -> list[Page]:
    """The pages beside `count`, so that these are all that there are."""
    return [page for pool in decoder.batch.pools for page in leave_free(pool, count)]


# ---------------------------------------------------------------------------------------------------------------- pools


def test_a_pool_that_doubles_under_way_keeps_every_text(target: Model, draft: nn.Module) -> None:
    """While prompts are read, and when a round is launched behind one that was not read yet."""
    read, behind = list[bool](), list[bool]()
    for count in (5, 7, 8, 9):
        decoder = Decoder(target, bare(draft), vocabulary=V, k=K)
        pools, launch_after = decoder.batch.pools, decoder.runner.launch_after
        others, rows = small_pools(decoder, count), [request(tokens(i, 20 + 30 * i), 60) for i in range(3)]

        def noted(step: Step, plan: Plan, launch_after: Any = launch_after, pools: list[Pool] = pools) -> Step:
            before = [pool.pages for pool in pools]
            after = launch_after(step, plan)
            behind.append(before != [pool.pages for pool in pools])
            return after

        decoder.runner.launch_after = noted
        for row in rows:
            decoder.admit(row)
        read.append(pools[0].pages > FIRST_PAGES)
        finish(decoder, rows)
        assert [pool.pages for pool in pools] == [2 * FIRST_PAGES] * 2
        others.clear()
        assert_given_back(decoder)
    assert any(read) and any(behind)


def test_a_pool_doubles_until_it_is_given_a_size() -> None:
    pool = Pool(8)
    held = pool.take(7)
    held += pool.take(2)
    assert pool.pages == 16
    pool.set_size(19)
    assert pool.pages == 20
    held += pool.take(10)
    assert pool.pages == 20
    held += pool.take(3)
    assert pool.pages == 23 and not pool.free
    assert sorted(page.number for page in held) == list(range(1, 23))
    held.clear()
    assert sorted(pool.free) == list(range(1, 23))


def test_a_pool_does_not_grow_beyond_the_devices_memory(target: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached prefixes give way; who needs more is told."""
    prefix = PrefixCache(2**26)
    decoder = Decoder(target, None, vocabulary=V, k=0, prefix=prefix)
    pool, row, free = decoder.batch.target.pool, request(tokens(0, 20 * PAGE), 4), list[int]()
    decoder.admit(row)
    finish(decoder, [row])
    monkeypatch.setattr(device, "free_bytes", lambda: free[-1])
    free.append(1000 * FIRST_PAGES * pool.page_bytes)
    held = pool.take(len(pool.free) + 1)
    pages = pool.pages
    assert pages > FIRST_PAGES and cached(prefix, pool) == 20
    free.append(pool.page_bytes)
    held += pool.take(len(pool.free) + 4)
    assert pool.pages == pages and cached(prefix, pool) == 16 == prefix.cached_length(Owner.TARGET, row.tokens) // PAGE
    with pytest.raises(MemoryError, match="not enough memory for more keys"):
        pool.take(17)
    assert pool.pages == pages and not prefix.nodes
    held.clear()
    assert taken(pool) == 0


def test_a_full_pool_takes_the_prefix_caches_oldest_pages_before_it_grows(target: Model, draft: nn.Module) -> None:
    """Of a decoder with a budget, which has all its pages from the start."""
    prefix, row = PrefixCache(2**26), row_bytes(target, draft)
    decoder = Decoder(target, bare(draft), vocabulary=V, k=K, prefix=prefix)
    decoder.memory.limit(Budget(100 * row.of(PAGE), row))
    assert [pool.pages for pool in decoder.batch.pools] == [101, 101]
    texts = [tokens(i, 10 * PAGE) for i in range(14)]
    for number, text in enumerate(texts):
        row = request(text, 4)
        decoder.admit(row)
        finish(decoder, [row])
        assert_given_back(decoder)
        assert number >= 9 or all(cached(prefix, pool) == 10 * (number + 1) for pool in decoder.batch.pools)
    most = len(prefix.nodes)
    assert most > 170 and [pool.pages for pool in decoder.batch.pools] == [101, 101]
    lengths = [prefix.cached_length(Owner.TARGET, text) for text in texts]
    assert lengths[:4] == [0] * 4 and lengths[-8:] == [10 * PAGE] * 8
    rows = [request(tokens(100 + i, 20 * PAGE), 8, store=False) for i in range(4)]
    for row in rows:
        decoder.admit(row)
    assert [pool.pages for pool in decoder.batch.pools] == [101, 101] and len(prefix.nodes) < most
    finish(decoder, rows)
    assert_given_back(decoder)


# --------------------------------------------------------------------------------------------------------- rows and pages


def test_rows_that_begin_with_a_cached_prefix_share_its_pages(target: Model, draft: nn.Module) -> None:
    decoder = Decoder(target, bare(draft), vocabulary=V, k=K, prefix=PrefixCache(2**24))
    head = tokens(0, 3 * PAGE)
    rows = [request((*head, *tokens(i, 5 + 20 * i)), 60 - 20 * i) for i in range(3)]
    for row in rows:
        decoder.admit(row)
    assert [row.cached_tokens for row in rows] == [0, 3 * PAGE, 3 * PAGE]
    assert decoder.batch.drafter is not None
    for cache in (decoder.batch.cache, decoder.batch.drafter.cache):
        held = [numbers_of(cache, row) for row in range(3)]
        assert held[0][:3] == held[1][:3] == held[2][:3]
        own = [number for numbers in held for number in numbers[3:]]
        assert len(set(own)) == len(own), "what is not of the prefix is a row's own"
    before = [np.array(each) for each in decoder.batch.cache.contents(0)[0] if each is not None]
    finish(decoder, rows)
    assert [len(row.output) for row in rows] == [60, 40, 20]
    again = decoder.batch.target.cache(1)
    assert decoder.batch.prefix is not None
    decoder.batch.prefix.load(Owner.TARGET, [head], again)
    after = [np.array(each) for each in again.contents(0)[0] if each is not None]
    for old, new in zip(before, after, strict=True):
        assert (old[:, : len(head)] == new).all(), "nobody has written to them"


@pytest.mark.parametrize("cached_too", [False, True], ids=["no prefix cache", "prefix cache"])
def test_rows_that_leave_give_their_pages_back(target: Model, draft: nn.Module, cached_too: bool) -> None:
    prefix = PrefixCache(2**24) if cached_too else None
    decoder, rng = Decoder(target, bare(draft), vocabulary=V, k=K, prefix=prefix), random.Random(0)

    def between(decoder: Decoder) -> None:
        if rng.random() < 0.1:
            decoder.leave([rng.choice(decoder.rows)])

    asked = [Prompt(tokens(i, rng.randint(2, 100)), Sampling(max_tokens=rng.randint(1, 60))) for i in range(12)]
    with without_collector():
        rows = serve(decoder, asked, max_rows=6, between=between)
        assert_given_back(decoder)
        assert all(bool(cached(prefix, pool)) == cached_too for pool in decoder.batch.pools)
    assert any(row.finish is None for row in rows) and any(row.finish for row in rows)


def test_a_prompt_that_is_cancelled_in_prefill_gives_its_pages_back(target: Model, draft: nn.Module) -> None:
    decoder = Decoder(target, bare(draft), vocabulary=V, k=K, prefill_chunk=32)
    with without_collector():
        prefill = decoder.start_prefill(request(tokens(0, 100), 8))
        decoder.prefill(prefill)
        decoder.prefill(prefill)
        assert [taken(pool) for pool in decoder.batch.pools] == [2, 2]
        del prefill
        assert_given_back(decoder)


def test_a_draft_that_failed_gives_its_pages_back(target: Model, draft: nn.Module) -> None:
    decoder = Decoder(target, bare(draft), vocabulary=V, k=K)
    rows = [request(tokens(i, 50), 30) for i in range(3)]
    decoder.admit(*rows)
    assert decoder.batch.drafter is not None
    with without_collector():
        decoder.leave([])
        assert taken(decoder.batch.drafter.pool) >= 6
        decoder.batch.disable_draft(ValueError("it failed"))
        assert taken(decoder.batch.drafter.pool) == 0
    finish(decoder, rows)


def test_padding_rows_take_no_pages(target: Model, draft: nn.Module) -> None:
    decoder = Decoder(target, bare(draft), vocabulary=V, k=K)
    rows = [request(tokens(i, 60), 100 if i else 40) for i in range(5)]
    for row in rows:
        decoder.admit(row)
    assert decoder.batch.drafter is not None
    caches, sizes = (decoder.batch.cache, decoder.batch.drafter.cache), set[int]()
    while decoder.unfinished:
        decoder.round()
        sizes.add(len(decoder.batch.rows))
        for cache in caches:
            for row, count, numbers in zip(
                decoder.batch.rows, rows_pages(cache), np.array(pages_of(cache).table), strict=True
            ):
                assert (count == 0) == row.padding and (numbers[:count] > 0).all() and not numbers[count:].any()
    assert sizes == {8, 4, 1, 0}
    finish(decoder, rows)


def test_padding_rows_take_no_pages_after_a_draft_has_failed(target: Model, draft: nn.Module) -> None:
    decoder = Decoder(target, bare(draft), vocabulary=V, k=K)
    rows = [request(tokens(i, 60), 60) for i in range(3)]
    for row in rows:
        decoder.admit(row)
    decoder.leave([])
    decoder.runner.restore(decoder.batch.rows, ValueError("it failed"))
    decoder.switch(bare(draft))
    for _ in range(6):
        decoder.round()
    assert decoder.batch.drafter is not None and any(each.drafted for each in rows[0].rounds)
    for cache in (decoder.batch.cache, decoder.batch.drafter.cache):
        assert [count == 0 for count in rows_pages(cache)] == [row.padding for row in decoder.batch.rows]
    finish(decoder, rows)


def test_a_long_row_takes_no_memory_for_short_ones_beside_it(target: Model) -> None:
    decoder = Decoder(target, None, vocabulary=V, k=0)
    rows = [request(tokens(0, 40 * PAGE - 90), 80), *(request(tokens(i, 4 * i), 80) for i in range(1, 7))]
    for row in rows:
        decoder.admit(row)
    for _ in range(60):
        decoder.round()
    held, content = rows_pages(decoder.batch.cache), [-(-len(row.tokens) // PAGE) for row in decoder.batch.rows]
    assert max(content) == 40 and taken(decoder.batch.target.pool) == sum(held)
    wanted = sum(count for count, row in zip(content, decoder.batch.rows, strict=True) if not row.padding)
    assert sum(held) <= 1.25 * wanted
    finish(decoder, rows)


def test_a_short_prompt_takes_no_memory_for_a_long_one_in_the_same_call(target: Model) -> None:
    decoder = Decoder(target, None, vocabulary=V, k=0)
    rows = [request(tokens(0, 500), 20), request(tokens(1, 6), 20)]
    decoder.admit(*rows)
    decoder.round()
    content = [-(-len(row.tokens) // PAGE) for row in decoder.rows]
    assert sum(rows_pages(decoder.batch.cache)) <= 1.25 * sum(content)
    finish(decoder, rows)


def test_tables_have_few_widths() -> None:
    """A call over a table of another width is traced anew."""
    cache, widths = RowCache(tiny_llama(0, layers=1), 2), list[int]()
    pages = pages_of(cache)
    for length in range(0, 40_000, 31):
        cache.rewind([length, 3])
        pages.reserve(5)
        widths.append(pages.table.shape[1])
        assert widths[-1] * PAGE >= length + 5
    assert sorted(set(widths)) == widths[:1] + [b for a, b in pairwise(widths) if a != b], "it does not become smaller"
    assert sorted(set(widths)) == [FEWEST, 4 * FEWEST, 16 * FEWEST, 64 * FEWEST]
    cache.compact([1], [])
    assert pages.table.shape == (1, FEWEST)


# --------------------------------------------------------------------------------------------------- everything at once


class Rows:
    """A cache of rows whose keys and values are numbers that no other position of any row has."""

    def __init__(self) -> None:
        self.pool, self.model = Pool(8), tiny_llama(0, layers=1)
        self.cache = self.new(0)
        self.wanted: list[list[float] | None] = []
        """What each row holds; None: padding."""
        self.next = 1.0

    def new(self, rows: int) -> RowCache:
        return RowCache(self.model, rows, pool=self.pool)

    def write(self, cache: RowCache, wanted: Sequence[list[float] | None], count: int, kept: Sequence[int]) -> None:
        """Feed every row `count` positions, of which kept[i] stay."""
        layer, rows = cache.attention[0], len(wanted)
        values = np.arange(rows * count).reshape(rows, count) + self.next
        self.next += rows * count
        new = mx.array(np.broadcast_to(values[:, None, :, None], (rows, 2, count, 4)).astype(np.float32))
        layer.make_mask(count)
        layer.update_and_fetch(new, -new)
        cache.truncate([length + stay for length, stay in zip(cache.lengths.host, kept, strict=True)])
        for row, fed, stay in zip(wanted, values.tolist(), kept, strict=True):
            if row is not None:
                row.extend(fed[:stay])

    def join(self, sizes: Sequence[int]) -> None:
        """New rows come, of these lengths: in the places of padding, then behind the others."""
        other, fresh = self.new(len(sizes)), [list[float]() for _ in sizes]
        self.write(other, fresh, max(sizes), sizes)
        free = [i for i, row in enumerate(self.wanted) if row is None]
        slots = [*free, *range(len(self.wanted), len(self.wanted) + len(sizes))][: len(sizes)]
        size = max(len(self.wanted), *(slot + 1 for slot in slots))
        self.cache.join([other], [len(sizes)], slots, size)
        self.wanted += [None] * (size - len(self.wanted))
        for slot, row in zip(slots, fresh, strict=True):
            self.wanted[slot] = row

    def pad(self, rows: set[int]) -> None:
        self.cache.pad(rows, PADDING_LENGTH)
        self.wanted = [None if i in rows else row for i, row in enumerate(self.wanted)]

    def compact(self) -> None:
        """Padding leaves."""
        gone = {i for i, row in enumerate(self.wanted) if row is None}
        order = compaction_order(len(self.wanted), gone)
        self.cache.compact(order, self.cache.copy_moved(order))
        self.wanted = [self.wanted[i] for i in order]

    def check(self) -> None:
        held = list[int]()
        for index, row in enumerate(self.wanted):
            if row is None:
                assert rows_pages(self.cache)[index] == 0
                continue
            assert self.cache.lengths.host[index] == len(row)
            if row:
                ((keys, values),) = self.cache.contents(index)
                assert values is not None
                assert (np.array(keys) == np.array(row)[None, :, None]).all()
                assert (np.array(values) == -np.array(row)[None, :, None]).all()
            held += numbers_of(self.cache, index)
        assert len(set(held)) == len(held) and 0 not in held
        assert taken(self.pool) == sum(rows_pages(self.cache))


JOIN = st.lists(st.integers(1, 80), min_size=1, max_size=4)
LEAVE = st.tuples(st.sets(st.integers(0, 5), min_size=1, max_size=3), st.booleans())
FEED = st.tuples(st.integers(1, 40), st.integers(0, 40))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(JOIN, LEAVE, FEED), min_size=1, max_size=5))
def test_rows_keep_their_contents_as_others_join_leave_and_grow(
    turns: list[tuple[list[int], tuple[set[int], bool], tuple[int, int]]],
) -> None:
    """Rows come, become padding, which leaves or not, and take on some of the tokens that they are fed."""
    with using(CUDA):
        rows = Rows()
        for coming, (gone, compacts), (count, kept) in turns:
            rows.join(coming)
            rows.check()
            rows.pad({row for row in gone if row < len(rows.wanted)})
            if compacts:
                rows.compact()
            rows.check()
            if rows.wanted:
                stay = [0 if row is None else min(kept + i, count) for i, row in enumerate(rows.wanted)]
                rows.write(rows.cache, rows.wanted, count, stay)
                rows.check()


def test_everything_at_once_in_small_pools(target: Model, draft: nn.Module) -> None:
    """Cached prefixes, cancellations and swaps, where pools are full all the time."""
    prefix, row, rng = PrefixCache(2**24), row_bytes(target, draft), random.Random(3)
    decoder = Decoder(target, bare(draft), vocabulary=V, k=K, prefix=prefix)
    decoder.memory.limit(Budget(70 * row.of(PAGE), row))
    texts, reused = [tokens(i, 150) for i in range(3)], 0

    def between(decoder: Decoder) -> None:
        if rng.random() < 0.1 and decoder.rows:
            row = rng.choice(decoder.rows)
            row.finish = FinishReason.CANCELLED
            decoder.leave([row])
        if rng.random() < 0.05:
            decoder.switch(bare(draft))

    for wave in range(3):
        asked = [
            Prompt(
                (*(text := rng.choice(texts))[: rng.randint(1, len(text))], *tokens(rng.randrange(1000), 30)),
                Sampling(max_tokens=rng.randint(1, 80), temperature=rng.choice([0.0, 0.8]), seed=wave),
                store=rng.random() < 0.8,
            )
            for _ in range(8)
        ]
        rows = serve(decoder, asked, max_rows=5, seed=wave, between=between)
        texts += [tuple(row.tokens) for row in rows]
        reused += sum(row.cached_tokens for row in rows)
        for row in rows:
            wanted = forced(target, row.prompt.tokens, row.output, row.prompt.sampling)
            assert row.output == (wanted[: len(row.output)] if row.finish is FinishReason.CANCELLED else wanted)
        assert_given_back(decoder)
    assert reused > 500
    assert [pool.pages for pool in decoder.batch.pools] == [71, 71]
