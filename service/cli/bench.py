"""`bench`: figures that anybody can measure again. REDRAFT_BLAS=shipped before a command measures MLX's own BLAS."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.console import stages, table
from service.cli.models import model_folders, pair_folders
from service.cli.options import Config, Draft, Json, Target, again, settings_from
from service.core import BadRequest
from service.settings import Settings

if TYPE_CHECKING:
    from service.evaluation.bench.adapter import Adapter
    from service.evaluation.bench.report import Report
    from service.evaluation.training_run import Step

bench = typer.Typer(
    name="bench",
    help="Measure speed, contenders taking turns. With REDRAFT_BLAS=shipped in the environment: on the BLAS that MLX ships.",
    no_args_is_help=True,
)
Prompts = Annotated[Path, typer.Option(help="JSON lines with id, domain, prompt.")]
Domain = Annotated[str | None, typer.Option(help="Only prompts of this domain.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first so many.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Output tokens of one prompt, at most.")]
Version = Annotated[int | None, typer.Option("--adapter", min=1, help="Adapter version for the arms that need one.")]
AdaptOn = Annotated[
    Path | None, typer.Option(help="Train the adapter first: serve these prompts through the real loop.")
]
AdaptLimit = Annotated[int | None, typer.Option(min=1, help="Serve only the first so many of them.")]
Theirs = Annotated[
    str | None,
    typer.Option(
        "--mlx-lm-draft", help="What mlx-lm drafts with, where it cannot run our draft or is to have another."
    ),
]
Arms = Annotated[str | None, typer.Option(help="Only these, separated by commas; plain always takes part.")]
Shape = Annotated[
    str | None,
    typer.Option(
        help="135m, 1b, 3b, 8b or 70b: the bundled pair padded to that size, in bfloat16. Instead of --target, --draft."
    ),
]
Bits = Annotated[int | None, typer.Option(min=2, max=8, help="With --shape: quantised to so many bits a weight.")]
Png = Annotated[Path | None, typer.Option("--png", help="Also draw the result.")]
Markdown = Annotated[Path | None, typer.Option("--markdown", help="Also put the result into this document.")]


@bench.command()
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
    mlx_lm_draft: Theirs = None,
    shape: Shape = None,
    bits: Bits = None,
    json: Json = None,
    png: Png = None,
    markdown: Markdown = None,
) -> None:
    """One stream: this engine plain, with its draft, with the adapted draft, and mlx-lm on the same weights at its best K."""
    from service.evaluation.bench.decode_arms import ARMS, choose
    from service.evaluation.bench.decode import Peer, Task, run_decode
    from service.evaluation.prompts import read_prompts

    settings = models_of(config, target, draft, shape, bits)
    names = _names(arms)
    choose(names, list(ARMS))
    task = Task(read_prompts(prompts, domain=domain, limit=limit), max_tokens, temperature, k)
    title = f"One stream: {_about(prompts, domain, limit, max_tokens)}, T = {temperature:g}" + (
        f", K = {k}" if k else ""
    )
    title += _drafting(draft) + of_shape(shape, bits)
    with ExitStack() as open_until_done:
        on_step = open_until_done.enter_context(stages("bench decode"))
        adapted = open_until_done.enter_context(_adapter(settings, adapter, adapt_on, adapt_limit, on_step))
        peer = None
        if mlx_lm_draft is not None:
            others = settings_from(config, models__target=target, models__draft=mlx_lm_draft)
            learnt = None
            if names is None or "mlx_lm_spec_adapted" in names:
                # From the same prompts; a version of ours is no version of it.
                learnt = open_until_done.enter_context(_adapter(others, None, adapt_on, adapt_limit, on_step))
            peer = Peer(pair_folders(others)[1], learnt)
        folders = model_folders(settings)
        report = run_decode(
            (folders.target, folders.draft),
            settings.engine,
            task,
            title=title + _adapted(adapted),
            command=again(context),
            arms=names,
            adapter=adapted,
            peer=peer,
            on_step=on_step,
        )
    show(report, json, png, markdown)


@bench.command()
def serve(
    context: typer.Context,
    prompts: Prompts,
    clients: Annotated[str, typer.Option(help="Numbers of clients at a time, separated by commas.")] = "1,4,16",
    turns: Annotated[int, typer.Option(min=1, help="How often every server is measured at every number.")] = 3,
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
    mlx_lm_draft: Theirs = None,
    shape: Shape = None,
    bits: Bits = None,
    json: Json = None,
    png: Png = None,
    markdown: Markdown = None,
) -> None:
    """Clients over HTTP, greedy: this server plain, with its draft, with the adapted draft, and mlx_lm.server with and without
    the draft. All servers are up at the same time."""
    from service.evaluation.bench.decode_arms import choose
    from service.evaluation.bench.servers import HOUSES
    from service.evaluation.bench.serve import Load, run_serve
    from service.evaluation.prompts import read_prompts

    settings = models_of(config, target, draft, shape, bits)
    names = _names(arms)
    choose(names, list(HOUSES))
    load = Load(read_prompts(prompts, domain=domain, limit=limit), counts(clients, "clients"), turns, max_tokens)
    load.cells()
    title = f"{clients} clients over HTTP: {_about(prompts, domain, limit, max_tokens)}"
    title += _drafting(draft) + of_shape(shape, bits)
    with stages("bench serve") as on_step, _adapter(settings, adapter, adapt_on, adapt_limit, on_step) as adapted:
        folders = model_folders(settings)
        theirs = None
        if mlx_lm_draft is not None:
            theirs = pair_folders(settings_from(config, models__target=target, models__draft=mlx_lm_draft))[1]
        report = run_serve(
            settings,
            (folders.target, folders.draft),
            load,
            title=title + _adapted(adapted),
            command=again(context),
            arms=names,
            adapter=adapted,
            theirs=theirs,
            on_step=on_step,
        )
    show(report, json, png, markdown)


def show(report: Report, json: Path | None, png: Path | None, markdown: Path | None) -> None:
    """The table, and the files that were asked for."""
    from service.evaluation.bench.report import publish

    table(report.title, report.columns, report.rows)
    publish(report, json=json, png=png, markdown=markdown)


@contextmanager
def _adapter(
    settings: Settings, version: int | None, source: Path | None, limit: int | None, on_step: Step
) -> Generator[Adapter | None]:
    from service.evaluation.bench.adapter import registered, trained
    from service.evaluation.prompts import read_prompts

    if version is not None and source is not None:
        raise BadRequest("say one of --adapter and --adapt-on", field="adapter")
    if limit is not None and source is None:
        raise BadRequest("--adapt-limit goes with --adapt-on", field="adapt_limit")
    if source is not None:
        with trained(settings, source.name, read_prompts(source, limit=limit), on_step) as made:
            yield made
    else:
        yield registered(settings, version) if version is not None else None


def _about(prompts: Path, domain: str | None, limit: int | None, max_tokens: int) -> str:
    of = f"the first {limit} prompts" if limit else "all prompts"
    return f"{of} of {prompts.name}{f' ({domain})' if domain else ''}, up to {max_tokens} tokens"


def models_of(
    config: Path | None, target: str | None, draft: str | None, shape: str | None, bits: int | None
) -> Settings:
    """The settings with the models that were asked for; a padded pair is made first."""
    from service.evaluation.bench.padded_models import padded_pair

    settings = settings_from(config, models__target=target, models__draft=draft)
    if shape is None:
        if bits is not None:
            raise BadRequest("--bits goes with --shape", field="bits")
        return settings
    if target is not None or draft is not None:
        raise BadRequest("say --shape, or --target and --draft", field="shape")
    with stages("bench") as on_step:
        made = padded_pair(pair_folders(settings), settings.home, shape, bits, on_step)
    return settings_from(config, models__target=str(made[0]), models__draft=str(made[1]))


def of_shape(shape: str | None, bits: int | None) -> str:
    """For a title: the shape that the bundled pair was padded to."""
    if shape is None:
        return ""
    return f", shape {shape} ({f'{bits} bits' if bits else 'bfloat16'}): the bundled pair's acceptance at a large target's cost"


def _drafting(draft: str | None) -> str:
    """A named draft is another measurement than the usual one's."""
    return "" if draft is None else f", draft {Path(draft).name}"


def _adapted(adapter: Adapter | None) -> str:
    if adapter is None:
        return ""
    trained_on, version = adapter.told.get("trained_on"), adapter.told.get("version")
    return f", adapter {version}" if trained_on is None else f", adapted on {adapter.told['prompts']} of {trained_on}"


def _names(arms: str | None) -> list[str] | None:
    return None if arms is None else [name.strip() for name in arms.split(",")]


def counts(text: str, field: str) -> list[int]:
    """Different numbers from 1 on, ascending. Raises BadRequest naming the option `field`."""
    try:
        found = sorted({int(number) for number in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise BadRequest(f"--{field} takes numbers from 1 on, separated by commas, not {text!r}", field=field)
    return found
