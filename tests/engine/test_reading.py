"""Prompts that are read together: the same as each alone, in fewer calls, and never such as had better not be."""

import random
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import pytest

from service.core import Prompt, Sampling
from service.engine.cache import RowCache
from service.engine.decoder import Decoder
from service.engine.draft import bare
from service.engine.prefix import PrefixCache
from service.engine.row import Row
from tests.support.batches import take_in
from tests.support.oracle import forced, relative, tiny_llama
from tests.support.typed import layers_of

VOCABULARY, CHUNK, EOS = 97, 32, frozenset({3})


def house(prefix: PrefixCache | None = None, k: int = 3, chunk: int = CHUNK) -> Decoder:
    target = tiny_llama(0)
    draft = bare(relative(target, 1, 0.2)) if k else None
    return Decoder(target, draft, vocabulary=VOCABULARY, k=k, prefill_chunk=chunk, prefix=prefix)


def words(number: int, count: int) -> tuple[int, ...]:
    rng = random.Random(number)
    return tuple(rng.randrange(4, VOCABULARY) for _ in range(count))


def asking(texts: Sequence[Sequence[int]]) -> list[Row]:
    return [Row(str(i), Prompt(tuple(text), Sampling(max_tokens=16)), EOS, None) for i, text in enumerate(texts)]


def finish(decoder: Decoder, rows: Sequence[Row]) -> None:
    while decoder.rows:
        decoder.round()
    for row in rows:
        assert row.output == forced(decoder.target.model, row.prompt.tokens, row.output, row.prompt.sampling, EOS)


def read(decoder: Decoder, texts: Sequence[Sequence[int]], room: int = 4 * CHUNK) -> list[list[int]]:
    """Lengths of the prompts of each call, after all of them were answered as the target alone does."""
    rows = asking(texts)
    calls = [[len(row.prompt.tokens) for row in prefill.rows] for prefill in take_in(decoder, rows, room)]
    finish(decoder, rows)
    return calls


def test_keys_and_values_are_those_of_each_prompt_alone() -> None:
    decoder = house()
    rows = asking([words(i, count) for i, count in enumerate((22, 20, 21, 23))])
    (prefill,) = take_in(decoder, rows, room=4 * CHUNK)
    assert decoder.drafter is not None and decoder.rows == prefill.rows and len(prefill.rows) == 4
    for model, cache in ((decoder.target.model, decoder.cache), (decoder.drafter.draft.model, decoder.drafter.cache)):
        assert cache.lengths.host == [len(row.prompt.tokens) - 1 for row in decoder.rows]
        for i, row in enumerate(decoder.rows):
            own, count = RowCache(model, 1), len(row.prompt.tokens) - 1
            model(mx.array([row.prompt.tokens[:-1]]), cache=own.layers)
            for mine, theirs in zip(cache.arrays(), own.arrays(), strict=True):
                assert mx.allclose(mine[i, :, :count], theirs[0, :, :count], atol=1e-5)


@pytest.mark.parametrize("k", [0, 3])
def test_those_of_like_length_go_together_whatever_stands_between_them(k: int) -> None:
    """A call pads the shorter ones, by an eighth of them all at most."""
    texts = [words(i, count) for i, count in enumerate((21, 11, 22, 1, 20, 12, 33, 2))]
    assert read(house(k=k), texts) == [[21, 22, 20], [11, 12], [1], [33], [2]]


@pytest.mark.parametrize(("room", "calls"), [(20, [1, 1, 1, 1]), (40, [2, 2]), (79, [3, 1]), (80, [4])])
def test_no_call_is_larger_than_the_room_there_is(room: int, calls: list[int]) -> None:
    assert [len(call) for call in read(house(), [words(i, 21) for i in range(4)], room)] == calls


def test_a_prompt_of_more_than_a_chunk_is_read_alone() -> None:
    assert read(house(), [words(i, CHUNK + 2) for i in range(3)], 8 * CHUNK) == [[CHUNK + 2]] * 3
    assert read(house(), [words(i, CHUNK + 1) for i in range(3)], 8 * CHUNK) == [[CHUNK + 1] * 3]
    assert read(house(), [words(i, CHUNK + 1 + i) for i in range(3)], 8 * CHUNK) == [[33], [34], [35]]


def test_what_one_leaves_behind_saves_the_others_reading_it() -> None:
    texts = [(*words(1, 32), *words(i, 14)) for i in range(2, 6)]
    assert read(house(PrefixCache(2**24), chunk=2 * CHUNK), texts, 8 * CHUNK) == [[46], [46, 46, 46]]
    assert read(house(chunk=2 * CHUNK), texts, 8 * CHUNK) == [[46] * 4]


def test_each_leaves_its_own_behind() -> None:
    decoder, texts = house(PrefixCache(2**24), chunk=2 * CHUNK), [words(i, 41) for i in range(3)]
    assert read(decoder, texts) == [[41] * 3]
    rows = asking([(*text, 9, 10) for text in texts])
    take_in(decoder, rows)
    assert [row.reused for row in rows] == [32] * 3
    finish(decoder, rows)


def test_beginnings_of_unlike_length_that_were_kept_are_taken_over_together() -> None:
    decoder = house(PrefixCache(2**24))
    known = [words(1, 97), words(2, 33)]
    read(decoder, known)
    rows = asking([(*known[0][:96], *words(3, 21)), (*known[1][:32], *words(4, 22)), words(5, 20)])
    (prefill,) = take_in(decoder, rows, 4 * CHUNK)
    assert [row.reused for row in rows] == [96, 32, 0]
    assert prefill.wanted(CHUNK) == 0
    finish(decoder, rows)


def test_another_draft_that_has_kept_nothing_reads_the_whole_alone() -> None:
    """What the target knows of these is more than a chunk, and the new draft is to read all of it."""
    decoder = house(PrefixCache(2**24))
    system = words(1, 64)
    read(decoder, [(*system, 5)])
    assert read(decoder, [(*system, *words(i, 10)) for i in range(3)]) == [[74] * 3]
    decoder.switch(bare(relative(tiny_llama(0), 2, 0.2)))
    assert read(decoder, [(*system, *words(i, 11)) for i in range(3)])[0] == [75]


class Alone(nn.Module):
    """A draft that fails over more than one row."""

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


def test_a_draft_that_fails_over_several_costs_speed_only() -> None:
    decoder = house()
    decoder.switch(bare(Alone(relative(tiny_llama(0), 1, 0.2))))
    assert read(decoder, [words(1, 20)]) == [[20]] and not decoder.failed
    assert read(decoder, [words(i, 20 + i) for i in range(3)]) == [[20, 21, 22]] and decoder.failed
