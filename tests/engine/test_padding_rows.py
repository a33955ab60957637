"""Padding rows fill a batch up to a size that comes again: they change no answer, teach nothing, and give their place up."""

import random
from collections.abc import Generator

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.llama import Model

from service.core import FinishReason, Prompt, Sampling
from service.engine import device
from service.engine.acceptance import Acceptance
from service.engine.adapters import bare
from service.engine.decoder import Decoder
from service.engine.drafters.model import ModelDrafter
from service.engine.kv.cache import RowCache
from service.engine.kv.prefix import PrefixCache
from service.engine.replay import Replay
from service.engine.request import PADDING_TEXT, Request
from service.engine.rounds import Plan, Step
from service.engine.strategy import CUDA, METAL, Strategy, using
from service.engine.target import Target
from tests.support.batches import admit, serve
from tests.support.families import RECURRENT, build
from tests.support.fixed_length import FixedLength, fix_length
from tests.support.oracle import forced
from tests.support.pages import assert_given_back, numbers_of, pages_of

V, K = 97, 4


@pytest.fixture(autouse=True)
def on_cuda() -> Generator[None]:
    with using(CUDA):
        yield


def prompts(count: int, seed: int = 0) -> list[Prompt]:
    """Of unlike lengths, greedy and seeded, some without drafts."""
    rng = random.Random(seed)
    return [
        Prompt(
            tuple(rng.randrange(4, V) for _ in range(rng.randint(1, 40))),
            Sampling(max_tokens=rng.randint(1, 40), temperature=0.8 * (i % 2), seed=i),
            num_draft_tokens=rng.choice([None, None, None, 0, 2]),
        )
        for i in range(count)
    ]


def requests(count: int, tokens: int) -> list[Request]:
    return [
        Request(str(i), Prompt(tuple(range(4 + i, 20 + 2 * i)), Sampling(max_tokens=tokens)), frozenset(), None)
        for i in range(count)
    ]


@pytest.mark.parametrize("k", [0, K])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.nightly)])
def test_texts_are_those_of_the_target_alone(
    target: Model, draft: nn.Module, k: int, adaptive: bool, times: int
) -> None:
    sizes: set[int] = set()

    def between(decoder: Decoder) -> None:
        rows = len(decoder.batch.rows)
        sizes.add(rows)
        assert rows == CUDA.batch_size(rows) >= len(decoder.rows) == sum(not row.padding for row in decoder.batch.rows)

    for seed in range(times):
        asked = prompts(14, seed)
        drafting = bare(draft) if k else None
        decoder = Decoder(target, drafting, vocabulary=V, k=k, adaptive=adaptive, lookup=K * adaptive, collect=True)
        rows = serve(decoder, asked, max_rows=7, seed=seed, between=between)
        for row, prompt in zip(rows, asked, strict=True):
            assert row.output == forced(target, prompt.tokens, row.output, prompt.sampling)
        assert_given_back(decoder)
    assert sizes == {1, 4, 8}


def test_a_request_takes_the_place_of_padding_and_a_batch_that_empties_becomes_smaller(
    target: Model, draft: nn.Module
) -> None:
    decoder, rows = Decoder(target, bare(draft), vocabulary=V, k=K), requests(6, 60)
    for row in rows[:3]:
        decoder.admit(row)
    assert [row.padding for row in decoder.batch.rows] == [False, False, False, True]
    pages = pages_of(decoder.batch.cache)
    shapes = [pages.table.shape, *(array.shape for array in pages.buffers())]
    decoder.admit(rows[3])
    assert decoder.batch.rows == rows[:4]
    assert [pages.table.shape, *(array.shape for array in pages.buffers())] == shapes
    decoder.admit(rows[4])
    assert len(decoder.batch.rows) == 8
    rows[1].finish = FinishReason.CANCELLED
    decoder.leave([rows[1]])
    assert decoder.rows == [rows[i] for i in (0, 4, 2, 3)], "the last one moves"
    assert decoder.batch.rows == decoder.rows and pages.table.shape[0] == 4
    rows[0].finish = FinishReason.CANCELLED
    decoder.leave([rows[0]])
    decoder.admit(rows[5])
    assert decoder.batch.rows == [rows[i] for i in (5, 4, 2, 3)]
    while decoder.unfinished:
        decoder.round()
    for row in rows[2:]:
        assert (
            row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling) and len(row.output) == 60
        )
    assert [array.shape for array in pages.buffers()] == shapes[1:], "whoever comes or goes"
    assert_given_back(decoder)


def test_what_was_accepted_is_learnt_where_there_is_padding(target: Model, draft: nn.Module) -> None:
    rows, decoder = requests(3, 40), Decoder(target, bare(draft), vocabulary=V, k=K, adaptive=True)
    fix_length(decoder, FixedLength(K))
    for row in rows:
        decoder.admit(row)
    padding = decoder.batch.rows[3].acceptance
    while decoder.unfinished:
        decoder.round()
    fresh = Acceptance(K).rates()
    assert all(row.acceptance.rates() != fresh for row in rows) and padding.rates() == fresh


def test_a_request_that_ends_holds_up_no_other(
    target: Model, draft: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It becomes padding while the next round is under way; only a smaller batch is launched anew."""
    decoder, fresh = Decoder(target, bare(draft), vocabulary=V, k=K, prefix=PrefixCache(2**24)), list[int]()
    launch = decoder.runner.launch

    def noted(plan: Plan) -> Step:
        fresh.append(len(plan.rows))
        return launch(plan)

    monkeypatch.setattr(decoder.runner, "launch", noted)
    rows = [row for i in range(8) for row in requests(8, 6 + 15 * i)[i : i + 1]]
    for row in rows:
        decoder.admit(row)
    fresh.clear()
    while decoder.unfinished:
        decoder.round()
    assert fresh == [8, 4, 1]
    for i, row in enumerate(rows):
        assert len(row.output) == 6 + 15 * i and sum(each.emitted for each in row.rounds) == len(row.output)
        assert row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling)


def test_padding_does_not_grow_on_the_device(target: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls would see more and more."""
    decoder, ends = Decoder(target, bare(target), vocabulary=V, k=K), list[list[int]]()
    launch_after = decoder.runner.launch_after

    def noted(step: Step, plan: Plan) -> Step:
        after = launch_after(step, plan)
        assert isinstance(after, Step) and after.arrays.ends is not None
        ends.append(np.array(after.arrays.ends).tolist())
        return after

    monkeypatch.setattr(decoder.runner, "launch_after", noted)
    for row in requests(3, 60):
        decoder.admit(row)
    while decoder.unfinished:
        decoder.round()
    assert len(ends) > 5 and max(each[0] for each in ends) > 50
    assert {each[3] for each in ends} == {len(PADDING_TEXT) - 1}


def test_a_row_that_became_padding_is_as_long_as_padding(target: Model, draft: nn.Module) -> None:
    """In the draft's cache too: it would have to read what the request's row had held."""
    decoder, rows = Decoder(target, bare(draft), vocabulary=V, k=K), requests(3, 60)
    rows[1].prompt = Prompt(rows[1].prompt.tokens, Sampling(max_tokens=20))
    for row in rows:
        decoder.admit(row)
    while rows[1].finish is None or len(decoder.rows) > 2:
        decoder.round()
    for _ in range(3):
        for cache in (decoder.batch.cache, decoder.batch.drafter.cache):  # pyright: ignore[reportOptionalMemberAccess]
            lengths = [cache.lengths.host[i] for i, row in enumerate(decoder.batch.rows) if row.padding]
            assert len(lengths) == 2 and max(lengths) < len(PADDING_TEXT)
        decoder.round()


@pytest.mark.parametrize("end", [pytest.param(46, marks=pytest.mark.nightly), 47, 48])
def test_a_row_that_ends_inside_a_proposal_writes_nothing_into_others(target: Model, end: int) -> None:
    """The device took the whole proposal, and goes on from there in the round that is under way when the end is seen."""
    decoder = Decoder(target, bare(target), vocabulary=V, k=K)
    texts = [
        tuple(4 + (7 * i) % 90 for i in range(200)),
        *(tuple(4 + (i * j) % 90 for i in range(10 + j)) for j in (1, 2)),
    ]
    prompts = [Prompt(text, Sampling(max_tokens=end if len(text) == 200 else 100)) for text in texts]
    rows = [Request(str(i), prompt, frozenset(), None) for i, prompt in enumerate(prompts)]
    for row in rows:
        decoder.admit(row)
    while decoder.unfinished:
        decoder.round()
    for row, prompt in zip(rows, prompts, strict=True):
        assert row.output == forced(target, prompt.tokens, row.output, prompt.sampling)


def test_prompts_fit_into_a_call_with_their_padding(target: Model) -> None:
    decoder, rng, batched = Decoder(target, None, vocabulary=V, k=0), random.Random(0), set[int]()
    for _ in range(300):
        size = rng.choice([2, 20, 200])
        texts = [tuple(range(4, 4 + rng.randint(2, size))) for _ in range(rng.randint(1, 20))]
        rows = [Request("", Prompt(text, Sampling(max_tokens=1)), frozenset(), None) for text in texts]
        room = rng.choice([1, 2, 4]) * max(size, 16)
        prefill = decoder.batch_prompts([decoder.start_prefill(row) for row in rows], room)
        assert prefill.next_call_tokens(decoder.prefill_chunk) <= room, "it would wait for ever"
        batched.add(len(prefill.rows))
    assert batched >= {1, 2, 3, 4, 5}


def test_padding_that_the_draft_cannot_read_is_emptied(target: Model, draft: nn.Module) -> None:
    decoder, behind = Decoder(target, bare(draft), vocabulary=V, k=K), 0
    for row in requests(3, 60):
        decoder.admit(row)
    assert decoder.batch.drafter is not None
    keys, _ = decoder.batch.drafter.pool.layers[0]
    assert keys is not None
    keys[0, :, 0:1] = float("nan")
    for _ in range(8):
        decoder.round()
        behind += decoder._step is not None and decoder._step.follows  # pyright: ignore[reportPrivateUsage]
    assert behind >= 5, "page 0 was not emptied"


def test_drafts_with_recurrent_layers_get_no_padding(target: Model) -> None:
    recurrent = build("lfm2", RECURRENT["lfm2"])
    decoder, asked = Decoder(target, bare(recurrent), vocabulary=V, k=K), prompts(8)
    rows = serve(decoder, asked, max_rows=5)
    assert decoder.draft_failures == 0 and max(len(row.rounds) for row in rows) > 5
    for row, prompt in zip(rows, asked, strict=True):
        assert row.output == forced(target, prompt.tokens, row.output, prompt.sampling)


def test_rows_that_want_no_drafts_get_none_though_padding_would_take_them(
    target: Model, draft: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelDrafter, "propose", lambda *arguments: pytest.fail("nothing is to be proposed"))
    decoder, rows = Decoder(target, bare(draft), vocabulary=V, k=K), requests(3, 8)
    for row in rows:
        row.prompt = Prompt(row.prompt.tokens, row.prompt.sampling, num_draft_tokens=0)
        decoder.admit(row)
    while decoder.unfinished:
        decoder.round()
    assert decoder.draft_failures == 0 and all(len(row.output) == 8 for row in rows)


def test_after_one_turn_nothing_is_traced_any_more(target: Model, draft: nn.Module, traces: list[Replay]) -> None:
    before = 0
    decoder = Decoder(target, bare(draft), vocabulary=V, k=K)
    for turn in range(3):
        rng = random.Random(turn)
        asked = [
            Prompt(
                tuple(rng.randrange(4, V) for _ in range(rng.randint(2, 60))), Sampling(max_tokens=rng.randint(20, 60))
            )
            for _ in range(12)
        ]
        serve(decoder, asked, max_rows=8, seed=turn)
        most = before if turn else 8
        assert len(traces) <= most, "one batch size after another, draft and target"
        before = len(traces)


def test_rows_that_join_keep_their_pages(target: Model, draft: nn.Module) -> None:
    """Of target and draft: nothing is copied, nothing launched."""
    decoder = Decoder(target, bare(draft), vocabulary=V, k=K)
    for slot, row in enumerate(requests(2, 20)):
        prefill = decoder.start_prefill(row)
        assert decoder.prefill(prefill)
        assert decoder.batch.drafter is not None and prefill.draft_cache is not None
        before = [numbers_of(cache, 0) for cache in (prefill.target_cache, prefill.draft_cache)]
        with device.counting() as counts:
            decoder.join([prefill])
        assert (counts.launches, counts.waits) == (0, 0)
        assert before == [numbers_of(cache, slot) for cache in (decoder.batch.cache, decoder.batch.drafter.cache)]


@pytest.mark.parametrize(("strategy", "waits"), [(CUDA, 0), (METAL, 1)], ids=["CUDA", "METAL"])
def test_what_leaves_is_waited_for_where_the_next_write_would_copy_it(
    target: Model, strategy: Strategy, waits: int
) -> None:
    with using(strategy):
        decoder = Decoder(target, None, vocabulary=V, k=0, prefix=PrefixCache(2**24))
        for row in requests(3, 100):
            decoder.admit(row)
        for _ in range(20):
            decoder.round()
        decoder.leave([])
        with device.counting() as counts:
            decoder.leave(decoder.rows[-1:])
    assert counts.waits == waits and len(decoder.rows) == 2


def test_prompts_are_prefilled_in_calls_of_few_shapes(
    target: Model, draft: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: set[tuple[int, ...]] = set()
    call = Target.__call__

    def recorded(self: Target, tokens: mx.array, cache: RowCache) -> mx.array:
        shapes.add(tokens.shape)
        return call(self, tokens, cache)

    monkeypatch.setattr(Target, "__call__", recorded)
    decoder = Decoder(target, bare(draft), vocabulary=V, k=K, prefix=PrefixCache(2**24))
    rng = random.Random(0)
    for _ in range(8):
        rows = [Request("", each, frozenset(), None) for each in prompts(rng.randint(1, 7), rng.randint(0, 99))]
        admit(decoder, rows, room=512)
        while decoder.unfinished:
            decoder.round()
        for row in rows:
            assert row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling)
    assert {rows for rows, _ in shapes} == {1, 4, 8}
    assert {width for _, width in shapes} <= {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48}
