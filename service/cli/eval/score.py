"""`eval score`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.console import progress, table, write_json
from service.cli.models import active_adapter, pair_folders
from service.cli.options import VERSION, Config, Draft, Json, Target, adapter_name, adapter_version, settings_from
from service.core import BARE_DRAFT, BadRequest

if TYPE_CHECKING:
    from service.evaluation.score import Scored


def score(
    adapter: Annotated[
        list[int] | None,
        typer.Option(
            parser=adapter_version,
            metavar=VERSION,
            help="Adapter version, or the bare draft; repeat for more. Without: bare and active.",
        ),
    ] = None,
    k: Annotated[str, typer.Option(help="Draft lengths, separated by commas.")] = "1,2,3,4",
    vocabulary: Annotated[
        int | None,
        typer.Option(min=0, help="Let the draft propose so many tokens and those of the row's own text; 0: all."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Newest held-out generations, at most.")] = 200,
    rows: Annotated[int, typer.Option(min=1, help="Streams at a time that the speed is predicted for.")] = 1,
    speed: Annotated[
        bool, typer.Option("--speed/--no-speed", help="Measure what calls cost here, for tokens/s.")
    ] = True,
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    json: Json = None,
) -> None:
    """Estimate adapters on the logged traffic, by draft length and sampling setting. Reads only."""
    from service.evaluation.score import run_score
    from service.store.stores import open_stores

    settings = settings_from(config, models__target=target, models__draft=draft)
    models = pair_folders(settings)
    lengths = _lengths(k)
    stores = open_stores(settings)
    try:
        active = active_adapter(stores, *models)
        versions = adapter or [BARE_DRAFT, *([] if active is None else [active.id])]
        with progress("scoring") as bar:
            found = run_score(
                stores,
                models,
                versions,
                lengths,
                proposable=vocabulary,
                limit=limit,
                rows=rows if speed else None,
                on_step=bar,
            )
    finally:
        stores.close()
    _show(found)
    write_json(
        json, {"rows": rows if speed else None, "vocabulary": vocabulary, "scores": [one.plain() for one in found]}
    )


def _show(found: Sequence[Scored]) -> None:
    lines = [
        (
            adapter_name(one.adapter),
            f"{one.sampling} ({one.generations})",
            each.k,
            f"{each.tokens_per_call:.3f}",
            " ".join(f"{rate:.2f}" for rate in each.rates),
            "" if each.tokens_per_second is None else f"{each.tokens_per_second:.1f}",
        )
        for one in found
        for each in one.forecasts
    ]
    columns = (
        "adapter",
        "sampling (generations)",
        "K",
        "tokens per call",
        "accepted, by position",
        "tokens/s, predicted",
    )
    table("logged, held-out generations", columns, lines)


def _lengths(k: str) -> list[int]:
    try:
        return sorted({int(number) for number in k.split(",")})
    except ValueError as error:
        raise BadRequest(f"--k takes numbers separated by commas, not {k!r}", field="k") from error
