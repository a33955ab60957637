"""`eval gate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli.console import stages, write_json
from service.cli.eval.options import Rows, show
from service.cli.models import pair_and_general
from service.cli.options import Config, Draft, Json, Markdown, MaxTokens, Target, again, settings_from


def gate(
    context: typer.Context,
    train: Annotated[Path, typer.Option(help="Prompts: four in five to learn from, the others for the gate.")],
    test: Annotated[Path, typer.Option(help="Other prompts, on which each adapter is measured.")],
    keep: Annotated[Path, typer.Option(help="Folder of the adapters; those that are there are not trained again.")],
    count: Annotated[int, typer.Option(min=1, help="Adapters of either kind to train.")] = 20,
    noisy: Annotated[int, typer.Option(min=0, help="Copies with noise to judge.")] = 100,
    cases: Annotated[int, typer.Option(min=1, help="Generations that each learns from.")] = 400,
    test_limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many other prompts.")] = None,
    max_tokens: MaxTokens = 128,
    rows: Rows = 16,
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Does the gate pass adapters that learnt something, and refuse those trained on shuffled targets or changed by noise?"""
    from service.evaluation.bench import host
    from service.evaluation.gate import COLUMNS, Judged, cells, run_gate
    from service.evaluation.prompts import read_prompts

    settings = settings_from(config, models__target=target, models__draft=draft)
    models, general = pair_and_general(settings)
    command, found = again(context), list[Judged]()
    content: dict[str, object] = {"command": command, "machine": host.describe(), "gate": settings.gate.model_dump()}
    with stages("gate") as on_progress:
        for one in run_gate(
            settings,
            models,
            general,
            read_prompts(train),
            read_prompts(test, limit=test_limit),
            keep,
            count=count,
            noisy=noisy,
            cases=cases,
            max_tokens=max_tokens,
            rows=rows,
            on_progress=on_progress,
        ):
            found.append(one)
            content["judged"] = [each.plain() for each in found]
            write_json(json, content, so_far=True)
    write_json(json, content)
    title = f"The gate on adapters of {train.name.removesuffix('.jsonl')}, {cases} generations"
    show("gate", title, command, COLUMNS, cells(found), markdown)
