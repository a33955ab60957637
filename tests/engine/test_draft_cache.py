"""After every round the draft's cache equals a fresh prefill of each row's tokens, whichever drafter proposed them."""

import random
from collections.abc import Generator
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.llama import Model

from service.core import Prompt, Sampling, Source
from service.engine.adapters import bare
from service.engine.decoder import Decoder
from service.engine.kv.cache import RowCache
from service.engine.kv.prefix import BLOCK, Owner, PrefixCache
from service.engine.request import Request
from service.engine.strategy import CPU, using
from tests.support.cuda import IN_PAGES
from tests.support.families import RECURRENT, V, build
from tests.support.fixed_length import FixedLength, fix_length
from tests.support.oracle import noisy_copy, tiny_llama


@cache
def target() -> Model:
    return tiny_llama(0, vocabulary=V)


def draft(kind: str) -> nn.Module:
    """Mostly wrong, so that the keys and values of its proposals differ from those of the row's tokens."""
    return noisy_copy(target(), 3, 0.6) if kind == "attention" else build(kind, RECURRENT[kind])


def repeating(seed: int) -> tuple[int, ...]:
    """Random tokens of four ids, so that a look-up finds a match for nearly every pair."""
    rng = random.Random(seed)
    few = [rng.randrange(4, V) for _ in range(4)]
    return tuple(rng.choice(few) for _ in range(40 + seed))


def assert_fresh(model: nn.Module, held: RowCache, row: int, tokens: list[int]) -> None:
    """The row's cache equals a prefill of the row's tokens."""
    count = held.lengths.host[row]
    assert count < len(tokens)
    read = RowCache(model, 1)
    model(mx.array([tokens[:count]]), cache=read.layers)
    read.commit(count)
    assert len(read.contents(0)) == len(read.attention)
    for both in zip(held.contents(row), read.contents(0), strict=True):
        for ours, theirs in zip(*both, strict=True):
            assert ours is not None and theirs is not None
            assert mx.allclose(ours, theirs, atol=1e-4), f"row {row}, {count} positions"
    for mine, fresh in zip(held.states, read.states, strict=True):
        for ours, theirs in zip(mine.cache, fresh.cache, strict=True):
            assert ours is not None and theirs is not None
            assert mx.allclose(ours[row], theirs[0], atol=1e-4), f"state of row {row} after {count} tokens"


@pytest.fixture(params=[CPU, IN_PAGES], ids=["rectangles", "pages"])
def either(request: pytest.FixtureRequest) -> Generator[None]:
    """Rows in rectangles, and rows in pages."""
    with using(request.param):
        yield


@pytest.mark.parametrize("kind", ["attention", "lfm2", pytest.param("rwkv7", marks=pytest.mark.nightly)])
@pytest.mark.usefixtures("either")
def test_look_ups_leave_a_clean_draft_cache(kind: str) -> None:
    model = draft(kind)
    decoder = Decoder(target(), bare(model), vocabulary=V, k=3, adaptive=True, lookup=3, prefix=PrefixCache(2**24))
    fix_length(decoder, FixedLength(3, looks_up=lambda number: number % 3 > 0))
    # The last prompt has no match, so its drafts share rounds with the others' look-ups.
    prompts = [repeating(seed) for seed in range(3)] + [tuple(range(4, 60))]
    rows = [
        Request(str(i), Prompt(prompt, Sampling(max_tokens=20)), frozenset(), None) for i, prompt in enumerate(prompts)
    ]
    for row in rows:
        decoder.admit(row)
    assert decoder.batch.drafter is not None
    while decoder.rows:
        decoder.round()
        for index, row in enumerate(decoder.rows):
            assert_fresh(model, decoder.batch.drafter.cache, index, row.tokens)
    sources = [
        [each for row in rows for each in row.rounds if each.source is source]
        for source in (Source.DRAFT, Source.LOOKUP)
    ]
    assert all(any(each.drafted > each.accepted for each in found) for found in sources), "both were rejected at times"
    assert decoder.draft_failures == 0
    if kind == "attention":
        assert_blocks(decoder, model, rows)


def assert_blocks(decoder: Decoder, model: nn.Module, rows: list[Request]) -> None:
    """The draft's blocks in the prefix cache equal a prefill of the finished rows' tokens."""
    assert decoder.batch.prefix is not None and decoder.batch.drafter is not None
    for row in rows:
        cached = decoder.batch.drafter.new_cache(1)
        decoder.batch.prefix.load(Owner.DRAFT, [row.tokens], cached)
        assert cached.lengths.host[0] >= BLOCK
        assert_fresh(model, cached, 0, row.tokens)


@pytest.mark.parametrize(("chunk", "rows", "reads"), [(32, 1, 32), (32, 2, 16), (8, 4, 8)])
def test_a_draft_catches_up_in_calls_of_a_prefill_chunk(chunk: int, rows: int, reads: int) -> None:
    """Shared among the rows, but no fewer than 8 tokens of each."""
    texts = [list(range(4, 104)) for _ in range(rows)]
    decoder = Decoder(target(), bare(draft("attention")), vocabulary=V, k=2, prefill_chunk=chunk)
    drafter = decoder.batch.drafter
    assert drafter is not None
    drafter.cache = drafter.new_cache(rows)
    calls = 0
    while not drafter.catch_up(texts):
        calls += 1
        assert drafter.cache.lengths.host == [calls * reads] * rows
    assert calls == -(-(99 - 8) // reads) - 1
