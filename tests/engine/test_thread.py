"""The engine's thread with real tiny models: every request gets the target's own tokens, or ends once with a reason."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from service.core import (
    BARE_DRAFT,
    AdapterRef,
    AdapterRefused,
    AdapterState,
    BadRequest,
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    Generation,
    NotFound,
    Overloaded,
    PairError,
    Place,
    Prompt,
    Provenance,
    RequestState,
    Round,
    Sampling,
    Selection,
    Ticket,
    Unavailable,
)
from service.engine.adapters import bare
from service.engine.decoder import Decoder
from service.engine.engine import Engine
from service.engine.kv.budget import Budget, RowBytes
from service.engine.kv.prefix import BLOCK, PrefixCache
from service.engine.prefill import Pace
from service.engine.rounds import RoundReport
from service.engine.thread import IDLE_SECONDS, EngineThread
from service.engine.unloading import Unloaded
from service.learning import lora
from service.models.fingerprint import folder_sha256
from tests.support.oracle import filtered_logprobs, forced, naive, noisy_copy, tiny_llama
from tests.support.pages import cached, taken
from tests.support.panicking import panic
from tests.support.typed import layers_of

EOS = frozenset({3})
WHO = Provenance(target="t" * 64, tokenizer="k" * 64, draft="d" * 64)
K, ROWS, CHUNK, PATIENCE = 3, 8, 16, 30.0

Hook = Callable[[mx.array, mx.array], mx.array]


def unchanged(fed: mx.array, logits: mx.array) -> mx.array:
    return logits


class HookedModel(nn.Module):
    """A real model whose logits pass through `hook`, which may wait, raise or change them."""

    def __init__(self, inner: nn.Module, hook: Hook) -> None:
        super().__init__()
        self.inner, self.hook = inner, hook

    def __call__(self, tokens: mx.array, cache: list[object] | None = None) -> mx.array:
        return self.hook(tokens, self.inner(tokens, cache=cache))

    @property
    def layers(self) -> list[nn.Module]:
        return layers_of(self.inner)


class BlockingHook:
    """A hook that blocks the engine's thread in the `at`-th matching call until released."""

    def __init__(self, at: int = 1, match: Callable[[mx.array], bool] = lambda fed: True) -> None:
        self.at, self.match, self.calls = at, match, 0
        self.fed: list[tuple[int, ...]] = []
        """Shapes (B, N)."""
        self.reached, self.release = threading.Event(), threading.Event()

    def __call__(self, fed: mx.array, logits: mx.array) -> mx.array:
        self.fed.append(fed.shape)
        if self.match(fed):
            self.calls += 1
            if self.calls == self.at:
                self.reached.set()
                assert self.release.wait(PATIENCE)
        return logits


class FailingHook:
    """A hook that raises or returns NaN in every call after the first `after`, until healed."""

    def __init__(self, after: int, how: str) -> None:
        self.after, self.how, self.calls, self.healed = after, how, 0, False

    def __call__(self, fed: mx.array, logits: mx.array) -> mx.array:
        self.calls += 1
        if self.healed or self.calls <= self.after:
            return logits
        if self.how == "raises":
            raise RuntimeError("no such luck")
        return logits * float("nan")


class LetterDetokenizer:
    """A detokenizer with one letter per token."""

    def __init__(self) -> None:
        self.text = ""

    def add_token(self, token: int) -> None:
        self.text += chr(0x100 + token)

    def finalize(self) -> None: ...


class Client:
    """Collects one request's events. `on_delta` runs on the engine's thread, between two rounds."""

    def __init__(self, prompt: Prompt, on_delta: Callable[["Client"], None]) -> None:
        self.prompt, self.on_delta = prompt, on_delta
        self.events: list[Event] = []
        self.started, self.ended = threading.Event(), threading.Event()
        self.ticket: Future[Ticket] = Future()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Delta):
            self.started.set()
            self.on_delta(self)
        else:
            self.ended.set()

    def cancel(self) -> None:
        self.ticket.result(PATIENCE).cancel()

    @property
    def deltas(self) -> list[Delta]:
        return [event for event in self.events if isinstance(event, Delta)]

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.tokens]

    def end(self) -> Finished | Failed:
        """The last event, which must be the only one of its kind."""
        assert self.ended.wait(PATIENCE), "the request never ended"
        ends = [event for event in self.events if not isinstance(event, Delta)]
        assert len(ends) == 1 and ends[0] is self.events[-1]
        return ends[0]

    def finished(self, reason: FinishReason | None = None) -> Finished:
        """The end of a request with the target's own tokens, or their beginning if it was cancelled."""
        end = self.end()
        assert isinstance(end, Finished), end
        expected = forced(reference(), self.prompt.tokens, end.output, self.prompt.sampling, EOS)
        if end.finish is FinishReason.CANCELLED:
            expected = expected[: len(end.output)]
        assert list(end.output) == self.tokens == expected
        assert reason is None or end.finish is reason
        return end

    def failed(self, message: str) -> Unavailable:
        end = self.end()
        assert isinstance(end, Failed) and isinstance(end.error, Unavailable) and message in str(end.error), end
        return end.error


class EngineHarness:
    """An EngineThread on a tiny pair, with everything that it reports."""

    def __init__(
        self,
        target: Hook = unchanged,
        draft: Hook | None = unchanged,
        *,
        rows: int = ROWS,
        waiting: int = 64,
        hang_seconds: float = 60.0,
        noise: float = 0.3,
        idle_unload_seconds: float | None = None,
        detokenizer: Callable[[], LetterDetokenizer] = LetterDetokenizer,
    ) -> None:
        self.hooks, self.noise, self.detokenizer = (target, draft), noise, detokenizer
        self.engine: Engine | None = None
        self.context, self.builds = 1024, 0
        self.on_build: Callable[[], object] = lambda: None
        self.generations: list[Generation] = []
        self.observed: list[tuple[Round, ...]] = []
        self.preemptions = 0
        self.ties = self.cases = 0
        self.failures: list[int] = []
        self.read: list[tuple[int, int]] = []
        self.fatal: Future[str] = Future()
        self.thread = EngineThread(
            self.build,
            max_rows=rows,
            max_waiting=waiting,
            recorder=self,
            observer=self,
            hang_seconds=hang_seconds,
            idle_unload_seconds=idle_unload_seconds,
            on_fatal=self.fatal.set_result,
        )

    def build(self, before: Unloaded | None = None) -> Engine:
        target, draft = self.hooks
        base = bare(HookedModel(noisy_copy(tiny_llama(0), 1, self.noise), draft)) if draft is not None else None
        decoder = Decoder(
            HookedModel(tiny_llama(0), target),
            base,
            vocabulary=97,
            k=K if base else 0,
            prefill_chunk=CHUNK,
            collect=True,
            prefix=PrefixCache(2**24),
            key=mx.random.key(5),
        )
        self.builds += 1
        self.on_build()
        self.engine = Engine(decoder, base, EOS, self.context, WHO, self.detokenizer)
        return self.engine

    def record(self, generation: Generation) -> None:
        self.generations.append(generation)

    def observe(self, rounds: Sequence[Round], seconds: float) -> None:
        self.observed.append(tuple(rounds))

    def prompt_read(self, tokens: int, reused: int) -> None:
        self.read.append((tokens, reused))

    def prefix_read(self, tokens: int) -> None: ...

    def preempted(self) -> None:
        self.preemptions += 1

    def failure_cases(self, ties: int, others: int) -> None:
        self.ties, self.cases = self.ties + ties, self.cases + ties + others

    def draft_failed(self, adapter: int) -> None:
        self.failures.append(adapter)

    def submit(
        self, prompt: Prompt, on_delta: Callable[[Client], None] = lambda client: None, place: Place | None = None
    ) -> Client:
        client = Client(prompt, on_delta)
        client.ticket.set_result(self.thread.submit(prompt, client, place))
        return client

    def rows_held(self) -> tuple[int, int]:
        """Rows in the caches of target and draft; checks that no memory is held without rows."""
        assert self.engine is not None and self.engine.decoder.batch.drafter is not None
        caches = (self.engine.decoder.batch.cache, self.engine.decoder.batch.drafter.cache)
        for held in caches:
            if held.pages is not None:
                assert held.lengths.host or taken(held.pages.pool) == cached(
                    self.engine.decoder.batch.prefix, held.pages.pool
                )
                continue
            assert all(0 < len(held.lengths.host) <= array.shape[0] for array in held.arrays())
            assert all(array.shape[0] <= 2 * len(held.lengths.host) for array in held.arrays())
        return len(caches[0].lengths.host), len(caches[1].lengths.host)

    def __enter__(self) -> Self:
        self.thread.start(PATIENCE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self.hooks:
            if isinstance(hook, BlockingHook):
                hook.release.set()
        self.thread.stop()


@cache
def reference() -> nn.Module:
    """A copy of its target for the thread that runs the tests."""
    return tiny_llama(0)


@cache
def tokens_of(prompt: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
    return tuple(naive(reference(), prompt, sampling, EOS))


def oracle(prompt: Prompt) -> list[int]:
    return list(tokens_of(prompt.tokens, prompt.sampling))


def prompt(number: int, length: int = 12, tokens: int = 24, **sampling: Any) -> Prompt:
    rng = random.Random(number)
    return Prompt(tuple(rng.randrange(4, 97) for _ in range(length)), Sampling(max_tokens=tokens, **sampling))


def long_prompts(count: int, tokens: int) -> list[Prompt]:
    """Prompts, every other one sampled, whose outputs do not end before `tokens`."""
    made: list[Prompt] = []
    for seed in range(1000):
        sampling = {"temperature": 0.8, "seed": seed} if seed % 2 else {}
        asked = prompt(seed, 5 + seed % 30, tokens, **sampling)
        if len(oracle(asked)) == tokens:
            made.append(asked)
        if len(made) == count:
            return made
    raise AssertionError("too few prompts last")


def wait_for(holds: Callable[[], bool], what: str) -> None:
    """Polls a condition until it holds, with a deadline."""
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.01)):
        if holds():
            return
        pause.wait(0.01)
    raise AssertionError(f"never happened: {what}")


def decoding(fed: mx.array) -> bool:
    """Whether a target call is a round; prefill chunks have other lengths."""
    return fed.shape[1] in (1, K + 1)


class MeasuringHarness(EngineHarness):
    """Measures the costs of rounds before it serves."""

    def build(self, before: Unloaded | None = None) -> Engine:
        engine = super().build()
        engine.decoder.adaptive = True
        engine.decoder.profile(1)
        return engine


def test_round_costs_are_reported_once_measured() -> None:
    harness = MeasuringHarness()
    assert harness.thread.round_seconds() is None, "not loaded yet"
    with harness:
        costs = harness.thread.round_seconds()
        assert costs is not None and len(costs) == K
        assert all(0 < seconds < 1 for seconds in costs)
        assert harness.submit(prompt(1)).finished()
        assert harness.thread.round_seconds() == costs
    with EngineHarness() as harness:
        assert harness.thread.round_seconds() is None, "its draft length is fixed"


def test_prompts_are_prefilled_together_and_admitted_in_groups() -> None:
    """Two of these prompts fill a chunk. The first is prefilled alone, because no other has arrived."""
    hold = BlockingHook(match=lambda fed: fed.shape[1] == CHUNK // 2)
    with EngineHarness(hold, None, rows=8) as harness:
        clients = [harness.submit(prompt(0, CHUNK // 2 + 1))]
        assert hold.reached.wait(PATIENCE)
        clients += [harness.submit(prompt(seed, CHUNK // 2 + 1)) for seed in range(1, 8)]
        hold.release.set()
        for client in clients:
            client.finished()
        assert [len(rounds) for rounds in harness.observed[:4]] == [1, 5, 7, 8]
    assert [rows for rows, tokens in hold.fed if tokens == CHUNK // 2] == [1, 4, 2, 1], "those that fit are one call"


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    """It arrives while the first of forty chunks is read, and has its first token after the next."""
    hold, chunks = BlockingHook(match=lambda fed: fed.shape[1] == CHUNK), list[int]()
    with EngineHarness(hold, None, rows=2) as harness:
        long = harness.submit(prompt(0, 40 * CHUNK + 1, 4))
        assert hold.reached.wait(PATIENCE)
        short = harness.submit(prompt(1, 6, 4), lambda client: chunks.append(hold.calls))
        hold.release.set()
        timings = [client.finished().timings for client in (long, short)]
    assert hold.calls == 40 and chunks[0] <= 2
    assert timings[0].prompt_seconds > timings[1].prompt_seconds


class SlowPrefill:
    """A hook that takes 2 ms for each token of a prefill."""

    def __init__(self) -> None:
        self.fed: list[int] = []

    def __call__(self, fed: mx.array, logits: mx.array) -> mx.array:
        if not decoding(fed):
            time.sleep(2e-3 * fed.size)
            self.fed.append(fed.shape[1])
        return logits


class WideHarness(EngineHarness):
    """With chunks of 256 tokens, of which running requests wait for no more than 0.2 s."""

    def build(self, before: Unloaded | None = None) -> Engine:
        engine = super().build()
        engine.decoder.prefill_chunk, engine.decoder.pace = 256, Pace(0.2)
        return engine


def test_running_requests_wait_no_longer_for_a_prefill_than_they_may() -> None:
    slow, arrivals = SlowPrefill(), list[float]()
    running, long = long_prompts(1, 200)[0], prompt(0, 701, 4)
    with WideHarness(slow, None, rows=2) as harness:
        first = harness.submit(running, lambda client: arrivals.append(time.perf_counter()))
        assert first.started.wait(PATIENCE)
        harness.submit(long).finished()
        first.finished()
    chunks = [tokens for tokens in slow.fed if tokens > len(running.tokens)]
    assert sum(chunks) == 700
    assert chunks[0] == 256, "nothing is known yet"
    assert set(chunks[1:-1]) == {64} and chunks[-1] <= 64
    gaps = sorted(b - a for a, b in pairwise(arrivals))
    assert gaps[-1] > 0.5 and len(gaps) > len(chunks), "a round after each chunk"


def test_how_much_is_prefilled_while_others_wait_follows_how_long_it_takes() -> None:
    pace = Pace(0.2)
    assert pace.within(512) == 512
    pace.observe(512, 1.7)
    assert (pace.limit, pace.within(512), pace.within(256), pace.within(48)) == (60, 32, 32, 48)
    pace.observe(32, 0.15)
    assert pace.limit == 60, "twice as many might take 0.3 s"
    for tokens in (32, 64, 128):
        pace.observe(tokens, 0.09)
    assert (pace.limit, pace.within(512)) == (256, 256)
    pace.observe(12, 0.05)
    assert pace.limit == 256, "a short call says nothing of longer ones"
    pace.observe(256, 0.5)
    assert (pace.limit, pace.within(512)) == (102, 64)
    assert Pace().within(2048) == 2048


def test_the_prompt_time_includes_waiting_for_a_row() -> None:
    with EngineHarness(BlockingHook(match=lambda fed: False), None, rows=1) as harness:
        first, second = (harness.submit(asked) for asked in long_prompts(2, 100))
        ran, waited = (client.finished().timings for client in (first, second))
    assert waited.prompt_seconds > waited.queue_seconds > ran.predicted_seconds * 0.9 > ran.queue_seconds


class GatheringHarness(EngineHarness):
    """Prompts wait for others, as on CUDA, for longer than a test takes."""

    def build(self, before: Unloaded | None = None) -> Engine:
        engine = super().build()
        engine.decoder.strategy = replace(engine.decoder.strategy, gather_seconds=PATIENCE)
        run, self.joining = engine.decoder.round, list[int]()

        def noted(joining: int = 0) -> RoundReport:
            self.joining.append(joining)
            return run(joining)

        engine.decoder.round = noted
        return engine


def test_a_prompt_waits_for_another_while_five_run() -> None:
    hold = BlockingHook(match=lambda fed: False)
    with GatheringHarness(hold, None, rows=10) as harness:
        running = [harness.submit(asked) for asked in long_prompts(5, 150)]
        wait_for(lambda: bool(harness.observed) and len(harness.observed[-1]) == 5, "five run")
        calls, rounds = len(hold.fed), len(harness.observed)
        first = harness.submit(prompt(8, 4))
        wait_for(lambda: len(harness.observed) >= rounds + 6, "rounds go on")
        assert not first.started.is_set() and not any(harness.joining[rounds:]), "rounds are launched as ever"
        both = [first, harness.submit(prompt(9, 4))]
        for client in (*both, *running):
            client.finished()
    assert [rows for rows, tokens in hold.fed[calls:] if tokens > 1] == [2]


# ------------------------------------------------------------------------------------------------------------ the queue


def test_a_reserved_place_counts_until_it_is_used_or_released() -> None:
    hold = BlockingHook()
    with EngineHarness(hold, rows=1, waiting=2) as harness:
        clients = [harness.submit(prompt(0))]
        assert hold.reached.wait(PATIENCE)
        first, second = harness.thread.reserve(), harness.thread.reserve()
        for refused in (harness.thread.reserve, lambda: harness.submit(prompt(1))):
            with pytest.raises(Overloaded):
                refused()
        # Releasing twice frees one place.
        assert (first.release(), first.release()) == (True, False)
        third = harness.thread.reserve()
        with pytest.raises(Overloaded):
            harness.thread.reserve()
        # A used place belongs to the request and cannot be released.
        clients.append(harness.submit(prompt(1), place=second))
        assert not second.release()
        with pytest.raises(Overloaded):
            harness.thread.reserve()
        # A place cannot be used after it was used or released.
        with pytest.raises(Overloaded):
            harness.submit(prompt(2), place=second)
        with pytest.raises(BadRequest), third:
            harness.submit(Prompt((), Sampling()), place=third)
        with harness.thread.reserve() as fourth:
            clients.append(harness.submit(prompt(3), place=fourth))
        assert harness.thread.status().waiting == 2
        hold.release.set()
        for client in clients:
            client.finished()
        for _ in range(3):
            harness.thread.reserve()
        with pytest.raises(Overloaded):
            harness.thread.reserve()


def test_a_thread_that_is_stopped_while_it_loads_ends_at_once() -> None:
    loading, loaded = threading.Event(), threading.Event()

    class Slow(EngineHarness):
        def build(self, before: Unloaded | None = None) -> Engine:
            loading.set()
            assert loaded.wait(PATIENCE)
            return super().build()

    harness = Slow()
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(harness.thread.start)
        assert loading.wait(PATIENCE)
        assert harness.thread.loading
        asked = time.monotonic()
        harness.thread.stop()
        assert time.monotonic() - asked < harness.thread._watchdog.hang_seconds / 2
        with pytest.raises(Unavailable, match="shut"):
            started.result(PATIENCE)
        with pytest.raises(Unavailable):
            harness.thread.reserve()
    loaded.set()
    assert not harness.fatal.done()


def test_a_model_that_cannot_be_loaded_raises_from_start_and_is_not_fatal() -> None:
    class Without(EngineHarness):
        def build(self, before: Unloaded | None = None) -> Engine:
            raise RuntimeError("no such model")

    harness = Without(hang_seconds=0.04)
    with pytest.raises(Unavailable, match="no such model"):
        harness.thread.start(PATIENCE)
    # By now the watchdog would have fired if it were still running.
    harness.thread._watchdog._thread.join(PATIENCE)
    assert not harness.thread._watchdog._thread.is_alive()
    assert not harness.fatal.done()
    harness.thread.stop()


def test_a_full_queue_refuses_and_loses_no_admitted_request() -> None:
    hold = BlockingHook()
    with EngineHarness(hold, rows=2, waiting=3) as harness:
        clients = [harness.submit(prompt(0))]
        assert hold.reached.wait(PATIENCE)
        refused: list[Overloaded] = []

        def rush(seed: int) -> Client | None:
            try:
                return harness.submit(prompt(seed))
            except Overloaded as error:
                refused.append(error)
                return None

        with ThreadPoolExecutor(8) as pool:
            clients += [client for client in pool.map(rush, range(1, 31)) if client is not None]
        status = harness.thread.status()
        assert (len(clients), status.rows, status.waiting) == (2 + 3, 1, 4)
        assert len(refused) == 26 and all(error.retry_after > 0 for error in refused)
        hold.release.set()
        for client in clients:
            client.finished()
        clients.append(harness.submit(prompt(31)))
        clients[-1].finished()
    assert max(shape[0] for shape in hold.fed) == 2
    assert Counter(g.id for g in harness.generations) == Counter(client.finished().id for client in clients)


def test_a_prompt_that_cannot_fit_is_refused_at_once() -> None:
    with EngineHarness() as harness:
        for asked, field in (
            (Prompt((), Sampling()), "prompt"),
            (prompt(0, length=1000, tokens=25), "max_tokens"),
            (prompt(0, length=1025, tokens=1), "prompt"),
        ):
            with pytest.raises(BadRequest) as refused:
                harness.submit(asked)
            assert refused.value.field == field
        harness.submit(prompt(0, length=1000, tokens=24)).finished()


def test_cached_prompt_tokens_are_reported_separately() -> None:
    asked = prompt(3, length=2 * BLOCK + 5)
    with EngineHarness() as harness:
        ends = [harness.submit(asked).finished() for _ in range(2)]
        assert [(end.timings.prompt_n, end.timings.cache_n) for end in ends] == harness.read
    assert harness.read == [(2 * BLOCK + 5, 0), (2 * BLOCK + 5, 2 * BLOCK)]


def test_start_and_submit_raise_the_loading_error() -> None:
    class Empty(EngineHarness):
        def build(self, before: Unloaded | None = None) -> Engine:
            raise PairError("they do not belong together")

    harness = Empty(hang_seconds=1.0)
    with pytest.raises(Unavailable, match="starting"):
        harness.submit(prompt(0))
    with pytest.raises(PairError, match="belong together"):
        harness.thread.start(PATIENCE)
    with pytest.raises(Unavailable, match="belong together"):
        harness.submit(prompt(0))
    assert not harness.thread.status().ready
    harness.thread.stop()


# --------------------------------------------------------------------------------------------------------- cancellation


@pytest.mark.promise(23)
def test_cancelled_while_queued() -> None:
    hold = BlockingHook()
    with EngineHarness(hold, rows=1) as harness:
        running, gone, stays = (harness.submit(prompt(seed)) for seed in (1, 2, 3))
        assert hold.reached.wait(PATIENCE)
        for _ in range(2):
            gone.cancel()
        hold.release.set()
        end = gone.finished(FinishReason.CANCELLED)
        assert end.output == () and gone.events == [end]
        assert end.timings.prompt_n == len(gone.prompt.tokens) and end.timings.rounds == 0
        running.finished()
        stays.finished(FinishReason.LENGTH)
        for client in (gone, stays):
            client.cancel()
        harness.submit(prompt(4)).finished()
        assert gone.end() is end
        stays.finished(FinishReason.LENGTH)
    assert len(harness.generations) == 3 and gone.ticket.result().id not in {g.id for g in harness.generations}


@pytest.mark.promise(23)
def test_cancelled_during_prefill() -> None:
    """Prefill stops after the current chunk, and the place goes to a waiting request."""
    hold = BlockingHook(at=2, match=lambda fed: fed.shape == (1, CHUNK))
    with EngineHarness(hold, rows=4) as harness:
        others = [harness.submit(prompt(seed, tokens=64)) for seed in (2, 3, 4)]
        gone = harness.submit(prompt(5, length=100))
        assert hold.reached.wait(PATIENCE)
        follower = harness.submit(prompt(6))
        gone.cancel()
        hold.release.set()
        end = gone.finished(FinishReason.CANCELLED)
        assert end.output == () and gone.events == [end]
        for client in (*others, follower):
            client.finished()
            assert client.end() is not end
        assert harness.rows_held() == (0, 0)
    assert hold.calls == 2
    assert Counter(g.id for g in harness.generations) == Counter(c.finished().id for c in (*others, follower))


@pytest.mark.promise(23)
def test_cancelled_while_decoding() -> None:
    """The row and its memory are gone before the next round, and other requests are unaffected."""
    hold = BlockingHook()
    held: list[tuple[int, tuple[int, int]]] = []
    last: list[int] = []
    with EngineHarness(hold) as harness:

        def third(client: Client) -> None:
            if len(client.deltas) == 3:
                last.append(len(harness.observed))
                client.cancel()

        asked = long_prompts(4, 48)
        survivors = [
            harness.submit(one, lambda c: held.append((len(harness.observed), harness.rows_held())))
            for one in asked[:3]
        ]
        gone = harness.submit(asked[3], third)
        hold.release.set()
        end = gone.finished(FinishReason.CANCELLED)
        assert len(gone.deltas) == 3 and 3 <= len(end.output) < 48
        for client in survivors:
            client.finished(FinishReason.LENGTH)
        assert harness.rows_held() == (0, 0)
        wait_for(lambda: harness.thread.status().rows == 0, "the place was given back")
    (cancelled,) = last
    assert len(harness.observed[cancelled - 1]) == 4 and len(harness.observed[cancelled]) == 3
    assert (cancelled, (4, 4)) in held and (cancelled + 1, (3, 3)) in held
    assert all(rows[0] == rows[1] < 4 for round, rows in held if round > cancelled)
    assert [g.finish for g in harness.generations if g.id == end.id] == [FinishReason.CANCELLED]


def test_requests_under_way_are_shown_and_cancelled_by_their_ids() -> None:
    """In every state, while the engine's thread is in the middle of a call, and without waiting for that."""
    prefill, decode = BlockingHook(at=2, match=lambda fed: fed.shape == (1, CHUNK)), BlockingHook()

    def both(fed: mx.array, logits: mx.array) -> mx.array:
        return decode(fed, prefill(fed, logits))

    with EngineHarness(both, rows=2) as harness:
        running = harness.submit(prompt(1, tokens=64))
        assert decode.reached.wait(PATIENCE)
        assert [(each.id, each.state) for each in harness.thread.requests()] == [
            (running.ticket.result().id, RequestState.PREFILLING)
        ]
        decode.release.set()
        assert running.started.wait(PATIENCE)
        long = harness.submit(prompt(5, length=100))
        assert prefill.reached.wait(PATIENCE)
        waiting = harness.submit(prompt(3))
        clients = [running, long, waiting]
        ids = [client.ticket.result().id for client in clients]
        shown = harness.thread.requests()
        assert [each.id for each in shown] == ids, "in the order of arrival"
        assert [each.state for each in shown] == [
            RequestState.RUNNING,
            RequestState.PREFILLING,
            RequestState.WAITING,
        ]
        assert [each.prompt_tokens for each in shown] == [12, 100, 12]
        assert [each.tokens for each in shown] == [len(running.tokens), 0, 0]
        assert [each.adapter for each in shown] == [BARE_DRAFT, None, None]
        assert [each.running_seconds is None for each in shown] == [False, True, True]
        assert all(each.waiting_seconds > 0 for each in shown) and (shown[0].running_seconds or 0.0) > 0.0
        for id, status in zip(ids, shown, strict=True):
            assert harness.thread.cancel(id).state is status.state
        with pytest.raises(NotFound):
            harness.thread.cancel("nobody's")
        rounds = len(harness.observed)
        prefill.release.set()
        for client in clients:
            client.finished(FinishReason.CANCELLED)
        wait_for(lambda: harness.thread.requests() == [], "all were cancelled")
        # A round that was launched before may end meanwhile.
        assert len(harness.observed) <= rounds + 1 and harness.rows_held() == (0, 0)
        with pytest.raises(NotFound):
            harness.thread.cancel(ids[0])


@pytest.mark.promise(3)
@pytest.mark.parametrize("repetitions", [2, pytest.param(20, marks=pytest.mark.nightly)])
def test_a_seed_repeats_among_other_requests_and_seeds_differ(repetitions: int) -> None:
    """Batches differ from one repetition to the next; float32 is exact but for ties, of which seeded noise leaves none here."""
    count, rng = 32, random.Random(3)
    same = prompt(5, tokens=16, temperature=1.0, seed=0)
    asked = [replace(same, sampling=replace(same.sampling, seed=seed)) for seed in range(count)]
    outputs: dict[int | None, set[tuple[int, ...]]] = {}
    with EngineHarness(waiting=count) as harness:
        for _ in range(repetitions):
            order = rng.sample(asked, count)
            for client in [harness.submit(one) for one in order]:
                assert client.ended.wait(PATIENCE)
                outputs.setdefault(client.prompt.sampling.seed, set()).add(tuple(client.tokens))
    assert all(len(found) == 1 for found in outputs.values()), "a seed says the same whatever else is asked"
    assert len(set.union(*outputs.values())) >= 30


@pytest.mark.promise(23)
def test_a_storm_of_cancellations_leaves_nothing_behind() -> None:
    rng = random.Random(7)
    asked = [prompt(seed % 12, length=6 + 7 * (seed % 12)) for seed in range(40)]
    when = [rng.choice([None, None, 0, 1, 2, 4]) for _ in asked]
    with EngineHarness(rows=4, waiting=len(asked)) as harness:

        def one(i: int) -> Client:
            client = harness.submit(asked[i], lambda c: c.cancel() if len(c.deltas) == when[i] else None)
            if when[i] == 0:
                client.cancel()
            return client

        with ThreadPoolExecutor(4) as pool:
            clients = list(pool.map(one, range(len(asked))))
        for client, moment in zip(clients, when, strict=True):
            assert moment is not None or client.finished().finish is not FinishReason.CANCELLED
            client.finished()
        assert harness.rows_held() == (0, 0)
        wait_for(lambda: harness.thread.status().rows == 0, "every place was given back")
        assert harness.thread.status().ready and harness.thread.status().waiting == 0
    begun = [client.finished().id for client in clients if client.tokens]
    assert Counter(g.id for g in harness.generations) == Counter(begun)


# ------------------------------------------------------------------------------------------------------ broken models


@pytest.mark.parametrize(
    ("after", "how"),
    [
        (0, "raises"),
        pytest.param(0, "nan", marks=pytest.mark.nightly),
        pytest.param(5, "raises", marks=pytest.mark.nightly),
        (5, "nan"),
        (40, "raises"),
        (40, "nan"),
    ],
)
@pytest.mark.promise(5)
def test_a_broken_draft_costs_speed_only(how: str, after: int) -> None:
    breaking = FailingHook(after, how)
    with EngineHarness(draft=breaking) as harness:
        clients = [harness.submit(one) for one in long_prompts(5, 48)]
        for client in clients:
            client.finished()
        # Non-finite logits are counted per row.
        failures, status = len(harness.failures), harness.thread.status()
        assert failures == 1 if how == "raises" else 1 <= failures <= 2 * len(clients)
        assert status.draft_failures == failures and status.ready
        drafted = [any(round.drafted for round in rounds) for rounds in harness.observed]
        assert drafted == sorted(drafted, reverse=True) and not drafted[-1] and (after < 40 or drafted[0])
        assert harness.submit(prompt(1)).finished().timings.draft_n == 0
        breaking.healed = True
        harness.thread.switch(harness.thread.stage(None).result(PATIENCE)).result(PATIENCE)
        failures = len(harness.failures)
        assert harness.submit(prompt(2)).finished().timings.draft_n > 0
        assert len(harness.failures) == failures


def adapters(folder: Path, *sizes: float) -> list[AdapterRef]:
    """Adapters of the draft with random weights of the given sizes."""
    made: list[AdapterRef] = []
    for id, size in enumerate(sizes, start=1):
        model = HookedModel(noisy_copy(tiny_llama(0), 1, 0.3), unchanged)
        shape = lora.wrap(model, rank=4, scale=2.0, seed=id)
        trained: dict[str, mx.array] = tree_flatten(model.trainable_parameters(), destination={})  # pyright: ignore
        noise = [(name, size * mx.random.normal(a.shape)) for name, a in trained.items() if name.endswith("lora_b")]
        model.load_weights(noise, strict=False)
        where = folder / str(id)
        lora.save(model, shape, where, draft=WHO.draft, target=WHO.target)
        ref = AdapterRef(
            id=id,
            folder=where,
            sha256=folder_sha256(where),
            rank=shape.rank,
            scale=shape.scale,
            keys=shape.keys,
            draft=WHO.draft,
            parent=BARE_DRAFT,
            run=None,
            state=AdapterState.CANDIDATE,
            created_at=datetime.now(UTC),
        )
        made.append(ref)
    return made


@pytest.mark.parametrize("how", ["raises", "adapter"])
def test_running_rows_draft_as_well_as_before_once_the_draft_recovers(how: str, tmp_path: Path) -> None:
    """The draft equals the target, so that a damaged draft cache shows as rejections. The adapter's weights are finite but its
    activations are not, which no check before serving can detect."""
    breaking = FailingHook(2 + 3 * K, "raises")  # prefill, the check of body and head, three rounds
    breaking.healed = how == "adapter"
    with EngineHarness(draft=breaking if how == "raises" else unchanged, noise=0.0) as harness:
        (ref,) = adapters(tmp_path, 1e30)
        bad, good = (harness.thread.stage(version).result(PATIENCE) for version in (ref, None))

        def strike(client: Client) -> None:
            if len(client.deltas) == 3 and how == "adapter":
                harness.thread.switch(bad)
            if len(client.deltas) == 7:
                breaking.healed = True
                harness.thread.switch(good)

        harness.submit(long_prompts(1, 64)[0], strike).finished(FinishReason.LENGTH)
    assert len(harness.failures) == 1
    accepted = [rounds[0].accepted for rounds in harness.observed]
    assert accepted[:7] == [K] * 3 + [0] * 4 and set(accepted[7:-1]) == {K}


@pytest.mark.promise(21)
def test_a_failing_target_ends_every_request_with_the_reason() -> None:
    with EngineHarness(FailingHook(12, "raises"), rows=2, hang_seconds=2.0) as harness:
        clients = [harness.submit(one) for one in long_prompts(5, 48)]
        for client in clients:
            client.failed("the engine stopped: RuntimeError")
        assert any(client.tokens for client in clients)
        status = harness.thread.status()
        assert (status.ready, status.reason) == (False, "the engine stopped: RuntimeError"), "and not what it says"
        assert (status.rows, status.waiting) == (0, 0)
        with pytest.raises(Unavailable, match="RuntimeError"):
            harness.submit(prompt(0))
        with pytest.raises(Unavailable, match="RuntimeError"):
            harness.thread.stage(None).result(PATIENCE)
        assert "RuntimeError" in harness.fatal.result(PATIENCE)
    assert harness.generations == []


@pytest.mark.parametrize("where", ["start", "record"])
def test_a_request_that_cannot_be_handled_still_ends(where: str) -> None:
    class Failing(EngineHarness):
        def record(self, generation: Generation) -> None:
            if where == "record":
                raise RuntimeError("no such luck")

    made: list[LetterDetokenizer] = []

    def detokenizer() -> LetterDetokenizer:
        if where == "start" and len(made) == 1:
            raise RuntimeError("no such luck")
        made.append(LetterDetokenizer())
        return made[-1]

    with Failing(detokenizer=detokenizer, hang_seconds=2.0) as harness:
        clients = [harness.submit(prompt(seed)) for seed in (1, 2)]
        assert [client.ended.wait(2.0) for client in clients] == [True, True]
        for client in clients:
            client.end()


def test_a_panic_ends_the_engine_as_any_error_does() -> None:
    made: list[LetterDetokenizer] = []

    def detokenizer() -> LetterDetokenizer:
        if made:
            panic("a secret")
        made.append(LetterDetokenizer())
        return made[-1]

    with EngineHarness(detokenizer=detokenizer, hang_seconds=20.0) as harness:
        clients = [harness.submit(prompt(seed)) for seed in (1, 2)]
        assert [client.ended.wait(5.0) for client in clients] == [True, True]
        wait_for(lambda: not harness.thread.status().ready, "health saw it")
        assert harness.thread.status().reason == "the engine stopped: LibraryPanic: a Rust library panicked"
        for client in clients:
            client.end()


# ------------------------------------------------------------------------------------------------------- the heartbeat


@pytest.mark.promise(21)
def test_a_hanging_target_is_reported_and_may_recover() -> None:
    hold = BlockingHook(at=2, match=decoding)
    with EngineHarness(hold, hang_seconds=4.0) as harness:
        clients = [harness.submit(prompt(seed)) for seed in (1, 2)]
        assert hold.reached.wait(PATIENCE)
        wait_for(lambda: not harness.thread.status().ready, "health saw the hang")
        status = harness.thread.status()
        assert "no progress" in status.reason and status.idle_seconds > 2.0
        hold.release.set()
        for client in clients:
            client.finished()
        wait_for(lambda: harness.thread.status().rows == 0, "the rows were given back")
        status = harness.thread.status()
        assert status.ready and status.idle_seconds == 0.0
        assert not harness.fatal.done()


@pytest.mark.parametrize("at", ["reading", "decoding"])
@pytest.mark.promise(21)
def test_a_target_that_hangs_for_good_is_given_up(at: str) -> None:
    hold = BlockingHook(at=2, match=decoding) if at == "decoding" else BlockingHook(match=lambda fed: not decoding(fed))
    with EngineHarness(hold, rows=2, hang_seconds=1.0) as harness:
        clients = [harness.submit(prompt(seed)) for seed in (1, 2, 3, 4)]
        assert hold.reached.wait(PATIENCE)
        assert "no progress" in harness.fatal.result(PATIENCE)
        for client in clients:
            client.failed("no progress")
        with pytest.raises(Unavailable, match="no progress"):
            harness.submit(prompt(5))
        assert not harness.thread.status().ready
    for client in clients:
        client.failed("no progress")
    assert harness.generations == []


def test_a_request_that_was_given_up_gets_no_second_end() -> None:
    """The thread hangs between the last tokens and the end, and comes back after the watchdog failed the request."""
    recording, go, left = threading.Event(), threading.Event(), threading.Event()

    class Slow(EngineHarness):
        def record(self, generation: Generation) -> None:
            recording.set()
            assert go.wait(PATIENCE)
            left.set()

    with Slow(hang_seconds=1.0) as harness:
        client = harness.submit(prompt(1))
        assert recording.wait(PATIENCE)
        client.failed("no progress")
        go.set()
        assert left.wait(PATIENCE)
        harness.thread._thread.join(PATIENCE)
    client.failed("no progress")


def test_a_late_return_does_not_hide_the_reason() -> None:
    hold = BlockingHook(at=2, match=decoding)
    with EngineHarness(hold, hang_seconds=1.0) as harness:
        client = harness.submit(prompt(1))
        harness.fatal.result(PATIENCE)
        client.failed("no progress")
    assert "no progress" in harness.thread.status().reason


# ------------------------------------------------------------------------------------------------------------- the end


@pytest.mark.promise(24)
def test_draining_finishes_running_requests_and_refuses_new_ones() -> None:
    hold = BlockingHook()
    with EngineHarness(hold, rows=2) as harness:
        clients = [harness.submit(prompt(seed)) for seed in range(1, 7)]
        assert hold.reached.wait(PATIENCE)
        with ThreadPoolExecutor(1) as pool:
            drained = pool.submit(harness.thread.drain, PATIENCE)
            wait_for(lambda: harness.thread.status().reason == "draining", "draining began")
            with pytest.raises(Unavailable, match="shutting down"):
                harness.submit(prompt(9))
            assert not drained.done()
            hold.release.set()
            assert drained.result(PATIENCE) is True
        harness.thread.stop()
        for client in clients:
            client.finished()
    assert len(harness.generations) == len(clients)


@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.promise(24)
def test_requests_left_after_the_drain_end_with_the_reason(comes_back: bool) -> None:
    """Running, in prefill or waiting: each gets one Failed, whether or not the current call returns."""
    hold = BlockingHook(at=3, match=decoding)
    with EngineHarness(hold, rows=2, hang_seconds=PATIENCE if comes_back else 1.0) as harness:
        clients = [harness.submit(one) for one in long_prompts(5, 48)]
        assert hold.reached.wait(PATIENCE)
        pending = harness.thread.stage(None)
        assert harness.thread.drain(0.05) is False
        with ThreadPoolExecutor(1) as pool:
            stopped = pool.submit(harness.thread.stop)
            wait_for(lambda: harness.thread.stage(None).done(), "stopping began")
            if comes_back:
                assert not any(client.ended.is_set() for client in clients)
                hold.release.set()
            stopped.result(PATIENCE)
        for client in clients:
            client.failed("shut down")
        with pytest.raises(Unavailable):
            pending.result(PATIENCE)
        assert any(client.tokens for client in clients)
    for client in clients:
        client.failed("shut down")


@pytest.mark.parametrize("moment", ["admitting", "recording"])
def test_draining_also_waits_while_no_row_is_taken(moment: str) -> None:
    """The first request is being admitted, or is leaving while another one waits."""
    begun, go, hold = threading.Event(), threading.Event(), BlockingHook()

    def pause(now: str) -> None:
        if now == moment:
            begun.set()
            assert go.wait(PATIENCE)

    class Slow(EngineHarness):
        def record(self, generation: Generation) -> None:
            pause("recording")

    def detokenizer() -> LetterDetokenizer:
        pause("admitting")
        return LetterDetokenizer()

    with Slow(hold, rows=1, detokenizer=detokenizer) as harness:
        clients = [harness.submit(prompt(1))]
        if moment == "recording":
            clients.append(harness.submit(prompt(2)))
        hold.release.set()
        assert begun.wait(PATIENCE)
        drained = harness.thread.drain(0.1)
        go.set()
        for client in clients:
            client.finished()
    assert drained is False


# ------------------------------------------------------------------------------------------------------------ the draft


@pytest.mark.parametrize(("many", "tokens"), [(16, 80), pytest.param(50, 224, marks=pytest.mark.nightly)])
@pytest.mark.promise(6)
def test_many_swaps_while_eight_requests_stream(tmp_path: Path, many: int, tokens: int) -> None:
    """Every swap is requested during a draft call and applies to all rows from the next round on."""
    inside, asked_for = threading.Semaphore(0), threading.Semaphore(0)
    left, steps = [many], count()

    def lockstep(fed: mx.array, logits: mx.array) -> mx.array:
        if len(fed) == ROWS and next(steps) % K == 0 and left[0]:
            left[0] -= 1
            inside.release()
            assert asked_for.acquire(timeout=PATIENCE)
        return logits

    refs = adapters(tmp_path, 0.02, 0.05)
    wanted = long_prompts(ROWS, tokens)
    with EngineHarness(draft=lockstep) as harness:
        versions = [harness.thread.stage(ref).result(PATIENCE) for ref in [*refs, None]]
        assert harness.thread.active == BARE_DRAFT
        clients = [harness.submit(one) for one in wanted]
        swaps: list[Future[None]] = []
        staged, refused = (harness.thread.stage(ref) for ref in (refs[0], replace(refs[1], sha256="0" * 64)))
        for i in range(many):
            assert inside.acquire(timeout=PATIENCE)
            swaps.append(harness.thread.switch(versions[i % 3]))
            asked_for.release()
        ends = [client.finished(FinishReason.LENGTH) for client in clients]
        assert all(swap.result(PATIENCE) is None for swap in swaps)
        assert staged.result(PATIENCE).adapter == 1
        with pytest.raises(AdapterRefused):
            refused.result(PATIENCE)
        assert harness.thread.active == harness.thread.status().adapter == versions[(many - 1) % 3].adapter
    full = [{round.adapter for round in rounds} for rounds in harness.observed if len(rounds) == ROWS]
    assert full[: many + 1] == [{BARE_DRAFT}, *({versions[i % 3].adapter} for i in range(many))]
    assert harness.failures == []
    logged = {generation.id: generation for generation in harness.generations}
    for end in ends:
        used = [round.adapter for round in logged[end.id].rounds]
        assert end.timings.adapters == tuple(dict.fromkeys(used)) == (0, 1, 2)
        assert end.timings.draft_n_accepted > 0


def test_a_change_of_draft_that_is_refused_changes_nothing() -> None:
    with EngineHarness() as harness:
        with pytest.raises(TypeError):
            harness.thread.switch(UnknownStaged()).result(PATIENCE)
        assert harness.thread.active == BARE_DRAFT and harness.submit(prompt(1)).finished().timings.draft_n > 0
    with EngineHarness(draft=None) as harness:
        with pytest.raises(Unavailable, match="without a draft"):
            harness.thread.stage(None).result(PATIENCE)
        assert harness.submit(prompt(1)).finished().timings.draft_n == 0
    with pytest.raises(Unavailable):
        harness.thread.stage(None).result(PATIENCE)


class UnknownStaged:
    adapter = 9


# ----------------------------------------------------------------------------------------------------- logged generations


def spelled(tokens: Sequence[int]) -> str:
    return "".join(chr(0x100 + token) for token in tokens if token not in EOS)


@pytest.mark.promise(4)
def test_the_logged_generation_matches_what_was_delivered() -> None:
    hold = BlockingHook()
    stop = long_prompts(1, 48)[0]
    pair = spelled(oracle(stop)[9:11])
    sampled = (prompt(seed, tokens=40, temperature=1.2, seed=seed) for seed in range(100))
    ended = next(one for one in sampled if 3 in oracle(one)[5:])
    asked = [
        *long_prompts(2, 48),
        replace(stop, sampling=replace(stop.sampling, stop=(pair,))),
        ended,
        prompt(50, tokens=1),
        prompt(51, length=40, temperature=1.0, top_p=0.9, seed=5),
        prompt(52, length=1, temperature=0.7),
        prompt(53, temperature=1.3, top_k=20),
        replace(prompt(54), store=False),
        replace(prompt(55, temperature=0.9), store=False),
    ]
    cancelled = [replace(long_prompts(1, 48)[0], store=store) for store in (True, False)]
    with EngineHarness(hold, rows=5, noise=0.1) as harness:
        clients = [harness.submit(one) for one in asked]
        clients += [harness.submit(one, lambda c: c.cancel() if len(c.deltas) == 3 else None) for one in cancelled]
        hold.release.set()
        ends = [client.end() for client in clients]
    by_id = {generation.id: generation for generation in harness.generations}
    stored = {client.ticket.result().id for client in clients if client.prompt.store}
    assert len(by_id) == len(harness.generations) and set(by_id) == stored
    cases = [case for generation in harness.generations for case in generation.cases]
    assert (harness.cases, harness.ties) == (len(cases), sum(case.tie for case in cases)) and harness.cases > 0

    assert Counter((r.start, r.emitted, r.accepted) for rounds in harness.observed for r in rounds) == Counter(
        (sum(len(d.tokens) for d in client.deltas[:i]), len(delta.tokens), sum(delta.drafted))
        for client in clients
        for i, delta in enumerate(client.deltas)
    )
    for client, end in zip(clients, ends, strict=True):
        assert isinstance(end, Finished) and end.id == client.ticket.result().id
        assert list(end.output) == client.tokens
        stops = "".join(client.prompt.sampling.stop)
        assert "".join(delta.text for delta in client.deltas) == spelled(client.tokens).removesuffix(stops)
        if client.prompt.sampling.greedy or client.prompt.sampling.seed is not None:
            assert client.tokens == oracle(client.prompt)[: len(client.tokens)]
        assert end.timings.predicted_n == len(end.output) and end.timings.rounds == len(client.deltas)
        assert end.timings.draft_n_accepted == sum(sum(delta.drafted) for delta in client.deltas)
        assert 0 < end.timings.queue_seconds < end.timings.prompt_seconds < end.timings.first_token_seconds
        phases = end.timings.queue_seconds + end.timings.prefill_seconds + end.timings.decode_seconds
        assert phases == pytest.approx(end.timings.prompt_seconds + end.timings.predicted_seconds)
        if (generation := by_id.get(end.id)) is not None:
            assert end.timings.draft_n == sum(round.drafted for round in generation.rounds)
            agrees(generation, client, end)
    assert any(round.accepted == round.emitted for rounds in harness.observed for round in rounds), "none was cut short"
    reasons = [end.finish for end in ends if isinstance(end, Finished)]
    assert reasons[2:4] == [FinishReason.STOP] * 2 and reasons[-2:] == [FinishReason.CANCELLED] * 2
    assert len(clients[2].tokens) == spelled(oracle(stop)).index(pair) + len(pair)


def agrees(generation: Generation, client: Client, end: Finished) -> None:
    """A log entry against what the client saw, and against one pass of the target over the whole text."""
    asked, output = client.prompt, client.tokens
    assert (generation.prompt, generation.provenance, generation.finish) == (asked, WHO, end.finish)
    assert list(generation.output) == output
    start = 0
    positions: list[int] = []
    for round, delta in zip(generation.rounds, client.deltas, strict=True):
        assert (round.start, round.emitted) == (start, len(delta.tokens))
        assert delta.drafted == (True,) * round.accepted + (False,) * (round.emitted - round.accepted)
        assert round.accepted <= round.drafted and round.emitted <= round.accepted + 1
        # None past the end of the text.
        whole = round.start + round.emitted < len(output) or end.finish is FinishReason.CANCELLED
        assert round.drafted in ((0, K) if whole else (0, min(K, round.emitted)))
        start += round.emitted
        assert round.emitted == round.accepted + 1 or start == len(output)
        if round.accepted < round.drafted and round.emitted == round.accepted + 1:
            positions.append(round.start + round.accepted)
    assert start == len(output)

    fed = mx.array([[*asked.tokens, *output[:-1]]])
    logits = reference()(fed)[0, len(asked.tokens) - 1 :]
    logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    at = np.arange(len(output))
    np.testing.assert_allclose(generation.logprobs, logprobs[at, output], atol=1e-3)
    drawn = (
        np.zeros(len(output))
        if asked.sampling.greedy
        else np.array(filtered_logprobs(logits, asked.sampling))[at, output]
    )
    np.testing.assert_allclose(generation.sampled_logprobs, drawn, atol=1e-3)

    targets = generation.targets
    assert targets is not None and targets.positions == len(output)
    ids = np.frombuffer(targets.ids, "<u4").reshape(len(output), targets.top).astype(np.int64)
    held = np.frombuffer(targets.logprobs, "<f2").reshape(len(output), targets.top)
    np.testing.assert_array_equal(ids[:, 0], logprobs.argmax(axis=-1))
    np.testing.assert_allclose(held, np.take_along_axis(logprobs, ids, axis=-1), atol=2e-2)

    assert [case.position for case in generation.cases] == positions
    for case in generation.cases:
        assert case.target == output[case.position] != case.drafted
        np.testing.assert_allclose(case.p, np.exp(logprobs[case.position, case.drafted]), atol=1e-3)


def test_selected_requests_under_way_are_not_recorded_and_all_cached_prefixes_go() -> None:
    """One of each runs, and two wait for a row."""

    def asked(number: int, client: str) -> Prompt:
        return replace(long_prompts(8, 20)[number], tokens=prompt(number, 3 * BLOCK + 1).tokens, client=client)

    names = ("ada", "bob", "ada", "bob")
    forgotten: list[Future[None]] = []

    def forget(client: Client) -> None:
        if not forgotten:
            forgotten.append(harness.thread.forget(Selection(client="ada")))

    with EngineHarness(rows=2) as harness:
        earlier = harness.submit(asked(5, "ada"))
        earlier.finished()
        clients = [harness.submit(asked(i, name), forget if i == 0 else lambda _: None) for i, name in enumerate(names)]
        for client in clients:
            assert client.finished().timings.cache_n == 0
        forgotten[0].result(PATIENCE)
        after = harness.submit(asked(5, "ada"))
        assert after.finished().timings.cache_n == 0, "its prefix was cached before"
        # A row leaves the batch, and its blocks go into the cache, before its last event is sent.
        assert harness.engine is not None
        prefixes = harness.engine.decoder.prefixes
        found = [prefixes.cached_tokens(client.prompt.tokens, "") > 0 for client in (*clients, after)]
    assert found == [False, True, False, True, True]
    assert [one.prompt.client for one in harness.generations] == ["ada", "bob", "bob", "ada"]


def test_a_selected_request_in_the_middle_of_its_prefill_is_not_recorded() -> None:
    forgotten: list[Future[None]] = []

    def forget(client: Client) -> None:
        prefilling = [ticket.prompt.client for ticket in harness.thread._scheduler.prefilling]
        if not forgotten and prefilling == ["ada"]:
            forgotten.append(harness.thread.forget(Selection(client="ada")))

    with EngineHarness(rows=2) as harness:
        running = harness.submit(replace(long_prompts(1, 200)[0], client="bob"), forget)
        assert running.started.wait(PATIENCE)
        long = harness.submit(replace(prompt(0, 701, 4), client="ada"))
        long.finished()
        running.finished()
        assert forgotten, "it was prefilled in chunks"
        forgotten[0].result(PATIENCE)
    assert [one.prompt.client for one in harness.generations] == ["bob"]


def test_whoever_asked_for_a_change_that_ends_the_thread_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with EngineHarness(hang_seconds=2.0) as harness:
        assert harness.engine is not None

        def fail() -> None:
            raise RuntimeError("a round that was completed for it")

        monkeypatch.setattr(harness.engine.decoder, "forget", fail)
        asked = harness.thread.forget(Selection(everything=True))
        with pytest.raises(Unavailable, match="the engine stopped: RuntimeError"):
            asked.result(PATIENCE)


def test_a_request_that_ended_before_its_cancellation_has_ended_by_itself() -> None:
    """What a command has completed is delivered before anything is cancelled."""
    with EngineHarness() as harness:
        held, client = threading.Event(), harness.submit(long_prompts(1, 40)[0])
        assert harness.engine is not None
        decoder, pending = harness.engine.decoder, list[bool]()
        complete, seen = decoder.forget, harness.thread._end_cancelled

        def forget() -> None:
            if decoder.rows:
                # As where a round is under way.
                decoder._reports.append(decoder.round())
                held.set()
            complete()

        decoder.forget = forget
        harness.thread._end_cancelled = lambda engine: (pending.append(bool(decoder._reports)), seen(engine))[1]
        while not held.is_set():
            harness.thread.forget(Selection(client="nobody")).result(PATIENCE)
        finished = client.finished()
    assert not any(pending), "reports were delivered before"
    assert finished.output == tuple(client.tokens)


def test_what_fails_to_forget_says_so_and_the_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with EngineHarness() as harness:
        assert harness.engine is not None

        def fail() -> None:
            raise PermissionError("the folder cannot be written to")

        with monkeypatch.context() as patch:
            patch.setattr(harness.engine.decoder, "forget", fail)
            with pytest.raises(PermissionError):
                harness.thread.forget(Selection(everything=True)).result(PATIENCE)
        harness.submit(prompt(1)).finished()
        harness.thread.forget(Selection(everything=True)).result(PATIENCE)
    with pytest.raises(Unavailable):
        harness.thread.forget(Selection(everything=True)).result(PATIENCE)


def test_requests_that_come_while_the_models_are_unloaded_get_the_targets_own_tokens() -> None:
    with EngineHarness(idle_unload_seconds=0.05) as engine:
        for turn in range(7):
            clients = [engine.submit(prompt(4 * turn + i)) for i in range(turn % 3 + 1)]
            for client in clients:
                client.finished()
            # At times just before, at and after the moment at which it unloads.
            time.sleep(IDLE_SECONDS + 0.02 * (turn - 3))
        wait_for(lambda: not engine.thread.status().loaded, "it unloads")
        assert engine.builds > 2


def test_memory_that_is_lent_keeps_the_models_loaded() -> None:
    with EngineHarness(idle_unload_seconds=0.05) as engine:
        assert engine.engine is not None
        engine.engine.decoder.memory.limit(Budget(2**24, RowBytes(64)))
        assert engine.thread.lend(2**20, 1).result(PATIENCE) == 2**20
        time.sleep(1.5)
        assert engine.builds == 1 and engine.thread.status().loaded
        engine.thread.take_back()
        wait_for(lambda: not engine.thread.status().loaded, "it unloads")


def test_loading_again_may_take_longer_than_a_hang() -> None:
    with EngineHarness(idle_unload_seconds=0.05, hang_seconds=2.0) as engine:
        wait_for(lambda: not engine.thread.status().loaded, "it unloads")
        engine.on_build = lambda: time.sleep(3.0)
        engine.submit(prompt(1)).finished()
        assert engine.builds == 2 and not engine.fatal.done()


def test_what_does_not_fit_after_loading_again_is_refused() -> None:
    with EngineHarness(idle_unload_seconds=0.05) as engine:
        wait_for(lambda: not engine.thread.status().loaded, "it unloads")
        engine.context = 32
        long, short = engine.submit(prompt(1, length=40)), engine.submit(prompt(2, length=5, tokens=8))
        end = long.end()
        assert isinstance(end, Failed) and isinstance(end.error, BadRequest) and "32 tokens" in str(end.error)
        short.finished()


def test_a_draft_that_cannot_be_loaded_again_leaves_the_bare_one(tmp_path: Path) -> None:
    with EngineHarness(idle_unload_seconds=0.05) as engine:
        [ref] = adapters(tmp_path, 0.05)
        engine.thread.switch(engine.thread.stage(ref).result(PATIENCE)).result(PATIENCE)
        wait_for(lambda: not engine.thread.status().loaded, "it unloads")
        assert engine.thread.active == ref.id
        engine.submit(prompt(1)).finished()
        assert engine.thread.active == ref.id, "it drafts again"
        wait_for(lambda: not engine.thread.status().loaded, "it unloads")
        (ref.folder / "adapters.safetensors").unlink()
        engine.submit(prompt(2)).finished()
        assert engine.thread.active == BARE_DRAFT
