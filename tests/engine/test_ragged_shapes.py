"""Batches whose shapes change every round: on CUDA each may need a graph that MLX has not cached. None may end the process."""

import mlx.core as mx
import pytest

from service.engine.request import Request
from tests.support.oracle import forced
from tests.support.ragged_rounds import ragged_rounds, tiny_pair


def test_rounds_of_ever_changing_shapes() -> None:
    target, draft = tiny_pair(2, 32, 97, mx.float32)
    finished: list[Request] = []
    found = ragged_rounds(target, draft, vocabulary=97, rounds=60, max_rows=5, longest=64, on_finished=finished.append)
    assert found.rounds >= 60 and found.shapes > 0.9 * found.rounds
    assert len(finished) == found.requests
    checked = [row for row in finished if row.prompt.sampling.greedy or row.prompt.sampling.seed is not None]
    assert len(checked) > 10
    if mx.default_device().type == mx.cpu:
        for row in checked[:12]:
            assert row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling)


@pytest.mark.nightly
@pytest.mark.skipif(mx.default_device().type == mx.cpu, reason="only an accelerator's back end caches graphs")
def test_five_thousand_rounds_on_an_accelerator() -> None:
    target, draft = tiny_pair(8, 256, 1000, mx.bfloat16)
    found = ragged_rounds(target, draft, vocabulary=1000, rounds=5000, max_rows=16)
    assert found.rounds >= 5000 and found.shapes > 4000
