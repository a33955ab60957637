"""The benchmark of swaps at toy size: a real server, streams, adapters and recorder."""

from pathlib import Path

import pytest

from service.core import RedraftError
from service.evaluation.bench.swap import run_swap
from service.settings import Settings
from tests.support.published import check_published


@pytest.mark.nightly
def test_swap_measures_gaps_and_recording(settings: Settings, models: tuple[Path, Path], tmp_path: Path) -> None:
    report = run_swap(
        settings,
        models,
        title="2 swaps",
        command="redraft bench swap --swaps 2",
        clients=2,
        swaps=2,
        max_tokens=120,
        rows=(1, 2),
        turns=1,
        tokens=8,
    )
    found = report.plain
    assert found["failed_requests"] == 0 and found["requests"] >= 2
    assert found["arms"].keys() == {"swap", "quiet", "record_on_1", "record_off_1", "record_on_2", "record_off_2"}
    assert found["ratios"].keys() == {"swap/quiet", "record_on_1/record_off_1", "record_on_2/record_off_2"}
    for name in ("swap", "quiet"):
        arm = found["arms"][name]
        assert 0 < arm["p99_gap_ms"] <= arm["longest_gap_ms"] and arm["gaps"] > 20
    assert found["longest_gap_ratio"] == pytest.approx(
        found["arms"]["swap"]["longest_gap_ms"] / found["arms"]["quiet"]["longest_gap_ms"]
    )
    check_published(report, tmp_path)


def test_swap_needs_clients(settings: Settings, models: tuple[Path, Path]) -> None:
    with pytest.raises(RedraftError):
        run_swap(settings, models, title="", command="", clients=0)
