"""Checks that apply to every benchmark report."""

import json
from pathlib import Path

from service.evaluation.bench.report import Report, publish


def check_published(report: Report, folder: Path) -> None:
    publish(report, png=folder / "r.png", markdown=folder / "r.md")
    found = json.loads(json.dumps(report.as_json()))
    assert {"arms", "ratios", "settings", "machine"} <= found.keys()
    assert (folder / "r.png").stat().st_size > 1000
    assert all(len(row) == len(report.columns) for row in report.rows)
    assert report.command.removeprefix("redraft bench ") in (folder / "r.md").read_text()
