"""Charts of measurements, as PNG files. Needs no display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FEW_COLOURS, _MANY_COLOUR = ("#9aa5b1", "#5b8db8", "#2f9e63"), "#5b8db8"
_LINE_COLOURS = ("#9aa5b1", "#2f9e63", "#c97b3d", "#5b8db8")


def draw_bars(path: Path, panels: Mapping[str, Mapping[str, float]], title: str) -> None:
    """Write a picture with one bar chart per panel. panels: panel -> bar -> value. Raises OSError."""
    widths = [max(4.0, 0.9 * len(bars)) for bars in panels.values()]
    figure = _figure(sum(widths), 3.6, fill(title, round(11 * sum(widths))))
    grid = figure.add_gridspec(1, len(panels), width_ratios=widths)
    for column, (name, bars) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[0, column])
        few = len(bars) <= len(_FEW_COLOURS)
        drawn = axes.bar(list(bars), list(bars.values()), color=_FEW_COLOURS[-len(bars) :] if few else _MANY_COLOUR)
        axes.bar_label(drawn, fmt="%.2f" if max(bars.values()) < 10 else "%.1f")
        axes.set_title(name)
        if not few:
            axes.set_xticks(range(len(bars)), list(bars), rotation=30, ha="right")
        axes.margins(y=0.15)
    _save(figure, path)


def draw_lines(
    path: Path, lines: Mapping[str, Sequence[float]], parts: Sequence[tuple[str, int, float]], title: str, unit: str
) -> None:
    """Write a picture of values by request, one line each.

    parts: (name, requests, level), one after another; the level is drawn as a dotted line through its part. Raises OSError.
    """
    figure = _figure(11, 4.2, fill(title, 120))
    axes = figure.add_subplot()
    for i, (name, values) in enumerate(lines.items()):
        axes.plot(range(1, len(values) + 1), values, label=name, color=_LINE_COLOURS[i % len(_LINE_COLOURS)])
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
    _save(figure, path)


def _figure(width: float, height: float, title: str) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    return figure


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
