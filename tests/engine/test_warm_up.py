"""Rounds before the first request: what they prepare, and that nothing is left of them."""

from collections.abc import Generator

import mlx.nn as nn
import pytest
from mlx_lm.models.llama import Model

from service.core import Prompt, Sampling
from service.engine.adapters import bare
from service.engine.decoder import Decoder
from service.engine.kv.prefix import PrefixCache
from service.engine.replay import Replay
from service.engine.strategy import CUDA, using
from tests.support.batches import serve
from tests.support.families import RECURRENT, build
from tests.support.fixed_length import FixedLength, fix_length
from tests.support.oracle import naive

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


@pytest.mark.parametrize(("rows", "length"), [(1, 0), (1, 1), (1, 2), (1, 3), (4, 0), (4, 2), (4, 3)])
def test_the_first_requests_trace_nothing(
    warm: Decoder, target: Model, traces: list[Replay], rows: int, length: int
) -> None:
    fix_length(warm, FixedLength(length))
    asked = [Prompt(tuple(range(4 + i, 40 + 5 * i)), Sampling(max_tokens=40)) for i in range(rows)]
    done = serve(warm, asked, max_rows=rows)
    assert traces == []
    assert [row.output for row in done] == [naive(target, each.tokens, each.sampling) for each in asked]


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
    assert "rounds of 6 kinds" in caplog.text
