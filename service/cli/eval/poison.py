"""`eval poison`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli.console import stages, write_json
from service.cli.eval.options import Rows, show
from service.cli.models import pair_and_general
from service.cli.options import Config, Draft, Json, Markdown, MaxTokens, Target, again, settings_from


def poison(
    context: typer.Context,
    honest: Annotated[Path, typer.Option(help="Honest prompts, one in ten of the requests.")],
    test: Annotated[Path, typer.Option(help="Honest prompts to measure on, which no run sees.")],
    requests: Annotated[int, typer.Option(min=10, help="Requests of one attack.")] = 400,
    test_limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many to measure on.")] = None,
    max_tokens: MaxTokens = 128,
    rows: Rows = 16,
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Make nine in ten requests hostile, and measure the draft for the others."""
    from service.evaluation.bench import host
    from service.evaluation.poison import COLUMNS, Poisoned, run_poison
    from service.evaluation.prompts import read_prompts

    settings = settings_from(config, models__target=target, models__draft=draft)
    models, general = pair_and_general(settings)
    command, found = again(context), list[Poisoned]()
    content: dict[str, object] = {
        "command": command,
        "machine": host.describe(),
        "training": settings.training.model_dump(),
    }
    with stages("poison") as on_progress:
        for one in run_poison(
            settings,
            models,
            general,
            read_prompts(honest),
            read_prompts(test, limit=test_limit),
            requests=requests,
            max_tokens=max_tokens,
            rows=rows,
            on_progress=on_progress,
        ):
            found.append(one)
            content["attacks"] = {each.attack: each.plain() for each in found}
            write_json(json, content, so_far=True)
    write_json(json, content)
    title = f"Hostile traffic along with {honest.name.removesuffix('.jsonl')}, measured on {test.name.removesuffix('.jsonl')}"
    show("poison", title, command, COLUMNS, tuple(one.cells() for one in found), markdown)
