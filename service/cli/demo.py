"""`demo`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.console import out, stages, table, write_json
from service.cli.models import pair_folders
from service.cli.options import Config, Json, settings_from
from service.core import RedraftError

if TYPE_CHECKING:
    from service.evaluation.demo import DemoReport


NOISY = (
    "This machine was too busy with other work to tell the speeds with and without the draft apart: "
    "no tokens/s are shown. Run the demo again on a quiet machine."
)


def demo(
    full: Annotated[
        bool, typer.Option("--full", help="More traffic, a longer run, more held-out prompts: 10 minutes or more.")
    ] = False,
    prompts: Annotated[Path | None, typer.Option(help="Your own traffic, as JSON lines.")] = None,
    png: Annotated[Path, typer.Option(help="File for the chart.")] = Path("redraft-demo.png"),
    keep: Annotated[Path | None, typer.Option(help="Keep the server's log, database and adapters here.")] = None,
    config: Config = None,
    json: Json = None,
) -> None:
    """Show the whole loop on a real server: traffic, failures logged, draft retrained, proven, swapped in live.

    Measures this machine first and then prints the expected duration: about 4 minutes, more on a slow machine. Exits
    with 1 if an answer differs from the target's own, a request failed, or no adapter was promoted.
    """
    from service.evaluation import demo as evaluation
    from service.evaluation.demo_plan import FULL, QUICK
    from service.evaluation.prompts import read_prompts

    settings = settings_from(config)
    lines = read_prompts(prompts) if prompts else None
    with stages("redraft demo") as on_progress:
        report = evaluation.run_demo(
            settings,
            pair_folders(settings),
            goal=FULL if full else QUICK,
            prompts=lines,
            on_progress=on_progress,
            keep=keep,
        )
    _show(report)
    write_json(json, report.plain())
    _draw(report, png)
    if problems := report.problems():
        raise RedraftError("; ".join(problems))


def _show(report: DemoReport) -> None:
    agreement, calls, gaps, speeds = (
        report.agreement,
        report.tokens_per_call,
        report.longest_gap_ms,
        report.tokens_per_second,
    )
    rows: list[tuple[str, object]] = [
        ("requests served, failed", f"{report.requests}, {report.failed_requests}"),
        ("answers that differ from the target alone", report.greedy_mismatches),
        ("adapters promoted and swapped in live", report.promotions),
        ("agreement on held-out prompts", f"{agreement['before']:.3f} -> {agreement['after']:.3f}"),
        ("  lower 90 % bound of the gain", f"{agreement['low90']:+.3f}"),
        ("tokens per target call (K = 4)", f"{calls['before']:.2f} -> {calls['after']:.2f}"),
        *((f"speed of one stream, {name}", ratio) for name, ratio in report.speed_ratios.items()),
        (
            "longest gap in a stream, without and at the swap",
            f"{gaps['without_swap']:.0f} ms, {gaps['with_swap']:.0f} ms",
        ),
        ("seconds announced, taken", f"{report.announced_seconds:.0f}, {report.seconds:.0f}"),
    ]
    table("redraft demo", ("what", "measured"), rows)
    if report.noisy:
        out.print(NOISY, highlight=False, soft_wrap=True)
        return
    top = max(speeds.values())
    for name, value in speeds.items():
        out.print(f"{name:>7} {'█' * round(40 * value / top)} {value:.1f} tokens/s", highlight=False)


def _draw(report: DemoReport, png: Path) -> None:
    from service.evaluation.charts import draw_bars

    agreement = report.agreement
    panels: dict[str, dict[str, float]] = {
        "agreement, held-out": {"before": agreement["before"], "after": agreement["after"]},
        "tokens per target call (K = 4)": report.tokens_per_call,
    }
    if not report.noisy:
        panels["tokens/s, one stream"] = report.tokens_per_second
    draw_bars(png, panels, "Redraft demo")
    out.print(f"drawn in {png.resolve()}", highlight=False, soft_wrap=True)
