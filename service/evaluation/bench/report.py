"""Reports of benchmarks: medians and ratios with their spread, as JSON, as a picture, and as a section of a document."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from service.evaluation.bench import host
from service.evaluation.charts import draw_bars

WIDTH = 128
"""Characters of a line of prose in a document."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and the ends of its two-sided 90 % bootstrap interval over turns."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one benchmark.

    name: such as "decode". title: what was measured on which prompts, in one line. command: runs it again; names files without
    their folders. columns, rows: the table. plain: what `as_json` has beyond that and the machine. bars: panel -> bar -> value.
    """

    name: str
    title: str
    command: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    plain: dict[str, Any]
    bars: Mapping[str, Mapping[str, float]]

    def as_json(self) -> dict[str, Any]:
        """All of it but table and bars, with the machine."""
        content = {"name": self.name, "title": self.title, "command": self.command}
        return content | self.plain | {"machine": host.describe()}


def spread(values: Sequence[float], resamples: int = 2000, seed: int = 0) -> Spread:
    """The spread of one value or more a turn, by a percentile bootstrap of the median."""
    measured = np.array(values, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(measured), (resamples, len(measured)))
    medians = np.median(measured[drawn], axis=1)
    return Spread(float(np.median(measured)), float(np.quantile(medians, 0.05)), float(np.quantile(medians, 0.95)))


def ratios(speeds: Mapping[str, Sequence[float]], pairs: Sequence[tuple[str, str]]) -> dict[str, Spread]:
    """ "A/B" -> the spread of A's speed over B's, turn by turn, for the pairs of which both were measured. Turn i of A and turn
    i of B ran one after the other on the same work. Raises ValueError where the numbers of turns differ."""
    return {
        f"{a}/{b}": spread([ours / theirs for ours, theirs in zip(speeds[a], speeds[b], strict=True)])
        for a, b in pairs
        if a in speeds and b in speeds
    }


def publish(report: Report, *, png: Path | None, markdown: Path | None) -> None:
    """Write the picture and the document whose path is given. The document describes the machine; in it, a section of the same
    title and machine is replaced. Raises OSError."""
    if png is not None:
        draw_bars(png, report.bars, report.title)
    if markdown is not None:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        before = markdown.read_text(encoding="utf-8") if markdown.is_file() else "# Benchmarks\n"
        key = f"bench {report.name}: {report.title} ({host.label()})"
        markdown.write_text(with_section(before, key, _section(report)), encoding="utf-8")


def with_section(document: str, key: str, section: str) -> str:
    """The document with this key's section replaced, or appended. Nothing else changes. A section is enclosed in two comments
    that name its key, which names the machine: another machine's result has a section of its own."""
    key = key.replace("--", "-")
    begin, end = f"<!-- {key} -->", f"<!-- end of {key} -->"
    written = f"{begin}\n{section.strip()}\n{end}\n"
    existing = re.compile(re.escape(begin) + r"\n.*?" + re.escape(end) + r"\n?", re.DOTALL)
    if existing.search(document):
        return existing.sub(lambda _: written, document, count=1)
    return f"{document.rstrip()}\n\n{written}" if document.strip() else written


def _section(report: Report) -> str:
    lines = [report.columns, ("---",) * len(report.columns), *report.rows]
    table = "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
    measured = fill(f"{host.sentence()} Measured {datetime.now(UTC):%Y-%m-%d} by", WIDTH)
    return f"## {report.title}\n\n{measured}\n\n    {report.command}\n\n{table}"
