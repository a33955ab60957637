"""`bench decode`."""

from __future__ import annotations

from contextlib import ExitStack
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


def decode(
    context: typer.Context,
    prompts: Prompts,
    domain: Domain = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
    adapter: Version = None,
    adapt_on: AdaptOn = None,
    adapt_limit: AdaptLimit = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=10.0, help="Below 1e-5 greedy; above it, unseeded.")] = 0.0,
    k: Annotated[
        int | None, typer.Option(min=1, max=16, help="Draft exactly so many everywhere, not what each does best.")
    ] = None,
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
    """One stream: this engine plain, with its draft, with the adapted draft, and mlx-lm on the same weights at its best K."""
    from service.evaluation.bench.arms import choose
    from service.evaluation.bench.decode import MlxLmDraft, Task, run_decode
    from service.evaluation.bench.decode_arms import ARMS
    from service.evaluation.prompts import read_prompts

    settings = models_of(config, target, draft, shape, bits)
    chosen = names(arms)
    choose(chosen, list(ARMS))
    task = Task(read_prompts(prompts, domain=domain, limit=limit), max_tokens, temperature, k)
    title = f"One stream: {prompts_title(prompts, domain, limit, max_tokens)}, T = {temperature:g}" + (
        f", K = {k}" if k else ""
    )
    title += draft_title(draft) + shape_title(shape, bits)
    with ExitStack() as open_until_done:
        on_progress = open_until_done.enter_context(stages("bench decode"))
        adapted = open_until_done.enter_context(adapter_of(settings, adapter, adapt_on, adapt_limit, on_progress))
        other = None
        if mlx_lm_draft is not None:
            theirs = settings_from(config, models__target=target, models__draft=mlx_lm_draft)
            learnt = None
            if chosen is None or "mlx_lm_spec_adapted" in chosen:
                # Trained on the same prompts; --adapter is a version of our draft, not of this one.
                learnt = open_until_done.enter_context(adapter_of(theirs, None, adapt_on, adapt_limit, on_progress))
            other = MlxLmDraft(pair_folders(theirs)[1], learnt)
        folders = model_folders(settings)
        report = run_decode(
            (folders.target, folders.draft),
            settings.engine,
            task,
            title=title + adapter_title(adapted),
            command=again(context),
            arms=chosen,
            adapter=adapted,
            mlx_lm_draft=other,
            on_progress=on_progress,
        )
    show(report, json, png, markdown)
