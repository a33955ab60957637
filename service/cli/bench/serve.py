"""`bench serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from service.cli.bench.options import (
    AdaptLimit,
    AdaptOn,
    Arms,
    Bits,
    Domain,
    Limit,
    MlxLmDraftOption,
    Png,
    Shape,
    Version,
    adapter_of,
    adapter_title,
    counts,
    draft_title,
    models_of,
    names,
    prompts_title,
    shape_title,
    show,
)
from service.cli.console import stages
from service.cli.models import model_folders, pair_folders
from service.cli.options import Config, Draft, Json, Markdown, MaxTokens, Prompts, Target, again, settings_from


def serve(
    context: typer.Context,
    prompts: Prompts,
    clients: Annotated[str, typer.Option(help="Numbers of concurrent clients, separated by commas.")] = "1,4,16",
    turns: Annotated[int, typer.Option(min=1, help="Measurements of every server at every number of clients.")] = 3,
    domain: Domain = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
    adapter: Version = None,
    adapt_on: AdaptOn = None,
    adapt_limit: AdaptLimit = None,
    arms: Arms = None,
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    mlx_lm_draft: MlxLmDraftOption = None,
    shape: Shape = None,
    bits: Bits = None,
    json: Json = None,
    png: Png = None,
    markdown: Markdown = None,
) -> None:
    """Clients over HTTP, greedy: this server without draft, with its draft, with the adapted draft, and mlx_lm.server
    with and without the
    draft. All servers run at the same time."""
    from service.evaluation.bench.arms import choose
    from service.evaluation.bench.serve import Load, run_serve
    from service.evaluation.bench.servers import SERVERS
    from service.evaluation.prompts import read_prompts

    settings = models_of(config, target, draft, shape, bits)
    chosen = names(arms)
    choose(chosen, list(SERVERS))
    load = Load(read_prompts(prompts, domain=domain, limit=limit), counts(clients, "clients"), turns, max_tokens)
    load.cells()
    title = f"{clients} clients over HTTP: {prompts_title(prompts, domain, limit, max_tokens)}"
    title += draft_title(draft) + shape_title(shape, bits)
    with (
        stages("bench serve") as on_progress,
        adapter_of(settings, adapter, adapt_on, adapt_limit, on_progress) as adapted,
    ):
        folders = model_folders(settings)
        theirs = None
        if mlx_lm_draft is not None:
            theirs = pair_folders(settings_from(config, models__target=target, models__draft=mlx_lm_draft))[1]
        report = run_serve(
            settings,
            (folders.target, folders.draft),
            load,
            title=title + adapter_title(adapted),
            command=again(context),
            arms=chosen,
            adapter=adapted,
            mlx_lm_draft=theirs,
            on_progress=on_progress,
        )
    show(report, json, png, markdown)
