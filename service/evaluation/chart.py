"""One picture of what a demo did."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def draw(path: Path, panels: Mapping[str, Mapping[str, float]], title: str) -> None:
    """A PNG with one bar chart per panel: panel -> bar -> value. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(panels), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    colours = ["#9aa5b1", "#5b8db8", "#2f9e63"]
    for place, (name, bars) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, len(panels), place)
        drawn = axes.bar(list(bars), list(bars.values()), color=colours[-len(bars) :])
        axes.bar_label(drawn, fmt="%.2f" if max(bars.values()) < 10 else "%.1f")
        axes.set_title(name)
        axes.margins(y=0.15)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
