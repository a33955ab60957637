"""Rounds before the first request: what they prepare, and that nothing is left of them."""

from collections.abc import Generator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.llama import Model

from service.core import Prompt, Sampling
from service.engine.adapters import bare
from service.engine.attention import MOST
from service.engine.decoder import Decoder
from service.engine.kv.cache import RowCache
from service.engine.kv.paged_layer import PagedLayer
from service.engine.kv.prefix import PrefixCache
from service.engine.replay import Replay
from service.engine.request import Request
from service.engine.strategy import CUDA, using
from service.engine.target import Target
from service.engine.warm_up import LONG_WIDTH, WIDTHS
from tests.support.batches import serve
from tests.support.families import RECURRENT, build
from tests.support.fixed_length import FixedLength, fix_length
from tests.support.oracle import forced

V, K = 97, 3


@pytest.fixture(autouse=True)
def on_cuda() -> Generator[None]:
    with using(CUDA):
        yield


@pytest.fixture
def warm(target: Model, draft: nn.Module) -> Decoder:
    decoder = Decoder(target, bare(draft), vocabulary=V, k=K, adaptive=True, lookup=8, prefix=PrefixCache(2**24))
    decoder.profile(4)
    return decoder


@pytest.mark.parametrize(
    ("rows", "length"),
    [
        (1, 0),
        (4, 3),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((1, 1), (1, 2), (1, 3), (4, 0), (4, 2))),
    ],
)
def test_the_first_requests_trace_nothing(
    warm: Decoder, target: Model, traces: list[Replay], rows: int, length: int
) -> None:
    fix_length(warm, FixedLength(length))
    asked = [Prompt(tuple(range(4 + i, 40 + 5 * i)), Sampling(max_tokens=40)) for i in range(rows)]
    done = serve(warm, asked, max_rows=rows)
    assert traces == []
    assert all(row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling) for row in done)


def test_a_draft_that_was_parked_traces_nothing(warm: Decoder, traces: list[Replay]) -> None:
    """It first reads what it has missed."""
    warm.planner = FixedLength(0)
    warm.admit(Request("", Prompt(tuple(range(4, 50)), Sampling(max_tokens=60)), frozenset(), None))
    for _ in range(5):
        warm.round()
    warm.planner = FixedLength(2)
    while warm.unfinished:
        warm.round()
    assert traces == []


@pytest.mark.parametrize(
    ("drafted", "rows"),
    [(0, 4), (K, 1), (K, 4), pytest.param(0, 1, marks=pytest.mark.nightly)],
)
def test_a_fixed_length_traces_nothing_either(
    target: Model, draft: nn.Module, traces: list[Replay], drafted: int, rows: int
) -> None:
    decoder = Decoder(target, bare(draft) if drafted else None, vocabulary=V, k=drafted)
    decoder.profile(4)
    assert traces
    traces.clear()
    serve(decoder, [Prompt(tuple(range(4 + i, 40)), Sampling(max_tokens=20)) for i in range(rows)], max_rows=rows)
    assert traces == []


@pytest.mark.parametrize(
    ("context", "longest"),
    [
        pytest.param(None, set[int](), marks=pytest.mark.nightly),
        pytest.param(LONG_WIDTH, set[int](), marks=pytest.mark.nightly),
        (4096, {CUDA.width(LONG_WIDTH)}),
    ],
    ids=["any", "short", "long"],
)
def test_prompts_of_several_widths_are_prefilled_together(
    target: Model, draft: nn.Module, context: int | None, longest: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: set[tuple[int, ...]] = set()
    call = Target.__call__

    def recorded(self: Target, tokens: mx.array, cache: RowCache) -> mx.array:
        shapes.add(tokens.shape)
        return call(self, tokens, cache)

    monkeypatch.setattr(Target, "__call__", recorded)
    Decoder(target, bare(draft), vocabulary=V, k=K, adaptive=True).profile(8, context)
    assert {rows for rows, _ in shapes} == {1, 4, 8}
    assert {width for _, width in shapes} == {*WIDTHS, *longest}


@pytest.mark.parametrize("context", [pytest.param(2 * LONG_WIDTH, marks=pytest.mark.nightly), 4096])
def test_target_and_draft_prefill_under_a_mask(
    target: Model, draft: nn.Module, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That MLX attends: rows that have come unequally far, and more tokens than the kernel takes."""
    masked: dict[int, object] = {}
    make_mask = PagedLayer.make_mask

    def recorded(self: PagedLayer, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        mask = make_mask(self, N, return_array, window_size)
        if N > MOST and isinstance(mask, mx.array):
            masked[id(self.lengths)] = self.lengths
        return mask

    monkeypatch.setattr(PagedLayer, "make_mask", recorded)
    Decoder(target, bare(draft), vocabulary=V, k=K, adaptive=True).profile(4, context)
    assert len(masked) == (2 if context > 2 * LONG_WIDTH else 0)


def test_a_draft_that_fails_in_it_is_tried_again(target: Model, draft: nn.Module) -> None:
    class Failing(nn.Module):
        """Raises over several rows."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = draft

        @property
        def layers(self) -> Any:
            return draft.layers

        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            if tokens.shape[0] > 1 and tokens.shape[1] > 1:
                raise RuntimeError("no memory")
            return self.inner(tokens, cache=cache)

    decoder = Decoder(target, bare(Failing()), vocabulary=V, k=K)
    decoder.profile(4)
    assert (decoder.draft_failures, decoder.batch.failed) == (0, False)
    (row,) = serve(decoder, [Prompt(tuple(range(4, 30)), Sampling(max_tokens=20))])
    assert sum(each.drafted for each in row.rounds) > 0 and decoder.draft_failures == 0


def test_nothing_is_left_of_them(warm: Decoder) -> None:
    assert not warm.unfinished and warm.batch.cache.lengths.host == []
    assert warm.batch.prefix is not None and warm.batch.prefix.nbytes == 0
    assert (warm.draft_length, warm.adaptive, warm.draft_failures) == (K, True, 0)
    assert warm.planner is not None and warm.planner._draft.rates() == type(warm.planner._draft)(K).rates()
    assert warm.lookup is not None and warm.lookup._newer_tokens == 0


def test_a_recurrent_model_has_no_more_sizes_than_others(caplog: pytest.LogCaptureFixture) -> None:
    """Its batches have no padding, and so any number of rows."""
    decoder = Decoder(build("lfm2", RECURRENT["lfm2"]), None, vocabulary=V, k=0, adaptive=True, lookup=8)
    with caplog.at_level("INFO", logger="service.engine.warm_up"):
        decoder.profile(16)
    # Over 1, 4, 8 and 16 rows, and over one two that are not greedy.
    assert "warmed up 6 kinds of rounds" in caplog.text
