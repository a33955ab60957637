"""One picture of what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill


def draw(path: Path, panels: Mapping[str, Mapping[str, float]], title: str) -> None:
    """A PNG with one bar chart per panel: panel -> bar -> value. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    widths = [max(4.0, 0.9 * len(bars)) for bars in panels.values()]
    figure = Figure(figsize=(sum(widths), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(fill(title, round(11 * sum(widths))))
    few, many = ["#9aa5b1", "#5b8db8", "#2f9e63"], "#5b8db8"
    places = figure.add_gridspec(1, len(panels), width_ratios=widths)
    for place, (name, bars) in enumerate(panels.items()):
        axes = figure.add_subplot(places[0, place])
        drawn = axes.bar(list(bars), list(bars.values()), color=few[-len(bars) :] if len(bars) <= len(few) else many)
        axes.bar_label(drawn, fmt="%.2f" if max(bars.values()) < 10 else "%.1f")
        axes.set_title(name)
        if len(bars) > len(few):
            axes.set_xticks(range(len(bars)), list(bars), rotation=30, ha="right")
        axes.margins(y=0.15)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
