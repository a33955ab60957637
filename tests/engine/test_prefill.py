"""Batched prefill: the same results as each prompt alone, in fewer calls, and which prompts are batched."""

import random
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import pytest

from service.core import Prompt, Sampling
from service.engine.adapters import bare
from service.engine.decoder import Decoder
from service.engine.kv.cache import RowCache
from service.engine.kv.prefix import PrefixCache
from service.engine.request import Request
from tests.support.batches import admit
from tests.support.oracle import forced, noisy_copy, tiny_llama
from tests.support.typed import layers_of

VOCABULARY, CHUNK, EOS = 97, 32, frozenset({3})


def make_decoder(prefix: PrefixCache | None = None, k: int = 3, chunk: int = CHUNK) -> Decoder:
    target = tiny_llama(0)
    draft = bare(noisy_copy(target, 1, 0.2)) if k else None
    return Decoder(target, draft, vocabulary=VOCABULARY, k=k, prefill_chunk=chunk, prefix=prefix)


def random_tokens(number: int, count: int) -> tuple[int, ...]:
    rng = random.Random(number)
    return tuple(rng.randrange(4, VOCABULARY) for _ in range(count))


def rows_of(texts: Sequence[Sequence[int]]) -> list[Request]:
    return [Request(str(i), Prompt(tuple(text), Sampling(max_tokens=16)), EOS, None) for i, text in enumerate(texts)]


def finish(decoder: Decoder, rows: Sequence[Request]) -> None:
    while decoder.rows:
        decoder.round()
    for row in rows:
        assert row.output == forced(decoder.batch.target.model, row.prompt.tokens, row.output, row.prompt.sampling, EOS)


def run(decoder: Decoder, texts: Sequence[Sequence[int]], room: int = 4 * CHUNK) -> list[list[int]]:
    """Prompt lengths by prefill call; all prompts are then decoded and checked against the target alone."""
    rows = rows_of(texts)
    calls = [[len(row.prompt.tokens) for row in prefill.rows] for prefill in admit(decoder, rows, room)]
    finish(decoder, rows)
    return calls


def test_batched_prefill_equals_each_prompt_alone() -> None:
    decoder = make_decoder()
    rows = rows_of([random_tokens(i, count) for i, count in enumerate((22, 20, 21, 23))])
    (prefill,) = admit(decoder, rows, room=4 * CHUNK)
    assert decoder.batch.drafter is not None and decoder.rows == prefill.rows and len(prefill.rows) == 4
    for model, cache in (
        (decoder.batch.target.model, decoder.batch.cache),
        (decoder.batch.drafter.draft.model, decoder.batch.drafter.cache),
    ):
        assert cache.lengths.host == [len(row.prompt.tokens) - 1 for row in decoder.rows]
        for i, row in enumerate(decoder.rows):
            own, count = RowCache(model, 1), len(row.prompt.tokens) - 1
            model(mx.array([row.prompt.tokens[:-1]]), cache=own.layers)
            for mine, theirs in zip(cache.arrays(), own.arrays(), strict=True):
                assert mx.allclose(mine[i, :, :count], theirs[0, :, :count], atol=1e-5)


@pytest.mark.parametrize("k", [0, 3])
def test_prompts_of_similar_length_are_batched_in_any_order(k: int) -> None:
    """Padding is at most an eighth of a call's tokens."""
    texts = [random_tokens(i, count) for i, count in enumerate((21, 11, 22, 1, 20, 12, 33, 2))]
    assert run(make_decoder(k=k), texts) == [[21, 22, 20], [11, 12], [1], [33], [2]]


@pytest.mark.parametrize(("room", "calls"), [(20, [1, 1, 1, 1]), (40, [2, 2]), (79, [3, 1]), (80, [4])])
def test_no_call_exceeds_the_token_limit(room: int, calls: list[int]) -> None:
    assert [len(call) for call in run(make_decoder(), [random_tokens(i, 21) for i in range(4)], room)] == calls


def test_a_prompt_longer_than_a_chunk_is_prefilled_alone() -> None:
    assert run(make_decoder(), [random_tokens(i, CHUNK + 2) for i in range(3)], 8 * CHUNK) == [[CHUNK + 2]] * 3
    assert run(make_decoder(), [random_tokens(i, CHUNK + 1) for i in range(3)], 8 * CHUNK) == [[CHUNK + 1] * 3]
    assert run(make_decoder(), [random_tokens(i, CHUNK + 1 + i) for i in range(3)], 8 * CHUNK) == [[33], [34], [35]]


def test_a_shared_prefix_is_prefilled_once_for_the_others() -> None:
    texts = [(*random_tokens(1, 32), *random_tokens(i, 14)) for i in range(2, 6)]
    assert run(make_decoder(PrefixCache(2**24), chunk=2 * CHUNK), texts, 8 * CHUNK) == [[46], [46, 46, 46]]
    assert run(make_decoder(chunk=2 * CHUNK), texts, 8 * CHUNK) == [[46] * 4]


def test_each_prompt_of_a_batch_is_cached() -> None:
    decoder, texts = make_decoder(PrefixCache(2**24), chunk=2 * CHUNK), [random_tokens(i, 41) for i in range(3)]
    assert run(decoder, texts) == [[41] * 3]
    rows = rows_of([(*text, 9, 10) for text in texts])
    admit(decoder, rows)
    assert [row.cached_tokens for row in rows] == [32] * 3
    finish(decoder, rows)


def test_cached_prefixes_of_different_lengths_are_restored_together() -> None:
    decoder = make_decoder(PrefixCache(2**24))
    known = [random_tokens(1, 97), random_tokens(2, 33)]
    run(decoder, known)
    rows = rows_of(
        [(*known[0][:96], *random_tokens(3, 21)), (*known[1][:32], *random_tokens(4, 22)), random_tokens(5, 20)]
    )
    (prefill,) = admit(decoder, rows, 4 * CHUNK)
    assert [row.cached_tokens for row in rows] == [96, 32, 0]
    assert prefill.next_call_tokens(CHUNK) == 0
    finish(decoder, rows)


def test_a_new_draft_without_cached_blocks_prefills_the_whole_prompt_alone() -> None:
    """The target has more than a chunk of these cached, and the new draft must prefill all of it."""
    decoder = make_decoder(PrefixCache(2**24))
    system = random_tokens(1, 64)
    run(decoder, [(*system, 5)])
    assert run(decoder, [(*system, *random_tokens(i, 10)) for i in range(3)]) == [[74] * 3]
    decoder.switch(bare(noisy_copy(tiny_llama(0), 2, 0.2)))
    assert run(decoder, [(*system, *random_tokens(i, 11)) for i in range(3)])[0] == [75]


class FailsInBatches(nn.Module):
    """A draft that fails on calls of more than one row."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, tokens: mx.array, cache: list[object] | None = None) -> mx.array:
        if tokens.shape[0] > 1:
            raise RuntimeError("broken draft")
        return self.inner(tokens, cache=cache)

    @property
    def layers(self) -> list[nn.Module]:
        return layers_of(self.inner)


def test_a_draft_that_fails_on_a_batched_prefill_costs_speed_only() -> None:
    decoder = make_decoder()
    decoder.switch(bare(FailsInBatches(noisy_copy(tiny_llama(0), 1, 0.2))))
    assert run(decoder, [random_tokens(1, 20)]) == [[20]] and not decoder.batch.failed
    assert run(decoder, [random_tokens(i, 20 + i) for i in range(3)]) == [[20, 21, 22]] and decoder.batch.failed
