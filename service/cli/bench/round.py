"""`bench round`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.bench.options import Bits, Domain, Limit, Png, Shape, counts, models_of, names, shape_title, show
from service.cli.console import stages
from service.cli.models import model_folders
from service.cli.options import Config, Draft, Json, Markdown, Target, again
from service.core import BadRequest

if TYPE_CHECKING:
    from service.evaluation.bench.report import Report
    from service.evaluation.prompts import PromptLine

DEFAULT_PROMPTS = 4
"""Prompts, of the demo's, where none are named."""


def round_(
    context: typer.Context,
    rows: Annotated[str | None, typer.Option(help="Numbers of rows, separated by commas.")] = None,
    modes: Annotated[str | None, typer.Option(help="Of plain, drafted, lookup; separated by commas.")] = None,
    sampling: Annotated[str | None, typer.Option(help="Of greedy, seeded, sampled; separated by commas.")] = None,
    recording: Annotated[
        bool | None, typer.Option("--recording/--no-recording", help="With or without evidence for the log.")
    ] = None,
    ragged: Annotated[bool | None, typer.Option("--ragged/--equal", help="Rows of unlike or of equal lengths.")] = None,
    constrained: Annotated[
        bool, typer.Option("--constrained", help="Each of them also with one row that follows a grammar.")
    ] = False,
    k: Annotated[int, typer.Option(min=1, max=16, help="Tokens drafted or looked up per round.")] = 4,
    strategy: Annotated[
        str,
        typer.Option(
            help="How the engine runs rounds: own, as on this device; device, as on an accelerator (steps handed over one by "
            "one, one wait a round, the next round launched ahead), which on a CPU shows waits and handovers but not an "
            "accelerator's times; or cpu, metal, cuda by name."
        ),
    ] = "own",
    bare: Annotated[
        bool,
        typer.Option(
            "--bare", help="Also one stream of a bare loop on mlx-lm's caches, with mlx-lm and this engine in turn."
        ),
    ] = False,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with id, domain, prompt; by default the demo's.")
    ] = None,
    domain: Domain = None,
    limit: Limit = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="With --bare: maximum output tokens per prompt.")] = 64,
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    shape: Shape = None,
    bits: Bits = None,
    json: Json = None,
    png: Png = None,
    markdown: Markdown = None,
) -> None:
    """Where the time of a steady round goes: its wall time, that of its target call and draft steps alone, and how
    often Python waits for the
    device or launches work.

    Without options, six kinds of rounds; with --rows, each of them with these row counts; with --modes, --sampling,
    --no-recording or --equal,
    exactly those (otherwise greedy, recording, ragged).
    """
    from service.evaluation.bench.bare_loop import run_bare
    from service.evaluation.bench.round import run_round, strategy_named
    from service.evaluation.bench.round_modes import modes as modes_of

    chosen = modes_of(
        counts(rows, "rows") if rows is not None else None,
        names(modes),
        names(sampling),
        recording=recording,
        ragged=ragged,
        constrained=constrained,
    )
    strategy_named(strategy)
    lines = _lines(prompts, domain, limit)
    settings = models_of(config, target, draft, shape, bits)
    folders = model_folders(settings)
    pair, command = (folders.target, folders.draft), again(context)
    about = f"K = {k}{'' if strategy == 'own' else f', strategy {strategy}'}"
    with stages("bench round") as on_progress:
        report = run_round(
            pair,
            lines,
            chosen,
            k=k,
            title=f"Steady rounds of {folders.target.name}, {about}{shape_title(shape, bits)}",
            command=command,
            shape=shape or folders.target.name,
            strategy=strategy,
            on_progress=on_progress,
        )
        bare_report: Report | None = None
        if bare:
            bare_report = run_bare(
                pair,
                settings.engine,
                lines,
                max_tokens=max_tokens,
                title=f"A bare loop on {folders.target.name}, {len(lines)} prompts, up to {max_tokens} tokens",
                command=command,
                strategy=strategy,
                on_progress=on_progress,
            )
    if bare_report is not None:
        report = replace(report, plain=report.plain | bare_report.plain)
    show(report, json, png, markdown)
    if bare_report is not None:
        show(bare_report, None, None, markdown)


def _lines(prompts: Path | None, domain: str | None, limit: int | None) -> list[PromptLine]:
    from service.evaluation.prompts import read_prompts
    from service.evaluation.sql_prompts import traffic_prompts

    if prompts is not None:
        return read_prompts(prompts, domain=domain, limit=limit)
    if domain is not None or limit is not None:
        raise BadRequest("--domain and --limit require --prompts", field="prompts")
    return traffic_prompts(DEFAULT_PROMPTS)
