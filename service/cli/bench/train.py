"""`bench train`."""

from __future__ import annotations

from typing import Annotated

import typer

from service.cli.bench.options import Png, show
from service.cli.console import stages
from service.cli.models import pair_folders
from service.cli.options import Config, Draft, Json, Markdown, Target, settings_from


def train(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each turn.")] = 8,
    turns: Annotated[int, typer.Option(min=1)] = 3,
    batch: Annotated[int, typer.Option(min=1, help="Texts a step.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each text.")] = 160,
    response: Annotated[
        int | None, typer.Option(min=1, help="How many of them are response, which is learnt; else half.")
    ] = None,
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    json: Json = None,
    png: Png = None,
    markdown: Markdown = None,
) -> None:
    """A training step against mlx_lm.lora's: tokens per second and peak memory, each turn in a process of its own."""
    from service.evaluation.bench.train import run_train

    settings = settings_from(config, models__target=target, models__draft=draft)
    models = pair_folders(settings)
    with stages("bench train") as on_progress:
        found = run_train(
            settings,
            models,
            steps=steps,
            turns=turns,
            batch=batch,
            length=length,
            response=response,
            on_progress=on_progress,
        )
    show(found, json, png, markdown)
