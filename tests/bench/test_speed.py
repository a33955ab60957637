"""Promised speeds, on the bundled pair and idle cores: `pytest -m bench -s tests/bench`."""

import random
import threading
import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import pytest

from service.app import resolve_models
from service.core import TOP_TARGETS, Delta, Event, Generation, Prompt, Round, Sampling
from service.engine.adapters import served
from service.engine.decoder import Decoder
from service.engine.engine import Engine
from service.engine.kv.prefix import PrefixCache
from service.engine.prefill import Prefill
from service.engine.request import Request
from service.engine.thread import EngineThread
from service.evaluation.sql_prompts import traffic_prompts
from service.learning import lora
from service.learning.batches import batches
from service.learning.examples import Example
from service.learning.losses import TargetDivergence
from service.learning.train import Optimiser, train
from service.models.pair import Pair, load_pair
from service.models.text import TextEncoder
from service.settings import Settings

pytestmark = pytest.mark.bench


@pytest.fixture(scope="module")
def pair() -> Pair:
    folders = resolve_models(Settings())
    return load_pair(folders.target, folders.draft)


def rate(pair: Pair, rows: int, k: int, tokens: int = 48) -> float:
    """Tokens per second of `rows` streams decoded together, after their prefill."""
    encoder = TextEncoder(pair.target.tokenizer)
    assert pair.draft is not None
    decoder = Decoder(pair.target.model, served(pair.draft), vocabulary=pair.vocabulary, k=k, collect=True)
    asked = [encoder.encode_chat([{"role": "user", "content": line.prompt}]).tokens for line in traffic_prompts(rows)]
    # No end token: every stream is equally long.
    made = [
        Request(str(i), Prompt(prompt, Sampling(max_tokens=tokens)), frozenset(), None)
        for i, prompt in enumerate(asked)
    ]
    for row in made:
        decoder.admit(row)
    started = time.perf_counter()
    while decoder.rows:
        decoder.round()
    return sum(row.emitted for row in made) / (time.perf_counter() - started)


@pytest.mark.parametrize("k", [0, 3])
def test_eight_streams_decode_much_faster_than_one(pair: Pair, k: int) -> None:
    turns = [(rate(pair, 1, k), rate(pair, 8, k)) for _ in range(3)]
    one, eight = median(turn[0] for turn in turns), median(turn[1] for turn in turns)
    print(f"\nK = {k}: 1 stream {one:.1f} tokens/s, 8 streams {eight:.1f} tokens/s, {eight / one:.2f} times")
    assert eight / one >= 2.5


def noise(number: int, count: int) -> tuple[int, ...]:
    """Random tokens that are not in the prefix cache."""
    rng = random.Random(number)
    return tuple(rng.randrange(1000, 40_000) for _ in range(count))


def first_token(decoder: Decoder, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Seconds until a request's first token, and how much of its prompt was cached."""
    row = Request("0", Prompt(prompt, Sampling(max_tokens=1)), frozenset(), None)
    started = time.perf_counter()
    decoder.admit(row)
    decoder.round()
    return time.perf_counter() - started, row.cached_tokens


def test_a_shared_prefix_of_a_thousand_tokens_is_prefilled_once(pair: Pair) -> None:
    assert pair.draft is not None
    decoder = Decoder(
        pair.target.model, served(pair.draft), vocabulary=pair.vocabulary, k=3, prefix=PrefixCache(512 * 2**20)
    )
    first_token(decoder, noise(0, 100))
    ratios: list[float] = []
    for turn in range(3):
        shared = noise(10 + turn, 1000)
        (first, none), (again, reused) = (first_token(decoder, (*shared, *noise(20 + i, 10))) for i in range(2))
        assert (none, reused) == (0, 992)
        ratios.append(again / first)
        print(f"\nfirst token after {first:.2f} s, again after {again:.3f} s, {ratios[-1]:.3f} times")
    assert median(ratios) <= 0.15


class TimedDecoder(Decoder):
    """Records how long each prefill chunk takes."""

    def prefill(self, prefill: Prefill, joining: int = 1, chunk: int | None = None) -> bool:
        started = time.perf_counter()
        done = super().prefill(prefill, joining, chunk)
        self.chunks.append(time.perf_counter() - started)
        return done

    chunks: list[float]


class NoObserver:
    """Neither a log nor metrics."""

    def record(self, generation: Generation) -> None: ...

    def prompt_read(self, tokens: int, reused: int) -> None: ...

    def prefix_read(self, tokens: int) -> None: ...

    def observe(self, rounds: Sequence[Round], seconds: float) -> None: ...

    def preempted(self) -> None: ...

    def failure_cases(self, ties: int, others: int) -> None: ...

    def draft_failed(self, adapter: int) -> None: ...


def test_a_long_prompt_does_not_hold_up_a_running_stream(pair: Pair) -> None:
    """The longest gap between two deliveries to a stream, during a prefill of 2,000 tokens for another, in chunk times."""
    assert pair.draft is not None
    base = served(pair.draft)
    decoder = TimedDecoder(pair.target.model, base, vocabulary=pair.vocabulary, k=3, prefix=PrefixCache(512 * 2**20))
    decoder.chunks = []
    engine = Engine(decoder, base, frozenset(), 4096, pair.provenance, lambda: pair.target.tokenizer.detokenizer)
    thread = EngineThread(
        lambda before: engine, max_rows=4, max_waiting=4, recorder=NoObserver(), observer=NoObserver()
    )
    times: list[float] = []
    running, read = threading.Event(), threading.Event()

    def stream(event: Event) -> None:
        times.append(time.perf_counter())
        if len(times) >= 5:
            running.set()

    def other(event: Event) -> None:
        if isinstance(event, Delta):
            read.set()

    thread.start()
    try:
        ticket = thread.submit(Prompt(noise(1, 50), Sampling(max_tokens=2000)), stream)
        assert running.wait(60)
        decoder.chunks.clear()
        started = len(times)
        thread.submit(Prompt(noise(2, 2000), Sampling(max_tokens=1)), other)
        assert read.wait(200)
        ticket.cancel()
    finally:
        thread.stop()
    gaps = [after - before for before, after in zip(times[started - 1 :], times[started:], strict=False)]
    chunk, gap = max(decoder.chunks), max(gaps)
    print(f"\nlongest gap {gap:.2f} s, longest chunk {chunk:.2f} s, median chunk {median(decoder.chunks):.2f} s")
    print("chunks", [f"{c:.2f}" for c in decoder.chunks], "gaps", [f"{g:.2f}" for g in gaps])
    assert gap <= 2 * chunk


def example(seed: int, vocabulary: int) -> Example:
    rng = np.random.default_rng(seed)
    logprobs = np.log(rng.dirichlet(np.ones(TOP_TARGETS + 1), size=40)).astype(np.float32)
    ids = np.stack([rng.choice(vocabulary, TOP_TARGETS, replace=False) for _ in range(40)]).astype(np.int32)
    tokens = rng.integers(0, vocabulary, 160).astype(np.int32)
    return Example(tokens, 120, ids, logprobs[:, :-1], logprobs[:, -1])


def test_a_training_step_takes_less_than_two_seconds(pair: Pair) -> None:
    """Batch 8 x 160 tokens, a quarter of them response."""
    assert pair.draft is not None
    model = pair.draft.model
    lora.wrap(model, rank=16, scale=2.0, seed=0)
    examples = [example(seed, pair.vocabulary) for seed in range(8)]
    times: list[float] = []
    last = [time.perf_counter()]

    def on_progress(_: object) -> None:
        now = time.perf_counter()
        times.append(now - last[0])
        last[0] = now

    steps = 8
    train(
        model,
        (batch for seed in range(steps) for batch in batches(examples, 8, seed)),
        loss_fn=TargetDivergence(model),
        optimiser=Optimiser(learning_rate=1e-4, steps=steps),
        on_progress=on_progress,
    )
    print(f"\na training step, batch 8 x 160: median {median(times[1:]):.2f} s")
    assert median(times[1:]) < 2.0
