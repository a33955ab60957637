"""Keys and values within a budget: who is admitted, who goes back to the queue, and that nobody's text changes by it."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest

from service.core import Delta, FinishReason, Prompt, Sampling
from service.engine import decoder, memory, strategy
from service.engine.decoder import Decoder
from service.engine.engine import Engine
from service.engine.footprint import row_bytes
from service.engine.kv.budget import LONGEST, Budget, RowBytes, prefix_bytes, usable
from service.engine.kv.buffers import PART
from service.engine.kv.cache import RowCache
from service.engine.kv.pool import FIRST_PAGES, Page
from service.engine.kv.prefix import PrefixCache
from service.engine.request import Request
from service.engine.scheduler import Scheduler
from service.engine.strategy import CPU, CUDA, METAL, PAGE, STEP, Strategy, current, using
from service.engine.ticket import Ticket
from service.engine.unloading import Unloaded
from tests.engine.test_thread import (
    BlockingHook,
    Client,
    EngineHarness,
    Hook,
    decoding,
    long_prompts,
    prompt,
    unchanged,
    wait_for,
)
from tests.support.oracle import noisy_copy, tiny_llama
from tests.support.pages import cached, rows_pages, taken

GROWING = 2
"""Times the size of a batch that is a single part (`buffers.PART`) while it grows."""


def of_keys_and_values(target: nn.Module, draft: nn.Module | None) -> RowBytes:
    """What rows take, without what a call computes."""
    return replace(row_bytes(target, draft), scores=0)


class BudgetHarness(EngineHarness):
    """With memory for `positions` positions of keys and values; where they are in rectangles twice as much, as these grow.
    most: bytes that were held."""

    def __init__(
        self, positions: int, target: Hook = unchanged, draft: Hook | None = unchanged, *, rows: int = 8
    ) -> None:
        super().__init__(target, draft, rows=rows)
        self.positions, self.max_rows, self.most = positions, rows, 0
        self.others: list[Page] = []
        """Pages that pools have beyond the budget."""

    def build(self, before: Unloaded | None = None) -> Engine:
        engine = super().build(before)
        row = of_keys_and_values(tiny_llama(0), noisy_copy(tiny_llama(0), 1, 0.3) if engine.base else None)
        budget = Budget(self.positions * row.first * (1 if current().paged else GROWING), row)
        engine.decoder.memory.limit(budget)
        if current().paged:
            for pool, pages in zip(engine.decoder.batch.pools, budget.pages, strict=True):
                self.others += pool.take(pool.pages - 1 - pages)
        return engine

    def measure(self, client: Client) -> None:
        """As a client's `on_delta`."""
        assert self.engine is not None
        batch = self.engine.decoder.batch
        caches = [batch.cache, *([batch.drafter.cache] if batch.drafter is not None else [])]
        self.most = max(self.most, sum(map(held_bytes, caches)))

    @property
    def budget(self) -> Budget:
        assert self.engine is not None and self.engine.decoder.memory.budget is not None
        return self.engine.decoder.memory.budget

    def assert_kept(self) -> None:
        """The budget was, and without rows only the prefix cache holds pages."""
        assert self.engine is not None and self.engine.decoder.memory.budget is not None
        if self.others:
            assert 0 < self.most <= self.budget.size
            for pool in self.engine.decoder.batch.pools:
                assert pool.pages == FIRST_PAGES, "it did not grow"
                mine = sum(page.pool is pool for page in self.others)
                assert taken(pool) == mine + cached(self.engine.decoder.batch.prefix, pool)
        else:
            assert 0 < self.most <= self.budget.size // GROWING, "buffers that grow hold the old ones too"


def held_bytes(cache: RowCache) -> int:
    """What a batch's rows hold."""
    if cache.pages is None:
        return sum(array.nbytes for array in cache.arrays())
    return sum(rows_pages(cache)) * cache.pages.pool.page_bytes


BOTH = pytest.mark.parametrize(
    "way",
    [pytest.param(CPU, id="cpu", marks=pytest.mark.nightly), pytest.param(CUDA, id="cuda")],
    indirect=True,
)


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Strategy:
    """What the engine's thread, too, takes a CPU for."""
    monkeypatch.setattr(strategy, "CPU", request.param)
    return request.param


@pytest.fixture
def short_sighted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are admitted that do not fit with their answers."""
    monkeypatch.setattr(memory, "HEADROOM", 1)


def greedy_and_seeded(count: int, tokens: int) -> list[Prompt]:
    asked = long_prompts(count, tokens)
    assert {one.sampling.greedy for one in asked} == {True, False}
    return asked


DAILY = (CUDA, False, unchanged)


@pytest.mark.usefixtures("short_sighted")
@pytest.mark.parametrize(
    ("way", "store", "draft"),
    [
        pytest.param(
            way,
            store,
            draft,
            id=f"{name}-{store}-{draft and 'unchanged'}",
            marks=() if (way, store, draft) == DAILY else pytest.mark.nightly,
        )
        for way, name in ((CPU, "cpu"), (METAL, "metal"), (CUDA, "cuda"))
        for store in (True, False)
        for draft in (unchanged, None)
    ],
    indirect=["way"],
)
@pytest.mark.usefixtures("way")
def test_the_youngest_go_back_to_the_queue_and_every_text_is_the_targets_own(draft: Hook | None, store: bool) -> None:
    """Six requests fit while they have up to STEP positions, not beyond. Those that are not stored leave nothing in the prefix
    cache, so that all of it is prefilled again."""
    asked = [replace(one, store=store) for one in greedy_and_seeded(6, STEP + 40)]
    with BudgetHarness(7 * STEP, draft=draft) as harness:
        clients = [harness.submit(one, harness.measure) for one in asked]
        ends = [client.finished(FinishReason.LENGTH) for client in clients]
        assert harness.preemptions >= 2
        wait_for(lambda: not harness.thread.status().rows, "all rows are free")
        assert harness.thread.status().kv_cache_usage == 0.0
        harness.assert_kept()
    assert len(harness.read) == 6, "a prompt counts once, however often it is prefilled"
    assert [end.timings.prompt_n for end in ends] == [len(one.tokens) for one in asked]
    if store:
        by_id = {one.id: one for one in harness.generations}
        assert [list(by_id[client.ticket.result().id].output) for client in clients] == [
            client.tokens for client in clients
        ]


@pytest.mark.parametrize(
    "way",
    [pytest.param(CPU, id="cpu"), pytest.param(CUDA, id="cuda", marks=pytest.mark.nightly)],
    indirect=True,
)
@pytest.mark.usefixtures("way", "short_sighted")
def test_the_oldest_runs_through(monkeypatch: pytest.MonkeyPatch) -> None:
    sent_back: list[Ticket] = []
    requeue = Scheduler.requeue

    def noting(scheduler: Scheduler, ticket: Ticket) -> None:
        sent_back.append(ticket)
        requeue(scheduler, ticket)

    monkeypatch.setattr(Scheduler, "requeue", noting)
    with BudgetHarness(7 * STEP) as harness:
        clients = [harness.submit(one) for one in greedy_and_seeded(6, STEP + 40)]
        for client in clients:
            client.finished()
    assert sent_back and not any(ticket is clients[0].ticket.result() for ticket in sent_back)


@BOTH
def test_nobody_is_admitted_only_to_go_back(way: Strategy) -> None:
    """One comes when the other is about to need more positions, with which both do not fit: it waits for that one's end."""
    first, second = long_prompts(1, 2 * STEP + 10)[0], prompt(1, 6, 8)
    late: list[Client] = []
    with BudgetHarness(2 * STEP + PAGE if way.paged else 5 * STEP) as harness:

        def submit(client: Client) -> None:
            if not late and len(first.tokens) + len(client.tokens) >= 2 * STEP - 6:
                late.append(harness.submit(second))

        harness.submit(first, submit).finished(FinishReason.LENGTH)
        late[0].finished()
    assert harness.preemptions == 0


def test_a_round_under_way_goes_on_where_nobody_can_go_back() -> None:
    """One that runs, and a prompt that does not fit with it: no look at memory costs a wait for the device."""
    with using(METAL):
        decoder = Decoder(tiny_llama(0), None, vocabulary=97, k=0, key=mx.random.key(1))
        row = of_keys_and_values(tiny_llama(0), None)
        decoder.memory.limit(Budget(GROWING * STEP * row.first, row))
        (asked,) = long_prompts(1, 64)
        decoder.admit(Request("0", asked, frozenset(), None))
        decoder.round()
        under_way = decoder._step
        assert under_way is not None and decoder.preempt([4 * STEP]) == [] and decoder._step is under_way


def test_several_that_go_back_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with EngineHarness(rows=4) as harness:
        thread, engine = harness.thread, harness.engine
        assert engine is not None
        tickets = [Ticket(Prompt((5, 6, 7), Sampling()), _nowhere) for _ in range(3)]
        for ticket in tickets:
            ticket.row = engine.new_request(ticket.id, ticket.prompt, ticket.arrived_at)
        scheduler = Scheduler(4, 4)
        scheduler.running = tickets.copy()
        monkeypatch.setattr(thread, "_scheduler", scheduler)
        monkeypatch.setattr(engine.decoder, "preempt", lambda prefilling: [ticket.row for ticket in tickets[1:]])
        thread._preempt(engine)
        assert list(scheduler.waiting) == tickets[1:] and scheduler.running == tickets[:1]
        scheduler.clear()


@BOTH
@pytest.mark.usefixtures("way")
def test_a_request_waits_for_memory_and_smaller_ones_do_not_pass_it() -> None:
    hold = BlockingHook(at=2, match=decoding)
    long, short = prompt(1, 3 * STEP, 8), prompt(2, 6, 8)
    with BudgetHarness(5 * STEP, hold) as harness:
        first = harness.submit(long_prompts(1, 48)[0])
        assert hold.reached.wait(10.0)
        others = [harness.submit(one) for one in (long, short)]
        hold.release.set()
        wait_for(lambda: len(harness.observed) > 4, "it goes on")
        assert not first.ended.is_set() and not any(client.started.is_set() for client in others)
        for client in (first, *others):
            client.finished()
        assert not harness.preemptions


@pytest.mark.parametrize(
    ("way", "draft"),
    [
        pytest.param(CPU, unchanged, id="unchanged-cpu"),
        pytest.param(CPU, None, id="None-cpu", marks=pytest.mark.nightly),
        pytest.param(CUDA, unchanged, id="unchanged-cuda", marks=pytest.mark.nightly),
        pytest.param(CUDA, None, id="None-cuda", marks=pytest.mark.nightly),
    ],
    indirect=["way"],
)
@pytest.mark.usefixtures("way", "short_sighted")
def test_cancelled_after_it_went_back_to_the_queue(draft: Hook | None) -> None:
    """It ends with what it has, and is recorded."""
    gone: list[Client] = []
    met = threading.Event()
    with BudgetHarness(7 * STEP, draft=draft) as harness:

        def look(client: Client) -> None:
            # On the engine's thread.
            waiting = [ticket for ticket in harness.thread._scheduler.waiting if ticket.row is not None]
            if waiting and not gone:
                (found,) = [each for each in clients if each.ticket.result() is waiting[0]]
                gone.append(found)
                found.cancel()
                met.set()

        clients = [harness.submit(one, look) for one in greedy_and_seeded(6, STEP + 40)]
        for client in clients:
            client.finished()
        assert met.is_set()
    end = gone[0].finished(FinishReason.CANCELLED)
    assert 0 < len(end.output) < STEP + 40
    assert [one.finish for one in harness.generations if one.id == end.id] == [FinishReason.CANCELLED]


@pytest.mark.parametrize("way", [CPU, CUDA], ids=["rectangles", "pages"])
def test_what_fits(way: Strategy) -> None:
    budget, most = Budget(size=2 * 10 * 1024 * 7, row=RowBytes(7)), (20 if way.paged else 10) * 1024
    with using(way):
        assert most * 7 // 8 <= budget.longest() <= most
        assert budget.fits([budget.longest()]) and 7 / 8 <= budget.used([budget.longest()]) <= 1.0
        assert budget.longest(4) < budget.longest()
        assert budget.fits([budget.longest(4)] * 4) and not budget.fits([budget.longest(4) * 2] * 4)


def test_what_fits_in_rectangles() -> None:
    """Every row takes as many positions as the longest, and growing takes the whole batch again where it is one part. A prompt
    in prefill has buffers beside all slots of the batch."""
    budget = Budget(size=2 * 10 * 1024 * 7, row=RowBytes(7))
    with using(CPU):
        assert budget.fits([1024] * 7) and not budget.fits([1024] * 9) and budget.fits([1024] * 4, [1024] * 4)
        assert budget.fits([1024] * 2, have=8) and not budget.fits([1024] * 2, have=11)
        assert budget.fits([1024] * 2, [1024], have=9) and not budget.fits([1024] * 2, [1024], have=10)
        assert budget.fits([1024, *[1] * 7]) and not budget.fits([2048, *[1] * 7])


def test_growing_takes_a_part_of_the_layers_and_every_row_its_states() -> None:
    """Buffers once; besides them old and new ones of a part, of a layer at least; and by row what does not grow."""
    row = RowBytes(2**16, layer=2**12, fixed=1000, scores=100)
    with using(CPU):
        assert row.growth(1, 2**10) == row.of(2**10) < PART, "all of it"
        assert row.growth(1, 2**14) == PART and row.growth(1, 2**16) == 2**16 * 2**12 > PART
        budget = Budget(2**40, row)
        assert budget.bytes_of([2**14]) == 2**30 + PART + 1000 + 100 * 2**14
        five = 5 * 2**30 + 5 * 2**26
        assert budget.bytes_of([2**14] * 3, [2**14]) == five + 4 * 1000 + 100 * 2**14, (
            "a layer of five slots is above PART"
        )
        assert budget.bytes_of([]) == 0 and budget.left([2**14]) == 2**40 - budget.bytes_of([2**14])
        assert Budget(3 * budget.bytes_of([2**14]), row).rows_of(2**14, 16) == 3
        window = RowBytes(0, windows=((256, 10),))
        assert Budget(1, window).bytes_of([], [1024]) == 10 * (256 + CPU.prefill_chunk) + 10 * 256, "its chunk, too"


def test_what_fits_in_pages() -> None:
    """Every row takes its own pages, and keeps them when it joins the batch."""
    budget = Budget(size=40 * PAGE * 7, row=RowBytes(7))
    with using(CUDA):
        assert budget.pages == (40,)
        assert budget.fits([30 * PAGE, *[1] * 10]) and not budget.fits([30 * PAGE, *[1] * 11])
        assert budget.fits([30 * PAGE], [1] * 10) and not budget.fits([30 * PAGE], [1] * 9 + [PAGE + 1])
        assert budget.fits([50 * PAGE]), "by itself"
        assert budget.used([9 * PAGE + 1, 10 * PAGE]) == 0.5


def test_a_row_that_is_left_by_itself_gives_spare_memory_back() -> None:
    budget = Budget(size=2 * 1024 * 7, row=RowBytes(7))
    with using(CPU):
        assert budget.fits([1024]) and budget.fits([1024], have=1) and not budget.fits([1024], have=2)
    asked = greedy_and_seeded(2, 3 * STEP)
    first = replace(asked[0], sampling=replace(asked[0].sampling, max_tokens=8))
    with BudgetHarness(6 * STEP, draft=None) as harness:
        clients = [harness.submit(one, harness.measure) for one in (first, asked[1])]
        for client in clients:
            client.finished()
        harness.assert_kept()


@pytest.mark.parametrize("way", [CPU, CUDA], ids=["cpu", "cuda"])
def test_a_request_by_itself_has_room_as_long_as_any_may_become(way: Strategy) -> None:
    """With its next share it may be longer than memory does for."""
    model = tiny_llama(0)
    with using(way):
        made, row = decoder.Decoder(model, None, vocabulary=97, k=0), of_keys_and_values(model, None)
        made.memory.limit(Budget(100 * row.of(PAGE), row))
        assert made.memory.budget is not None
        longest = made.memory.budget.longest()
        assert longest > STEP and made.memory.has_room([longest]) and made.memory.has_room([longest - STEP // 2])
        assert not made.memory.has_room([longest, longest])


def test_a_prompts_buffers_are_made_once() -> None:
    """At the first chunk, for the prompt and a share of its answer."""
    with using(CPU):
        made = decoder.Decoder(tiny_llama(0), None, vocabulary=97, k=0, prefill_chunk=32)
        (asked,) = long_prompts(1, 300)
        asked = replace(asked, tokens=(*range(4, 96), *asked.tokens) * 3)
        row = Request("0", asked, frozenset(), None)
        prefill, shapes = made.start_prefill(row), set[tuple[int, ...]]()
        while not made.prefill(prefill):
            shapes |= {array.shape for array in prefill.target_cache.arrays()}
        expected = CPU.capacity(len(asked.tokens) + STEP)
        assert made.memory.reserved(row) == len(asked.tokens) + STEP and len(asked.tokens) > 2 * STEP
        assert {shape[2] for shape in shapes} == {expected}
        made.join([prefill])
        assert {array.shape[2] for array in made.batch.cache.arrays()} == {expected}
        short = replace(asked, sampling=replace(asked.sampling, max_tokens=3))
        assert made.memory.reserved(Request("1", short, frozenset(), None)) == len(asked.tokens) + 3


def test_a_prefill_that_joined_holds_nothing() -> None:
    with using(CPU):
        made = decoder.Decoder(tiny_llama(0), None, vocabulary=97, k=0)
        prefills = [
            made.start_prefill(Request(str(i), one, frozenset(), None)) for i, one in enumerate(long_prompts(2, 8))
        ]
        for prefill in prefills:
            while not made.prefill(prefill):
                pass
            made.join([prefill])
        assert [prefill.target_cache.arrays() for prefill in prefills] == [[], []]


def test_cached_prefixes_give_way_to_rows_in_rectangles() -> None:
    """They may take what rows leave, and are evicted when a request needs the room."""
    with using(CPU):
        model, row = tiny_llama(0), of_keys_and_values(tiny_llama(0), None)
        made = decoder.Decoder(model, None, vocabulary=97, k=0, prefix=PrefixCache(2**40))
        size = 12 * STEP * row.first
        made.memory.limit(Budget(size, row))
        prefix = made.batch.prefix
        assert prefix is not None
        for i in range(8):
            tokens = tuple(4 + (i + j) % 90 for j in range(2 * STEP))
            made.admit(Request(str(i), Prompt(tokens, Sampling(max_tokens=2)), frozenset(), None))
            while made.unfinished:
                made.round()
        held, budget = prefix.nbytes, made.memory.budget
        assert budget is not None and 4 * STEP * row.first <= held <= size
        assert made.memory.has_room([5 * STEP])
        assert prefix.nbytes <= size - budget.bytes_of([], [5 * STEP]) < held


def test_a_model_whose_rows_do_not_grow_has_no_longest() -> None:
    assert Budget(2**20, RowBytes(0)).longest() >= LONGEST and Budget(2**20, RowBytes(0)).fits([10**6] * 8)


def test_a_recurrent_model_takes_no_pages() -> None:
    model = tiny_llama(0)
    with using(CUDA):
        made = decoder.Decoder(model, None, vocabulary=97, k=0)
        pages = [pool.pages for pool in made.batch.pools]
        made.memory.limit(Budget(2**20, RowBytes(0)))
        assert [pool.pages for pool in made.batch.pools] == pages


def test_the_prefix_cache_has_what_rows_leave() -> None:
    assert prefix_bytes(None, 8000) == 8000
    assert prefix_bytes(3, 8000) == 3 * 2**20 and prefix_bytes(0, 8000) == 0


def test_what_is_set_aside_of_free_memory() -> None:
    with using(CPU):
        assert usable(1000, training=100) == usable(1000, training=0) == 950, "a run takes what is free when it starts"
    with using(CUDA):
        assert usable(1000, training=100) == 810, "pages take all of their memory at once"
        assert usable(1000, training=5000) == 450, "serving goes first"


def test_the_scheduler_keeps_what_went_back_in_front() -> None:
    scheduler = Scheduler(max_rows=2, max_waiting=4)
    tickets = [Ticket(Prompt((5, 6, 7), Sampling()), _nowhere) for _ in range(3)]
    scheduler.running = tickets[:2]
    scheduler.add(tickets[2])
    scheduler.requeue(tickets[1])
    assert (scheduler.running, list(scheduler.waiting)) == ([tickets[0]], [tickets[1], tickets[2]])
    room: dict[int, bool] = {id(tickets[1]): False, id(tickets[2]): True}
    tickets[2].arrived_at = tickets[1].arrived_at + 1.0
    assert scheduler.next(_none, 0.0, lambda ticket: room[id(ticket)]) is None
    room[id(tickets[1])] = True
    assert scheduler.next(_none, 0.0, lambda ticket: room[id(ticket)]) is tickets[1]


def _none(tokens: Sequence[int], salt: str) -> int:
    return 0


def _nowhere(event: object) -> None:
    assert not isinstance(event, Delta)
