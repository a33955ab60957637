"""`bench swap`."""

from __future__ import annotations

from typing import Annotated

import typer

from service.cli.bench.options import Bits, Png, Shape, draft_title, models_of, shape_title, show
from service.cli.console import stages
from service.cli.models import pair_folders
from service.cli.options import Config, Draft, Json, Markdown, Target, again


def swap(
    context: typer.Context,
    clients: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 8,
    swaps: Annotated[int, typer.Option(min=1)] = 10,
    turns: Annotated[int, typer.Option(min=1, help="Turns with and without recording.")] = 5,
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    shape: Shape = None,
    bits: Bits = None,
    json: Json = None,
    png: Png = None,
    markdown: Markdown = None,
) -> None:
    """Gaps in running streams with and without a swap, and tokens per second with and without recording."""
    from service.evaluation.bench.swap import run_swap

    settings = models_of(config, target, draft, shape, bits)
    models = pair_folders(settings)
    with stages("bench swap") as on_progress:
        found = run_swap(
            settings,
            models,
            clients=clients,
            swaps=swaps,
            turns=turns,
            title=f"{swaps} swaps under {clients} streams, and recording{draft_title(draft)}{shape_title(shape, bits)}",
            command=again(context),
            on_progress=on_progress,
        )
    show(found, json, png, markdown)
