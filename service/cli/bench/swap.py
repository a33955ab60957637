"""`bench swap`."""

from __future__ import annotations

from typing import Annotated

import typer

from service.cli.bench.options import Png, show
from service.cli.console import stages
from service.cli.models import pair_folders
from service.cli.options import Config, Draft, Json, Markdown, Target, settings_from


def swap(
    clients: Annotated[int, typer.Option(min=1, help="Streams at a time.")] = 8,
    swaps: Annotated[int, typer.Option(min=1)] = 10,
    turns: Annotated[int, typer.Option(min=1, help="Turns with and without recording.")] = 5,
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    json: Json = None,
    png: Png = None,
    markdown: Markdown = None,
) -> None:
    """Gaps in running streams with and without a swap, and tokens per second with and without recording."""
    from service.evaluation.bench.swap import run_swap

    settings = settings_from(config, models__target=target, models__draft=draft)
    models = pair_folders(settings)
    with stages("bench swap") as on_progress:
        found = run_swap(settings, models, clients=clients, swaps=swaps, turns=turns, on_progress=on_progress)
    show(found, json, png, markdown)
