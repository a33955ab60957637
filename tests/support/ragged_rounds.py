"""Rounds of ever-changing shapes: rows of different lengths join and leave, and the draft length changes every round.

    python -m tests.support.ragged_rounds --rounds 5000 --rows 16 --layers 8 --hidden 256 --dtype bfloat16

On CUDA this makes graphs that MLX has not cached by the hundred. With MLX's own settings the process ends on the way:

    MLX_CUDA_GRAPH_CACHE_SIZE=400 MLX_ENABLE_CACHE_THRASHING_CHECK=1 python -m tests.support.ragged_rounds --rounds 5000
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import mlx.core as mx
import mlx.nn as nn

from service.core import Prompt, Sampling
from service.engine.acceptance import Acceptance
from service.engine.adapters import Draft, bare
from service.engine.costs import Load
from service.engine.decoder import Decoder
from service.engine.kv.prefix import PrefixCache
from service.engine.planner import Choice, Match
from service.engine.request import Request
from service.mlx_environment import DEFAULTS
from tests.support.batches import admit
from tests.support.fixed_length import FixedLength, fix_length
from tests.support.oracle import noisy_copy, tiny_llama


class RandomLength(FixedLength):
    """A random number of drafted and looked-up tokens each round, sometimes none."""

    def __init__(self, most: int, rng: random.Random) -> None:
        super().__init__(most)
        self.rng = rng

    def choose(
        self,
        load: Load,
        matches: Sequence[Match | None],
        own: Sequence[Acceptance] | None = None,
        *,
        drafts: bool = True,
    ) -> Choice:
        drafted = self.rng.randint(0, self.drafted) if drafts else 0
        most = [min(drafted or self.drafted, m.available) if m and self.rng.random() < 0.3 else 0 for m in matches]
        return Choice(drafted, tuple(self.rng.randint(0, n) for n in most))


@dataclass(frozen=True, slots=True)
class RaggedReport:
    """Counts of a run. shapes: distinct rounds, by the sorted lengths of their rows and the tokens proposed.
    slowest: seconds of the slowest round. peak_gb: most memory that MLX held."""

    rounds: int
    shapes: int
    requests: int
    tokens: int
    seconds: float
    slowest: float
    peak_gb: float


def ragged_rounds(
    target: nn.Module,
    draft: Draft,
    *,
    vocabulary: int,
    rounds: int,
    max_rows: int,
    longest: int = 512,
    k: int = 8,
    seed: int = 0,
    on_finished: Callable[[Request], None] = lambda row: None,
    on_round: Callable[[int], None] = lambda done: None,
) -> RaggedReport:
    """Put at least `rounds` rounds through a Decoder over at most `max_rows` rows, whose prompts are of 2 to `longest` tokens;
    then let the rows that still run end."""
    rng = random.Random(seed)
    decoder = Decoder(
        target, draft, vocabulary=vocabulary, k=k, adaptive=True, lookup=k, collect=True, prefix=PrefixCache(2**26)
    )
    fix_length(decoder, RandomLength(k, rng))
    shapes: set[tuple[object, ...]] = set()
    requests = tokens = done = 0
    slowest, begun = 0.0, time.perf_counter()
    while done < rounds or decoder.rows:
        coming: list[Request] = []
        room = rng.randint(0, max_rows - len(decoder.rows)) if done < rounds else 0
        for _ in range(max(room, done < rounds and not decoder.rows)):
            length = int(2 * (longest / 2) ** rng.random())
            sampling = Sampling(
                temperature=rng.choice([0.0, 0.8]),
                top_p=rng.choice([1.0, 0.9]),
                seed=rng.choice([None, requests]),
                max_tokens=rng.randint(1, 60),
            )
            prompt = Prompt(tuple(rng.randrange(vocabulary) for _ in range(length)), sampling)
            coming.append(Request(str(requests), prompt, frozenset(), None))
            requests += 1
        admit(decoder, coming)
        lengths = tuple(sorted(len(row.tokens) for row in decoder.rows))
        report = decoder.round()
        shapes.add((lengths, tuple(sorted((each.drafted, each.source) for each in report.rounds))))
        slowest, done = max(slowest, report.seconds), done + 1
        for row in report.rows:
            if row.finish is not None:
                tokens += row.emitted
                on_finished(row)
        on_round(done)
    assert decoder.draft_failures == 0, "the draft failed on the way"
    seconds = time.perf_counter() - begun
    return RaggedReport(done, len(shapes), requests, tokens, seconds, slowest, mx.get_peak_memory() / 1e9)


def tiny_pair(layers: int, hidden: int, vocabulary: int, dtype: mx.Dtype) -> tuple[nn.Module, Draft]:
    """A random target and a draft that is right some of the time."""
    target = tiny_llama(0, layers=layers, hidden=hidden, vocabulary=vocabulary)
    draft = noisy_copy(target, 1, 0.1)
    for model in (target, draft):
        model.set_dtype(dtype)
        mx.eval(model.parameters())
    return target, bare(draft)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    target, draft = tiny_pair(asked.layers, asked.hidden, asked.vocabulary, getattr(mx, asked.dtype))
    begun = time.perf_counter()

    def on_round(done: int) -> None:
        if done % 500 == 0:
            held = f"{mx.get_active_memory() / 1e9:.2f} GB"
            print(f"{done} rounds, {time.perf_counter() - begun:.0f} s, {held}", file=sys.stderr, flush=True)

    found = ragged_rounds(
        target,
        draft,
        vocabulary=asked.vocabulary,
        rounds=asked.rounds,
        max_rows=asked.rows,
        longest=asked.longest,
        seed=asked.seed,
        on_round=on_round,
    )
    settings = {name: os.environ.get(name) for name in DEFAULTS}
    print(json.dumps({"device": str(mx.default_device()), **settings, **asdict(found)}))


if __name__ == "__main__":
    main()
