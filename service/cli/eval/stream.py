"""`eval stream`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli.console import stages, write_json
from service.cli.eval.options import Rows, show
from service.cli.models import pair_and_general
from service.cli.options import Config, Draft, Json, Markdown, MaxTokens, Target, again, settings_from


def stream(
    context: typer.Context,
    files: Annotated[list[str], typer.Argument(help="Prompt files in the order they come; FILE:N takes the next N.")],
    window: Annotated[int, typer.Option(min=1, help="Requests of a moving mean.")] = 50,
    untagged: Annotated[bool, typer.Option("--untagged", help="Requests carry no domain.")] = False,
    max_tokens: MaxTokens = 128,
    rows: Rows = 16,
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    json: Json = None,
    png: Annotated[Path | None, typer.Option("--png", help="Also draw the result.")] = None,
    markdown: Markdown = None,
) -> None:
    """Traffic whose topic changes, through the loop's own store, policy, training and gate: static draft, loop, loop without
    replay, that without a gate, and the best that one run could be. Nothing is served: greedy text is the same whatever drafts
    it."""
    from service.evaluation.bench import host
    from service.evaluation.charts import draw_lines
    from service.evaluation.stream import read_parts, run_stream

    settings = settings_from(config, models__target=target, models__draft=draft)
    models, general = pair_and_general(settings)
    with stages("stream") as on_progress:
        found = run_stream(
            settings,
            models,
            general,
            read_parts(files),
            window=window,
            max_tokens=max_tokens,
            rows=rows,
            tagged=not untagged,
            on_progress=on_progress,
        )
    title = "Stream " + ", ".join(f"{part.topic} ({len(part.lines)})" for part in found.parts)
    command = again(context)
    head = {"command": command, "machine": host.describe(), "training": settings.training.model_dump()}
    write_json(json, head | found.plain())
    show("stream", title, command, found.columns, found.cells(), markdown)
    if png is not None:
        levels = [
            (part.topic, len(part.lines), best.agreement) for part, best in zip(found.parts, found.best, strict=True)
        ]
        lines = {arm: found.moving(arm) for arm in found.histories}
        draw_lines(png, lines, levels, title, f"agreement, mean over {window} requests")
