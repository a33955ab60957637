"""`bench store`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli.bench.options import Png, show
from service.cli.console import stages
from service.cli.models import pair_folders
from service.cli.options import Config, Draft, Json, Markdown, Target, settings_from


def store(
    cases: Annotated[int, typer.Option(min=1, help="Failure cases in the log.")] = 1_000_000,
    turns: Annotated[int, typer.Option(min=1, help="Training batches chosen.")] = 7,
    scrapes: Annotated[int, typer.Option(min=2, help="Reads of /metrics, idle and as many busy.")] = 300,
    keep: Annotated[Path | None, typer.Option(help="Keep the database here (0.8 GB for a million cases).")] = None,
    url: Annotated[str | None, typer.Option(help="Fill this empty database (postgresql://...) instead.")] = None,
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    json: Json = None,
    png: Png = None,
    markdown: Markdown = None,
) -> None:
    """The time to select a training batch, to record, and to read /metrics with a full log."""
    from service.evaluation.bench.store import run_store

    settings = settings_from(config, models__target=target, models__draft=draft)
    models = pair_folders(settings)
    with stages("bench store") as on_progress:
        found = run_store(
            settings, models, cases=cases, turns=turns, scrapes=scrapes, keep=keep, url=url, on_progress=on_progress
        )
    show(found, json, png, markdown)
