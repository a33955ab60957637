"""What a benchmark found, and how it is written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np

from service.evaluation.chart import draw


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and the ends of its two-sided 90 % bootstrap interval over turns."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Report:
    """One benchmark's outcome. plain: the JSON (arms, ratios, settings, machine). bars: panels of the chart."""

    name: str
    title: str
    command: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    plain: dict[str, Any]
    bars: Mapping[str, Mapping[str, float]]


def spread(values: Sequence[float], resamples: int = 2000, seed: int = 0) -> Spread:
    held = np.array(values, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(held), (resamples, len(held)))
    medians = np.median(held[drawn], axis=1)
    return Spread(float(np.median(held)), float(np.quantile(medians, 0.05)), float(np.quantile(medians, 0.95)))


def ratios(speeds: Mapping[str, Sequence[float]], pairs: Sequence[tuple[str, str]]) -> dict[str, Spread]:
    """ "A/B" -> the spread of the ratios of each turn."""
    return {f"{a}/{b}": spread([x / y for x, y in zip(speeds[a], speeds[b], strict=True)]) for a, b in pairs}


def publish(report: Report, *, json: Path | None, png: Path | None, markdown: Path | None) -> None:
    """Write the report where asked."""
    if json is not None:
        json.write_text(dumps(report.plain, indent=2) + "\n", encoding="utf-8")
    if png is not None:
        draw(png, report.bars, report.title)
    if markdown is not None:
        lines = [report.columns, ("---",) * len(report.columns), *report.rows]
        table = "\n".join("| " + " | ".join(map(str, row)) + " |" for row in lines)
        markdown.write_text(f"## {report.title}\n\n`{report.command}`\n\n{table}\n", encoding="utf-8")
