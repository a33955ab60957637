"""The prefix cache: outputs stay the target's own, cached blocks equal a fresh prefill, and the budget holds."""

import gc
import random
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mlx_lm.models.llama import Model

from service.core import Prompt, Sampling
from service.engine import device
from service.engine.adapters import Draft, bare
from service.engine.decoder import Decoder
from service.engine.kv.cache import RowCache
from service.engine.kv.prefix import BLOCK, Owner, PrefixCache
from service.engine.kv.rectangle_layer import RectangleLayer
from service.engine.request import Request
from service.engine.strategy import CPU, using
from tests.support.batches import serve
from tests.support.cuda import IN_PAGES
from tests.support.oracle import forced, noisy_copy, tied, tiny_llama
from tests.support.typed import layers_of

VOCABULARY, CHUNK, K = 97, 16, 3
EOS = frozenset({3})
BLOCK_BYTES = BLOCK * 2 * 2 * 2 * 8 * 4
"""Of the tiny pair: positions, layers, keys and values, heads, dims, float32."""
SEEDED = {"temperature": 0.9, "top_p": 0.9, "seed": 5}
RECTANGLES = pytest.mark.parametrize("way", [CPU], indirect=True, ids=["rectangles"])


@pytest.fixture(params=[CPU, IN_PAGES], ids=["rectangles", "pages"], autouse=True)
def way(request: pytest.FixtureRequest) -> Generator[None]:
    """Blocks are copies, or the rows' own pages."""
    with using(request.param):
        yield


@cache
def target() -> Model:
    return tiny_llama(0)


@cache
def draft(version: int) -> Draft:
    """0 is right some of the time, later ones less and less."""
    return Draft(version, noisy_copy(target(), version + 1, 0.2 * (version + 1)))


def make_decoder(budget: int = 2**24, draft_: Draft | None = None, model: nn.Module | None = None) -> Decoder:
    return Decoder(
        model or target(),
        draft_ or draft(0),
        vocabulary=VOCABULARY,
        k=K,
        prefill_chunk=CHUNK,
        prefix=PrefixCache(budget),
    )


def random_tokens(number: int, count: int) -> tuple[int, ...]:
    rng = random.Random(number)
    return tuple(rng.randrange(4, VOCABULARY) for _ in range(count))


def request(tokens: Sequence[int], answer: int = 12, store: bool = True, **sampling: Any) -> Prompt:
    return Prompt(tuple(tokens), Sampling(max_tokens=answer, **sampling), store=store)


def answer(decoder: Decoder, prompt: Prompt) -> Request:
    (row,) = serve(decoder, [prompt], eos=EOS)
    assert_own(row)
    return row


def assert_own(row: Request) -> None:
    """The row's output is the target's own; that of a cancelled row is a prefix of it. Behind a tie of the target's scores it
    may be another."""
    prompt, output, sampling = row.prompt.tokens, row.output, row.prompt.sampling
    expected = forced(target(), prompt, output, sampling, EOS)
    expected = expected if row.finish else expected[: row.emitted]
    unlike = [i for i, (token, own) in enumerate(zip(output, expected, strict=False)) if token != own]
    if unlike and tied(
        target(), [*prompt, *output[: unlike[0]]], unlike[0], sampling, [output[unlike[0]], expected[unlike[0]]]
    ):
        return
    assert output == expected


def whole(count: int) -> int:
    return count // BLOCK * BLOCK


def cached_length(decoder: Decoder, owner: Owner, tokens: Sequence[int]) -> int:
    """How many of `tokens` are cached; their keys and values must equal those of a fresh prefill."""
    assert decoder.batch.prefix is not None and decoder.batch.drafter is not None
    model = decoder.batch.target.model if owner is Owner.TARGET else decoder.batch.drafter.draft.model
    cached = decoder.batch.target.cache(1) if owner is Owner.TARGET else decoder.batch.drafter.new_cache(1)
    read = RowCache(model, 1)
    decoder.batch.prefix.load(owner, [tokens], cached)
    count = cached.lengths.host[0]
    assert count == decoder.batch.prefix.cached_length(owner, tokens)
    if count:
        for start in range(0, count, BLOCK):
            model(mx.array([tokens[start : start + BLOCK]]), cache=read.layers)
            read.commit(BLOCK)
        assert len(read.contents(0)) == len(read.attention)
        for both in zip(cached.contents(0), read.contents(0), strict=True):
            for mine, theirs in zip(*both, strict=True):
                assert mine is not None and theirs is not None and mine.shape[1] == count
                assert mx.allclose(mine, theirs, atol=1e-4)
    return count


def assert_fits(decoder: Decoder) -> None:
    prefix = decoder.batch.prefix
    assert prefix is not None
    held = sum(node.block.nbytes for node in prefix.nodes if node.block is not None)
    assert prefix.nbytes == held == sum(node.nbytes for node in prefix.nodes) <= prefix.budget
    assert all(node.parent is not None and node.parent.children[node.tokens] is node for node in prefix.nodes)


# --------------------------------------------------------------------------------------------------------------- hits


@pytest.mark.parametrize(
    ("way", "sampling"),
    [
        pytest.param(CPU, {}, id="rectangles-greedy"),
        pytest.param(CPU, SEEDED, id="rectangles-seeded", marks=pytest.mark.nightly),
        pytest.param(IN_PAGES, {}, id="pages-greedy", marks=pytest.mark.nightly),
        pytest.param(IN_PAGES, SEEDED, id="pages-seeded"),
    ],
    indirect=["way"],
)
def test_a_growing_chat_is_prefilled_once(sampling: dict[str, Any]) -> None:
    decoder = make_decoder()
    tokens = random_tokens(1, 20)
    verified = reused = 0
    for turn in range(5):
        row = answer(decoder, request(tokens, answer=24, **sampling))
        assert row.cached_tokens == whole(min(verified, len(tokens) - 1))
        verified, reused = len(row.tokens) - 1, row.cached_tokens
        tokens = (*row.tokens, *random_tokens(10 + turn, 7))
    assert reused > 100
    assert len(decoder.batch.prefix.nodes) == 2 * (verified // BLOCK)  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 34, 64, 65, 66])
def test_the_same_prompt_again(length: int) -> None:
    """The last token of a prompt is always computed, because its logits are needed."""
    decoder = make_decoder()
    first, again = (answer(decoder, request(random_tokens(length, length), answer=4)) for _ in range(2))
    assert (first.cached_tokens, again.cached_tokens) == (0, whole(length - 1))


def test_a_shared_prefix_is_stored_once_and_hit_by_all() -> None:
    decoder = make_decoder()
    system = random_tokens(1, 100)
    rows = serve(decoder, [request((*system, *random_tokens(i, 1 + 5 * i)), answer=1) for i in range(2, 9)], seed=1)
    for row in rows:
        assert_own(row)
    assert [row.cached_tokens for row in rows] == [0] + [96] * 6
    tails = sum((len(row.tokens) - 1 - 96) // BLOCK for row in rows)
    assert len({node.tokens for node in decoder.batch.prefix.nodes}) == 3 + tails  # pyright: ignore[reportOptionalMemberAccess]


def test_concurrent_requests_do_not_prefill_a_shared_prefix_twice() -> None:
    decoder = make_decoder()
    system = random_tokens(1, 70)
    under_way = [decoder.start_prefill(Request(str(i), request((*system, i + 10)), EOS, None)) for i in range(3)]
    for prefill in under_way:
        while not decoder.prefill(prefill):
            pass
        decoder.join([prefill])
    rows = list(decoder.rows)
    while decoder.rows:
        decoder.round()
    assert [row.cached_tokens for row in rows] == [0, 64, 64]
    for row in rows:
        assert_own(row)


def test_requests_of_other_salts_share_nothing() -> None:
    decoder, tokens = make_decoder(), random_tokens(1, 100)
    salted = [replace(request(tokens, answer=4), cache_salt=salt) for salt in ("", "a", "b", "a", "b", "")]
    assert [answer(decoder, each).cached_tokens for each in salted] == [0, 0, 0, 96, 96, 96]
    # Neither do those that prefill in one batch: the second "a" waits for the first.
    other = random_tokens(2, 100)
    rows = serve(decoder, [replace(request(other, answer=4), cache_salt=salt) for salt in ("a", "b", "a")], seed=1)
    assert sorted(row.cached_tokens for row in rows) == [0, 0, 96]
    assert_fits(decoder)
    prefix = decoder.batch.prefix
    assert prefix is not None
    prefix.forget()
    assert not prefix.nodes and prefix.nbytes == 0


def test_one_different_token_ends_the_match() -> None:
    decoder = make_decoder()
    tokens = random_tokens(1, 100)
    answer(decoder, request(tokens))
    for at in (0, 31, 32, 63, 64, 95, 96):
        other = list(tokens)
        other[at] = 4 if tokens[at] != 4 else 5
        assert answer(decoder, request(other, answer=4, store=False)).cached_tokens == whole(at)


# ------------------------------------------------------------------------------------------------------ cached blocks


def test_only_verified_tokens_are_cached() -> None:
    """With mostly rejected drafts, for rows of different lengths that end in the middle of a round."""
    decoder = make_decoder(draft_=draft(3))
    rows = serve(decoder, [request(random_tokens(i, 9 + 11 * i), answer=40 + i) for i in range(6)], eos=EOS, seed=2)
    rounds = [round for row in rows for round in row.rounds]
    assert 0 < sum(r.accepted for r in rounds) < sum(r.drafted for r in rounds) / 2
    for row in rows:
        assert cached_length(decoder, Owner.TARGET, row.tokens) == whole(len(row.tokens) - 1)
        assert cached_length(decoder, Owner.DRAFT, row.tokens) >= whole(len(row.tokens) - 2)


def test_requests_that_may_not_be_stored_can_hit_but_not_add() -> None:
    decoder = make_decoder()
    tokens = random_tokens(1, 80)
    assert answer(decoder, request(tokens, store=False)).cached_tokens == 0
    assert decoder.batch.prefix is not None and decoder.batch.prefix.nodes == ()
    answer(decoder, request(tokens))
    before = decoder.batch.prefix.nodes
    assert answer(decoder, request((*tokens, *random_tokens(2, 60)), store=False)).cached_tokens == 64
    assert set(decoder.batch.prefix.nodes) == set(before)


def test_the_output_of_a_cancelled_request_is_cached() -> None:
    decoder = make_decoder()
    row = Request("0", request(random_tokens(7, 40), answer=64), frozenset(), None)
    decoder.admit(row)
    while row.emitted < 30:
        decoder.round()
    decoder.leave([row])
    assert cached_length(decoder, Owner.TARGET, row.tokens) == whole(len(row.tokens) - 1) == 64


class RecordingDraft(nn.Module):
    """A draft that records the tokens per call, and fails if `fails` is set."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.fed, self.fails = inner, list[int](), ""

    def __call__(self, tokens: mx.array, cache: list[object] | None = None) -> mx.array:
        self.fed.append(tokens.shape[1])
        if self.fails == "raises":
            raise RuntimeError("broken draft")
        logits = self.inner(tokens, cache=cache)
        return logits * float("nan") if self.fails == "nan" else logits

    @property
    def layers(self) -> list[nn.Module]:
        return layers_of(self.inner)


def test_a_swap_keeps_the_targets_blocks_and_prefills_the_drafts_in_chunks() -> None:
    decoder, tokens = make_decoder(), random_tokens(1, 150)
    answer(decoder, request(tokens))
    new = RecordingDraft(draft(1).model)
    decoder.switch(Draft(1, new))
    assert cached_length(decoder, Owner.DRAFT, tokens) == 0
    row = answer(decoder, request(tokens))
    assert row.cached_tokens == 128
    assert sum(new.fed[:10]) == 149 and max(new.fed) == CHUNK
    assert cached_length(decoder, Owner.DRAFT, row.tokens) >= whole(len(row.tokens) - 2)
    new.fed.clear()
    answer(decoder, request(tokens))
    assert sum(new.fed[:2]) == 149 - 128


def test_rows_running_at_a_swap_cache_no_mixed_draft_blocks() -> None:
    """One row is decoding, one in prefill; the new draft alone prefills the latter."""
    decoder = make_decoder()
    running, reading = (Request(str(i), request(random_tokens(i, 100), answer=45), frozenset(), None) for i in range(2))
    decoder.admit(running)
    prefill = decoder.start_prefill(reading)
    for _ in range(3):
        decoder.prefill(prefill)
        decoder.round()
    decoder.switch(draft(2))
    while not decoder.prefill(prefill):
        decoder.round()
    decoder.join([prefill])
    while decoder.rows:
        decoder.round()
    assert cached_length(decoder, Owner.DRAFT, running.tokens) == 0
    assert cached_length(decoder, Owner.TARGET, running.tokens) == whole(len(running.tokens) - 1)
    assert cached_length(decoder, Owner.DRAFT, reading.tokens) >= whole(len(reading.tokens) - 2)


@pytest.mark.parametrize(
    ("way", "when", "how"),
    [
        pytest.param(way, when, how, id=f"{name}-{when}-{how}", marks=() if (i + j + k) % 2 else pytest.mark.nightly)
        for i, (way, name) in enumerate([(CPU, "rectangles"), (IN_PAGES, "pages")])
        for j, when in enumerate(["between requests", "while a prompt is read", "while decoding"])
        for k, how in enumerate(["raises", "nan"])
    ],
    indirect=["way"],
)
def test_blocks_of_a_failed_draft_are_discarded(how: str, when: str) -> None:
    weak = RecordingDraft(draft(0).model)
    decoder, tokens = make_decoder(draft_=bare(weak)), random_tokens(1, 100)
    answer(decoder, request(tokens))
    if when == "between requests":
        weak.fails = how
        answer(decoder, request((*tokens, *random_tokens(2, 50))))
    else:
        row = Request("0", request((*tokens, *random_tokens(2, 50))), EOS, None)
        prefill = decoder.start_prefill(row)
        decoder.prefill(prefill)
        weak.fails = how if when == "while a prompt is read" else ""
        while not decoder.prefill(prefill):
            pass
        decoder.join([prefill])
        decoder.round()
        weak.fails = how
        while decoder.rows:
            decoder.round()
        assert_own(row)
    if how == "raises":
        assert decoder.draft_failures == 1 and decoder.batch.failed
        assert cached_length(decoder, Owner.DRAFT, tokens) == 0
    else:
        # Only the logits were not finite: the row went on without the draft, and its keys and values stay valid.
        assert decoder.draft_failures >= 1 and not decoder.batch.failed
        assert cached_length(decoder, Owner.DRAFT, tokens) >= whole(len(tokens) - 2)
    decoder.switch(Draft(1, draft(0).model))
    row = answer(decoder, request((*tokens, *random_tokens(3, 50))))
    assert row.cached_tokens == 96 and any(round.drafted for round in row.rounds)
    assert cached_length(decoder, Owner.DRAFT, row.tokens) >= whole(len(row.tokens) - 2)


# ------------------------------------------------------------------------------------------------------------- budget


def test_the_least_recently_used_is_evicted_first_and_prefixes_last() -> None:
    decoder = make_decoder(budget=6 * BLOCK_BYTES, draft_=draft(0))
    one, two = random_tokens(1, 70), random_tokens(2, 40)
    answer(decoder, request(one, answer=1))
    answer(decoder, request(two, answer=1))
    assert [cached_length(decoder, owner, one) for owner in Owner] == [64, 64]
    assert_fits(decoder)
    answer(decoder, request(random_tokens(3, 40), answer=1))  # evicts `two`, which was used before `one`
    assert [cached_length(decoder, owner, two) for owner in Owner] == [0, 0]
    assert [cached_length(decoder, owner, one) for owner in Owner] == [64, 64]
    answer(
        decoder, request((*one[:32], *random_tokens(4, 40)), answer=1)
    )  # shares the first block of `one` and needs two more
    assert_fits(decoder)
    assert cached_length(decoder, Owner.TARGET, one) >= 32


@pytest.mark.parametrize(
    "budget",
    [
        pytest.param(0, marks=pytest.mark.nightly),
        BLOCK_BYTES - 1,
        pytest.param(BLOCK_BYTES, marks=pytest.mark.nightly),
        5 * BLOCK_BYTES,
    ],
)
def test_a_prompt_longer_than_the_budget_caches_its_first_blocks(budget: int) -> None:
    decoder, tokens = make_decoder(budget), random_tokens(1, 300)
    for _ in range(2):
        answer(decoder, request(tokens))
        assert_fits(decoder)
    cached = [cached_length(decoder, owner, tokens) for owner in Owner]
    assert sum(cached) <= whole(budget // BLOCK_BYTES * BLOCK)
    assert (max(cached) > 0) == (budget >= BLOCK_BYTES)


def written(tokens: Sequence[int], dims: tuple[int, int] = (8, 8)) -> RowCache:
    """The cache of one row with one layer and one head that holds `tokens`, with capacity for many more."""
    held = RowCache(tiny_llama(0, layers=1), 1)
    layer = held.attention[0]
    assert isinstance(layer, RectangleLayer)
    layer.keys, layer.values = (mx.random.normal((1, 1, 4096, n)) for n in dims)
    mx.eval(held.arrays())
    held.rewind([len(tokens)])
    return held


def found(prefix: PrefixCache, tokens: Sequence[int]) -> int:
    """The cached length of `tokens`, without marking the blocks as used."""
    have = {node.tokens for node in prefix.nodes}
    return BLOCK * sum(tuple(tokens[at : at + BLOCK]) in have for at in range(0, len(tokens), BLOCK))


@RECTANGLES
def test_eviction_takes_leaves_and_spares_a_growing_path() -> None:
    one, two, three = random_tokens(1, 4 * BLOCK), random_tokens(2, 2 * BLOCK), random_tokens(3, BLOCK)
    size = 2 * BLOCK * 8 * 4
    prefix = PrefixCache(5 * size)
    for tokens in (one, two):
        prefix.insert(Owner.TARGET, tokens, written(tokens))
        prefix.copy()
    assert (found(prefix, one), found(prefix, two)) == (96, 64)
    for tokens, count in ((one, 96), (two, 64)):
        prefix.load(Owner.TARGET, [tokens], again := written(()))
        assert again.lengths.host == [count]
    longer = (*one, *three)
    prefix.insert(Owner.TARGET, longer, written(longer))
    prefix.copy()
    assert (found(prefix, longer), found(prefix, two)) == (160, 0)
    assert prefix.nbytes == 5 * size


@RECTANGLES
def test_a_text_that_outgrows_the_budget_keeps_its_beginning() -> None:
    tokens, size = random_tokens(1, 6 * BLOCK), 2 * BLOCK * 8 * 4
    prefix = PrefixCache(3 * size)
    for count in (2, 3, 5, 6):
        beginning = tokens[: count * BLOCK]
        prefix.insert(Owner.TARGET, beginning, written(beginning))
        prefix.copy()
        held = min(count, 3)
        assert prefix.cached_length(Owner.TARGET, tokens) == found(prefix, tokens) == held * BLOCK
        assert prefix.nbytes == held * size


@RECTANGLES
def test_copies_are_waited_for_only_where_that_is_asked() -> None:
    prefix = PrefixCache(2**30)
    for wait, launches, waits in ((False, 1, 0), (True, 0, 1)):
        for seed in (1, 2):
            tokens = random_tokens(10 * launches + seed, 2 * BLOCK)
            prefix.insert(Owner.TARGET, tokens, written(tokens))
        with device.counting() as counts:
            prefix.copy(wait=wait)
        assert (counts.launches, counts.waits) == (launches, waits)


@RECTANGLES
@pytest.mark.parametrize("dims", [(256, 256), (256, 128)], ids=["of one shape", "of two shapes"])
def test_a_block_holds_no_other_memory(dims: tuple[int, int]) -> None:
    """One head, whose positions are contiguous in memory: the case in which a copy could be a view."""
    prefix, tokens = PrefixCache(2**30), random_tokens(1, 3 * BLOCK)
    gc.collect()
    empty = mx.get_active_memory()
    prefix.insert(Owner.TARGET, tokens, written(tokens, dims))
    prefix.copy()
    gc.collect()
    assert prefix.nbytes == 3 * BLOCK * sum(dims) * 4
    assert prefix.nbytes <= mx.get_active_memory() - empty <= prefix.nbytes + 32_768
    gc.disable()
    try:
        prefix.clear(Owner.TARGET)
        assert (prefix.nbytes, prefix.nodes) == (0, ()) and mx.get_active_memory() <= empty
    finally:
        gc.enable()


# ----------------------------------------------------------------------------------------------------- everything at once


def test_a_random_history() -> None:
    check_history(seed=2, blocks=12, batch=4, swaps=True, leaving=True)


@pytest.mark.nightly
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10_000),
    blocks=st.sampled_from([0, 1, 4, 12, 40, 1000]),
    batch=st.integers(1, 8),
    swaps=st.booleans(),
    leaving=st.booleans(),
)
@example(seed=1889, blocks=0, batch=1, swaps=False, leaving=False).via("a tie: scores 1.2e-6 apart")
def test_random_histories(seed: int, blocks: int, batch: int, swaps: bool, leaving: bool) -> None:
    check_history(seed, blocks, batch, swaps, leaving)


def check_history(seed: int, blocks: int, batch: int, swaps: bool, leaving: bool) -> None:
    """Batched requests that share prefixes with earlier texts, under swaps, failures and cancellations."""
    rng = random.Random(seed)
    decoder = make_decoder(blocks * BLOCK_BYTES)
    texts: list[tuple[int, ...]] = [random_tokens(seed, 100)]
    everyone: list[Request] = []

    def between(decoder: Decoder) -> None:
        assert_fits(decoder)
        if swaps and rng.random() < 0.1:
            broken = RecordingDraft(draft(1).model)
            broken.fails = rng.choice(["", "raises", "nan"])
            decoder.switch(rng.choice([draft(0), draft(1), Draft(9, broken)]))
        if leaving and rng.random() < 0.1:
            decoder.leave([rng.choice(decoder.rows)])

    for wave in range(3):
        asked: list[Prompt] = []
        for _ in range(6):
            earlier = rng.choice(texts)
            tokens = (*earlier[: rng.randint(0, len(earlier))], *random_tokens(rng.randrange(1000), rng.randint(1, 40)))
            seeded = {"temperature": 0.8, "seed": rng.randrange(1000)} if rng.random() < 0.5 else {}
            asked.append(request(tokens, rng.choice([1, 5, 40]), rng.random() < 0.8, **seeded))
        rows = serve(decoder, asked, eos=EOS, max_rows=batch, seed=seed + wave, between=between)
        texts += [tuple(row.tokens) for row in rows]
        everyone += rows
    for row in everyone:
        assert_own(row)
        for owner in Owner:
            cached_length(decoder, owner, row.tokens)
    assert_fits(decoder)
