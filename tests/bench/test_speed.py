"""Speeds that are promised, on the bundled pair and quiet cores: `pytest -m bench -s tests/bench`."""

import time
from statistics import median

import numpy as np
import pytest

from service.app import resolve_models
from service.core import TOP_TARGETS, Prompt, Sampling
from service.engine.decoder import Decoder
from service.engine.draft import served
from service.engine.row import Row
from service.evaluation.templates import traffic
from service.learning import lora
from service.learning.dataset import Example, batches
from service.learning.loss import TargetDivergence
from service.learning.trainer import Optimiser, train
from service.models.pair import Pair, load_pair
from service.models.text import TextEncoder
from service.settings import Settings

pytestmark = [pytest.mark.bench, pytest.mark.real]


@pytest.fixture(scope="module")
def pair() -> Pair:
    folders = resolve_models(Settings())
    return load_pair(folders.target, folders.draft)


def rate(pair: Pair, rows: int, k: int, tokens: int = 48) -> float:
    """Tokens per second of `rows` streams decoded together, prompts read beforehand."""
    encoder = TextEncoder(pair.target.tokenizer)
    assert pair.draft is not None
    decoder = Decoder(pair.target.model, served(pair.draft), vocabulary=pair.vocabulary, k=k, collect=True)
    asked = [encoder.encode_chat([{"role": "user", "content": line.prompt}]) for line in traffic(rows)]
    # No end token: every stream is equally long.
    made = [
        Row(str(i), Prompt(prompt, Sampling(max_tokens=tokens)), frozenset(), None) for i, prompt in enumerate(asked)
    ]
    for row in made:
        decoder.admit(row)
    begun = time.perf_counter()
    while decoder.rows:
        decoder.round()
    return sum(row.emitted for row in made) / (time.perf_counter() - begun)


@pytest.mark.parametrize("k", [0, 3])
def test_eight_streams_decode_much_faster_than_one(pair: Pair, k: int) -> None:
    turns = [(rate(pair, 1, k), rate(pair, 8, k)) for _ in range(3)]
    one, eight = median(turn[0] for turn in turns), median(turn[1] for turn in turns)
    print(f"\nK = {k}: 1 stream {one:.1f} tokens/s, 8 streams {eight:.1f} tokens/s, {eight / one:.2f} times")
    assert eight / one >= 2.5


def example(seed: int, vocabulary: int) -> Example:
    rng = np.random.default_rng(seed)
    law = np.log(rng.dirichlet(np.ones(TOP_TARGETS + 1), size=40)).astype(np.float32)
    ids = np.stack([rng.choice(vocabulary, TOP_TARGETS, replace=False) for _ in range(40)]).astype(np.int32)
    tokens = rng.integers(0, vocabulary, 160).astype(np.int32)
    return Example(tokens, 120, ids, law[:, :-1], law[:, -1], np.ones(40, dtype=np.float32))


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
