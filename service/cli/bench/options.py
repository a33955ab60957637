"""Options and steps shared by the benchmarks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.console import stages, table, write_json
from service.cli.models import pair_folders
from service.cli.options import settings_from
from service.core import BadRequest
from service.settings import Settings

if TYPE_CHECKING:
    from service.evaluation.bench.adapter import BenchAdapter
    from service.evaluation.bench.report import Report
    from service.evaluation.progress import OnProgress

Domain = Annotated[str | None, typer.Option(help="Only prompts of this domain.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use only the first N prompts.")]
Version = Annotated[int | None, typer.Option("--adapter", min=1, help="Adapter version for the arms that need one.")]
AdaptOn = Annotated[
    Path | None, typer.Option(help="Train the adapter first: serve these prompts through the real loop.")
]
AdaptLimit = Annotated[int | None, typer.Option(min=1, help="Serve only the first N of them.")]
MlxLmDraftOption = Annotated[
    str | None,
    typer.Option("--mlx-lm-draft", help="Draft for mlx-lm, if it cannot run ours or should use another."),
]
Arms = Annotated[str | None, typer.Option(help="Only these arms, separated by commas; plain is always included.")]
Shape = Annotated[
    str | None,
    typer.Option(
        help="135m, 1b, 3b, 8b or 70b: the pair padded to that size, in bfloat16. Llamas with three heads a KV head."
    ),
]
Bits = Annotated[int | None, typer.Option(min=2, max=8, help="With --shape: bits per quantised weight.")]
Png = Annotated[Path | None, typer.Option("--png", help="Also draw the result.")]


def show(report: Report, json: Path | None, png: Path | None, markdown: Path | None) -> None:
    """Prints the table and writes the files with a given path. Raises OSError."""
    from service.evaluation.bench.report import publish

    table(report.title, report.columns, report.rows)
    write_json(json, report.as_json())
    publish(report, png=png, markdown=markdown)


@contextmanager
def adapter_of(
    settings: Settings, version: int | None, source: Path | None, limit: int | None, on_progress: OnProgress
) -> Generator[BenchAdapter | None]:
    """The adapter requested by --adapter (`version`) or --adapt-on (`source`) and --adapt-limit, while the block runs;
    None if none was
    requested. Raises BadRequest for conflicting options, RedraftError if it is unavailable."""
    from service.evaluation.bench.adapter import registered_adapter, trained_adapter
    from service.evaluation.prompts import read_prompts

    if version is not None and source is not None:
        raise BadRequest("give either --adapter or --adapt-on", field="adapter")
    if limit is not None and source is None:
        raise BadRequest("--adapt-limit requires --adapt-on", field="adapt_limit")
    if source is not None:
        with trained_adapter(settings, source.name, read_prompts(source, limit=limit), on_progress) as made:
            yield made
    else:
        yield registered_adapter(settings, version) if version is not None else None


def models_of(
    config: Path | None, target: str | None, draft: str | None, shape: str | None, bits: int | None
) -> Settings:
    """The settings with the requested models; a padded pair is made first. Raises BadRequest for conflicting options,
    ModelError."""
    from service.evaluation.bench.padded_models import padded_pair

    settings = settings_from(config, models__target=target, models__draft=draft)
    if shape is None:
        if bits is not None:
            raise BadRequest("--bits requires --shape", field="bits")
        return settings
    with stages("bench") as on_progress:
        made = padded_pair(pair_folders(settings), settings.home, shape, bits, on_progress)
    return settings_from(config, models__target=str(made[0]), models__draft=str(made[1]))


def prompts_title(prompts: Path, domain: str | None, limit: int | None, max_tokens: int) -> str:
    """For a title: the prompts."""
    of = f"the first {limit} prompts" if limit else "all prompts"
    return f"{of} of {prompts.name}{f' ({domain})' if domain else ''}, up to {max_tokens} tokens"


def shape_title(shape: str | None, bits: int | None) -> str:
    """For a title: the shape that the pair was padded to."""
    if shape is None:
        return ""
    return f", shape {shape} ({f'{bits} bits' if bits else 'bfloat16'}): a small pair's acceptance at a large target's cost"


def draft_title(draft: str | None) -> str:
    """For a title: a draft that was named."""
    return "" if draft is None else f", draft {Path(draft).name}"


def adapter_title(adapter: BenchAdapter | None) -> str:
    """For a title: the adapter."""
    if adapter is None:
        return ""
    trained_on, version = adapter.origin.get("trained_on"), adapter.origin.get("version")
    return f", adapter {version}" if trained_on is None else f", adapted on {adapter.origin['prompts']} of {trained_on}"


def names(text: str | None) -> list[str] | None:
    """Names that are separated by commas; None for none."""
    return None if text is None else [name.strip() for name in text.split(",")]


def counts(text: str, field: str) -> list[int]:
    """Distinct positive numbers, ascending. Raises BadRequest naming the option `field`."""
    try:
        found = sorted({int(number) for number in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise BadRequest(f"--{field} takes positive numbers separated by commas, not {text!r}", field=field)
    return found
