"""`eval stream` and `eval score`: the measurements behind docs/learning.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.console import progress, stages, table, write_json
from service.cli.evaluate import MaxTokens, Rows, eval_
from service.cli.models import pair_and_general, pair_folders
from service.cli.options import Config, Draft, Json, Target, again, settings_from
from service.core import BARE_DRAFT, BadRequest

if TYPE_CHECKING:
    from service.app import Stores

Markdown = Annotated[Path | None, typer.Option("--markdown", help="Also put the result into this document.")]


def tell(
    name: str,
    title: str,
    command: str,
    columns: tuple[str, ...],
    rows: tuple[tuple[object, ...], ...],
    markdown: Path | None,
) -> None:
    """A finished experiment's table, and a document's section of that name."""
    from service.evaluation.bench.report import Report, publish

    table(title, columns, rows)
    publish(Report(name, title, command, columns, rows, {}, {}), json=None, png=None, markdown=markdown)


@eval_.command()
def stream(
    context: typer.Context,
    files: Annotated[list[str], typer.Argument(help="Prompt files in the order they come; FILE:N takes the next N.")],
    window: Annotated[int, typer.Option(min=1, help="Requests of a moving mean.")] = 50,
    untagged: Annotated[bool, typer.Option("--untagged", help="Requests carry no domain.")] = False,
    max_tokens: MaxTokens = 128,
    rows: Rows = 16,
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    json: Json = None,
    png: Annotated[Path | None, typer.Option("--png", help="Also draw the result.")] = None,
    markdown: Markdown = None,
) -> None:
    """Traffic whose topic changes, through the loop's own store, policy, training and gate: static draft, loop, loop without
    replay, that without a gate, and the best that one run could be. Nothing is served: greedy text is the same whatever drafts
    it."""
    from service.evaluation.bench import host
    from service.evaluation.charts import draw_lines
    from service.evaluation.stream_result import parts_of
    from service.evaluation.stream import run_stream

    settings = settings_from(config, models__target=target, models__draft=draft)
    models, general = pair_and_general(settings)
    with stages("stream") as on_step:
        found = run_stream(
            settings,
            models,
            general,
            parts_of(files),
            window=window,
            max_tokens=max_tokens,
            rows=rows,
            tagged=not untagged,
            on_step=on_step,
        )
    title = "Stream " + ", ".join(f"{part.topic} ({len(part.lines)})" for part in found.parts)
    command = again(context)
    head = {"command": command, "machine": host.describe(), "training": settings.training.model_dump()}
    write_json(json, head | found.plain())
    tell("stream", title, command, found.columns, found.cells(), markdown)
    if png is not None:
        levels = [
            (part.topic, len(part.lines), best.agreement) for part, best in zip(found.parts, found.best, strict=True)
        ]
        lines = {arm: found.moving(arm) for arm in found.courses}
        draw_lines(png, lines, levels, title, f"agreement, mean over {window} requests")


@eval_.command()
def score(
    adapter: Annotated[
        list[str] | None, typer.Option(help='Adapter version, or "bare"; repeat for more. Without: bare and active.')
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
    from service.app import open_stores
    from service.evaluation.score import run_score

    settings = settings_from(config, models__target=target, models__draft=draft)
    models = pair_folders(settings)
    lengths = _lengths(k)
    stores = open_stores(settings)
    try:
        versions = [_version(one) for one in adapter] if adapter else [BARE_DRAFT, *_active(stores, models[1])]
        with progress("scoring") as bar:
            found = run_score(
                stores,
                models,
                versions,
                lengths,
                kept=vocabulary,
                limit=limit,
                rows=rows if speed else None,
                on_step=bar,
            )
    finally:
        stores.close()
    lines = [
        (
            one.adapter or "bare",
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
    write_json(
        json, {"rows": rows if speed else None, "vocabulary": vocabulary, "scores": [one.plain() for one in found]}
    )


def _active(stores: Stores, folder: Path) -> list[int]:
    from service.models.fingerprint import model_fingerprint

    active = stores.adapters.active(model_fingerprint(folder))
    return [] if active is None else [active.id]


def _version(adapter: str) -> int:
    if adapter == "bare":
        return BARE_DRAFT
    if not adapter.isdigit():
        raise BadRequest(f"--adapter takes a version or bare, not {adapter!r}", field="adapter")
    return int(adapter)


def _lengths(k: str) -> list[int]:
    try:
        return sorted({int(number) for number in k.split(",")})
    except ValueError as error:
        raise BadRequest(f"--k takes numbers separated by commas, not {k!r}", field="k") from error
