"""`bench train`, `bench swap` and `bench store`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli.bench import Markdown, Png, bench, show
from service.cli.console import stages
from service.cli.models import pair_folders
from service.cli.options import Config, Draft, Json, Target, settings_from


@bench.command()
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
    with stages("bench train") as on_step:
        found = run_train(
            settings,
            models,
            steps=steps,
            turns=turns,
            batch=batch,
            length=length,
            response=response,
            on_step=on_step,
        )
    show(found, json, png, markdown)


@bench.command()
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
    with stages("bench swap") as on_step:
        found = run_swap(settings, models, clients=clients, swaps=swaps, turns=turns, on_step=on_step)
    show(found, json, png, markdown)


@bench.command()
def store(
    cases: Annotated[int, typer.Option(min=1, help="Failure cases in the log.")] = 1_000_000,
    turns: Annotated[int, typer.Option(min=1, help="Training batches chosen.")] = 7,
    scrapes: Annotated[int, typer.Option(min=2, help="Reads of /metrics, idle and as many busy.")] = 300,
    keep: Annotated[Path | None, typer.Option(help="Leave the database here (0.8 GB for a million cases).")] = None,
    url: Annotated[str | None, typer.Option(help="Fill this empty database (postgresql://...) instead.")] = None,
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    json: Json = None,
    png: Png = None,
    markdown: Markdown = None,
) -> None:
    """How long choosing a training batch, recording and reading /metrics take with a full log."""
    from service.evaluation.bench.store import run_store

    settings = settings_from(config, models__target=target, models__draft=draft)
    models = pair_folders(settings)
    with stages("bench store") as on_step:
        found = run_store(
            settings, models, cases=cases, turns=turns, scrapes=scrapes, keep=keep, url=url, on_step=on_step
        )
    show(found, json, png, markdown)
