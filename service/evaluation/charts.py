"""One picture of what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def draw_lines(
    path: Path, lines: Mapping[str, Sequence[float]], parts: Sequence[tuple[str, int, float]], title: str, unit: str
) -> None:
    """A PNG of values by request, one line each. parts: (name, requests, level) one after another; the level, drawn through its
    part, is what could be had there."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(fill(title, 120))
    axes = figure.add_subplot()
    colours = ["#9aa5b1", "#2f9e63", "#c97b3d", "#5b8db8"]
    for i, (name, values) in enumerate(lines.items()):
        axes.plot(range(1, len(values) + 1), values, label=name, color=colours[i % len(colours)])
    start = 0
    for i, (name, requests, level) in enumerate(parts):
        end = start + requests
        axes.plot([start + 1, end], [level, level], ":", color="#30343b", label="" if i else "best of each topic")
        axes.axvline(end, color="#d5dae0", linewidth=1)
        axes.text((start + end) / 2, 1.01, name, ha="center", va="bottom", transform=axes.get_xaxis_transform())
        start = end
    axes.set_xlabel("requests")
    axes.set_ylabel(unit)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
