"""`eval agreement`."""

from __future__ import annotations

from typing import Annotated

import typer

from service.cli.console import progress, table, write_json
from service.cli.models import pair_folders
from service.cli.options import Config, Draft, Json, Prompts, Target, settings_from
from service.core import BARE_DRAFT, BadRequest


def agreement(
    prompts: Prompts,
    domain: Annotated[str | None, typer.Option(help="Only prompts of this domain.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many.")] = None,
    adapter: Annotated[str, typer.Option(help='Adapter version, or "none" for the bare draft.')] = "none",
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
    version = _version(adapter)
    with progress("greedy text") as bar:
        found = run_agreement(settings, models, lines, version, bar)
    rows: list[tuple[str, object]] = [
        ("agreement with the target's greedy text", f"{found.agreement:.4f}"),
        ("tokens per target call (K = 4)", f"{found.acceptance_length:.3f}"),
        ("overlap, sum of min(p, q) at T = 1", f"{found.overlap:.4f}"),
        ("tokens", found.tokens),
        ("prompts", found.prompts),
    ]
    table("agreement", ("what", "measured"), rows)
    write_json(json, found.plain())


def _version(adapter: str) -> int:
    if adapter == "none":
        return BARE_DRAFT
    if not adapter.isdigit():
        raise BadRequest(f"--adapter takes a version or none, not {adapter!r}", field="adapter")
    return int(adapter)
