"""`eval poison` at toy size."""

from itertools import islice
from pathlib import Path

import pytest

from service.core import BadRequest
from service.evaluation.poison import run_poison
from service.settings import Settings
from tests.support.tiny_server import prompts


@pytest.mark.nightly
@pytest.mark.parametrize(("requests", "attacks"), [(60, 1), (240, 3)])
@pytest.mark.promise(31)
def test_hostile_traffic_goes_through_the_loop(
    quick: Settings, models: tuple[Path, Path], requests: int, attacks: int
) -> None:
    honest, test = list(prompts(requests // 5, 1)), list(prompts(20, 3))
    found = list(islice(run_poison(quick, models, None, honest, test, requests=requests, max_tokens=16), attacks))
    assert [one.attack for one in found] == ["random tokens", "repeated strings", "both, from one client"][:attacks]
    for one in found:
        assert one.requests >= requests - 5 and len(one.history.tokens) == one.requests
        assert len(one.candidates) == len(one.history.runs) > 0
        if not any(run.promoted for run in one.history.runs):
            assert one.serving == one.bare
        assert 0 < one.bare[0] < 1 and 0 < one.bare[1] <= 1
    with pytest.raises(BadRequest, match="fewer"):
        next(run_poison(quick, models, None, honest, test, requests=10 * requests))
