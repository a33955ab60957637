"""`eval agreement`."""

from __future__ import annotations

from typing import Annotated

import typer

from service.cli.console import progress, table, write_json
from service.cli.models import pair_folders
from service.cli.options import VERSION, Config, Draft, Json, Prompts, Target, adapter_version, settings_from
from service.core import BARE_DRAFT


def agreement(
    prompts: Prompts,
    domain: Annotated[str | None, typer.Option(help="Only prompts of this domain.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many.")] = None,
    adapter: Annotated[
        int | None,
        typer.Option(parser=adapter_version, metavar=VERSION, help="Adapter version; by default the bare draft."),
    ] = None,
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    json: Json = None,
) -> None:
    """How well the draft predicts the target's greedy text (128 tokens a prompt, decoded once and cached)."""
    from service.evaluation.agreement import run_agreement
    from service.evaluation.prompts import read_prompts

    settings = settings_from(config, models__target=target, models__draft=draft)
    lines = read_prompts(prompts, domain=domain, limit=limit)
    models = pair_folders(settings)
    with progress("greedy text") as bar:
        found = run_agreement(settings, models, lines, BARE_DRAFT if adapter is None else adapter, bar)
    rows: list[tuple[str, object]] = [
        ("agreement with the target's greedy text", f"{found.agreement:.4f}"),
        ("tokens per target call (K = 4)", f"{found.acceptance_length:.3f}"),
        ("overlap, sum of min(p, q) at T = 1", f"{found.overlap:.4f}"),
        ("tokens", found.tokens),
        ("prompts", found.prompts),
    ]
    table("agreement", ("what", "measured"), rows)
    write_json(json, found.plain())
