"""`demo` and `eval`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from service.cli.console import err, out, progress, stages, table, write_json
from service.cli.options import Config, Draft, Json, Target, settings_from
from service.core import BARE_DRAFT, BadRequest, RedraftError
from service.settings import Settings

if TYPE_CHECKING:
    from service.app import Stores
    from service.evaluation.prompts import PromptLine

eval_ = typer.Typer(name="eval", help="Measure a draft, or a whole cycle of the loop.", no_args_is_help=True)
Prompts = Annotated[Path, typer.Option(help="JSON lines with id, domain, prompt.")]


Rows = Annotated[int, typer.Option(min=1, help="Prompts the target answers together; an accelerator takes hundreds.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Output tokens of one prompt, at most.")]


def _pair_folders(settings: Settings) -> tuple[Path, Path]:
    return _folders(settings)[0]


def _folders(settings: Settings) -> tuple[tuple[Path, Path], Path | None]:
    """Target and draft, and the general replay set."""
    from service.app import resolve_models

    folders = resolve_models(settings, lambda step: err.print(step, highlight=False))
    if folders.draft is None:
        raise RedraftError(f"no draft for {settings.models.target}: name one with --draft, or make one (make-draft)")
    return (folders.target, folders.draft), folders.general


def _tests(files: list[Path], limit: int | None) -> dict[str, list[PromptLine]]:
    """FILE or FILE:DOMAIN, by the domain's or the file's name."""
    from service.evaluation.prompts import read_prompts

    found: dict[str, list[PromptLine]] = {}
    for item in files:
        path, _, domain = str(item).rpartition(":") if ":" in str(item) and not item.is_file() else (str(item), "", "")
        name = domain or Path(path).name.removesuffix(".jsonl")
        found[name] = read_prompts(Path(path), domain=domain or None, limit=limit)
    return found


def _again(context: typer.Context) -> str:
    """The command line that measures this again: options as given, files by their names alone, without where results go."""
    words = ["redraft", "eval", context.info_name or ""]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name in {"json", "png", "markdown"} or source is None or source.name != "COMMANDLINE":
            continue
        value: object = context.params[name]
        for one in cast("list[object]", value) if isinstance(value, list | tuple) else [value]:
            flag = [parameter.opts[0]] if parameter.param_type_name == "option" else []
            words += [*flag, *([] if one is True else [str(one).rpartition("/")[2]])]
    return shlex.join(words)


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="A shorter show.")] = False,
    prompts: Annotated[Path | None, typer.Option(help="Traffic of your own, as JSON lines.")] = None,
    png: Annotated[Path, typer.Option(help="Where to draw the result.")] = Path("redraft-demo.png"),
    keep: Annotated[Path | None, typer.Option(help="Leave the server's log, database and adapters here.")] = None,
    config: Config = None,
    json: Json = None,
) -> None:
    """Show the whole loop on a real server: traffic, failures logged, draft retrained, proven, swapped in live."""
    from service.evaluation.chart import draw
    from service.evaluation.demo import FULL, QUICK, run_demo
    from service.evaluation.prompts import read_prompts

    settings = settings_from(config)
    lines = read_prompts(prompts) if prompts else None
    with progress("redraft demo") as bar:
        told: set[str] = set()

        def on_step(stage: str, done: int, of: int) -> None:
            bar(done, of or done, stage)
            if (key := stage.partition(",")[0]) not in told:
                told.add(key)
                err.print(key, highlight=False)

        report = run_demo(
            settings,
            _pair_folders(settings),
            scale=QUICK if quick else FULL,
            prompts=lines,
            on_step=on_step,
            keep=keep,
        )
    agreement, calls, speed = report.agreement, report.tokens_per_call, report.tokens_per_second
    bars = {"plain": speed["plain"], "before": speed["before"], "after": speed["after"]}
    rows: list[tuple[str, object]] = [
        ("requests served, failed", f"{report.requests}, {report.failed_requests}"),
        ("answers that differ from the target alone", report.greedy_mismatches),
        ("adapters promoted and swapped in live", report.promotions),
        ("agreement on held-out prompts", f"{agreement['before']:.3f} -> {agreement['after']:.3f}"),
        ("  lower 90 % bound of the gain", f"{agreement['low90']:+.3f}"),
        ("tokens per target call (K = 4)", f"{calls['before']:.2f} -> {calls['after']:.2f}"),
        ("tokens/s, one stream: plain, before, after", ", ".join(f"{value:.1f}" for value in bars.values())),
        (
            "longest gap in a stream, without and at the swap",
            f"{report.longest_gap_ms['without_swap']:.0f} ms, {report.longest_gap_ms['with_swap']:.0f} ms",
        ),
        ("seconds", f"{report.seconds:.0f}"),
    ]
    table("redraft demo", ("what", "measured"), rows)
    top = max(bars.values())
    for name, value in bars.items():
        out.print(f"{name:>7} {'█' * round(40 * value / top)} {value:.1f} tokens/s", highlight=False)
    draw(
        png,
        {
            "agreement, held-out": {"before": agreement["before"], "after": agreement["after"]},
            "tokens per target call (K = 4)": {"before": calls["before"], "after": calls["after"]},
            "tokens/s, one stream": bars,
        },
        "Redraft demo",
    )
    out.print(f"drawn in {png}", highlight=False, soft_wrap=True)
    write_json(json, report.plain())


@eval_.command()
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
    """How well the draft predicts the target's greedy text (128 tokens a prompt, made once and kept)."""
    from service.app import open_stores
    from service.engine.draft import load, served
    from service.evaluation.agreement import measure
    from service.evaluation.outputs import greedy_generations
    from service.evaluation.prompts import read_prompts
    from service.models.pair import load_pair

    settings = settings_from(config, models__target=target, models__draft=draft)
    lines = read_prompts(prompts, domain=domain, limit=limit)
    pair = load_pair(*_pair_folders(settings))
    assert pair.draft is not None
    model = served(pair.draft).model
    if adapter != "none":
        if not adapter.isdigit():
            raise BadRequest(f"--adapter takes a version or none, not {adapter!r}", field="adapter")
        if int(adapter) != BARE_DRAFT:
            stores = open_stores(settings)
            try:
                ref = stores.adapters.get(int(adapter))
            finally:
                stores.close()
            model = load(model, ref, pair.provenance.draft).model
    with progress("greedy text") as bar:
        told = greedy_generations(pair, lines, settings.home, on_step=bar)
    found, _ = measure(model, told, pair.vocabulary)
    rows: list[tuple[str, object]] = [
        ("agreement with the target's greedy text", f"{found.agreement:.4f}"),
        ("tokens per target call (K = 4)", f"{found.tokens_per_call:.3f}"),
        ("overlap, sum of min(p, q) at T = 1", f"{found.overlap:.4f}"),
        ("tokens", found.tokens),
        ("prompts", found.prompts),
    ]
    table("agreement", ("what", "measured"), rows)
    write_json(json, found.plain())


@eval_.command()
def cycle(
    train: Annotated[Path, typer.Option(help="Prompts to serve and learn from.")],
    train_limit: Annotated[int, typer.Option(min=1, help="Serve the first so many.")],
    test: Annotated[
        list[Path], typer.Option(help="Prompts to measure on; repeat for more. FILE:DOMAIN picks one domain.")
    ],
    test_limit: Annotated[int | None, typer.Option(min=1, help="Of each test file, only the first so many.")] = None,
    replay: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Another replay share than the settings'.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Leave the server's log, database and adapters here.")] = None,
    config: Config = None,
    json: Json = None,
) -> None:
    """Serve prompts through the real loop, train once at the given settings, gate, and measure before and after."""
    from service.evaluation.cycle import run_cycle
    from service.evaluation.prompts import read_prompts

    settings = settings_from(config)
    tests = _tests(test, test_limit)
    with stages("cycle") as on_step:
        found = run_cycle(
            settings,
            _pair_folders(settings),
            read_prompts(train, limit=train_limit),
            tests,
            replay=replay,
            keep=keep,
            on_step=on_step,
        )
    rows = [
        (
            name,
            f"{both['before']['agreement']:.4f} -> {both['after']['agreement']:.4f}",
            f"{both['before']['tokens_per_call']:.2f} -> {both['after']['tokens_per_call']:.2f}",
            f"{both['before']['overlap']:.3f} -> {both['after']['overlap']:.3f}",
        )
        for name, both in found["tests"].items()
    ]
    table("one cycle", ("test", "agreement", "tokens per call (K = 4)", "overlap"), rows)
    verdict = found["verdict"]
    out.print(
        f"{found['state']}: {verdict['reason'] if verdict else ''}; {found['train_seconds']:.0f} s", highlight=False
    )
    write_json(json, found)


@eval_.command()
def ablate(
    context: typer.Context,
    train: Annotated[Path, typer.Option(help="Prompts to learn from.")],
    test: Annotated[
        list[Path], typer.Option(help="Prompts to measure on; repeat for more. FILE:DOMAIN picks one domain.")
    ],
    train_limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many to learn from.")] = None,
    test_limit: Annotated[int | None, typer.Option(min=1, help="Of each test file, only the first so many.")] = None,
    cases: Annotated[int, typer.Option(min=1, help="Generations to learn from, where that is not what varies.")] = 200,
    only: Annotated[str | None, typer.Option(help="Only these tables, separated by commas.")] = None,
    max_tokens: MaxTokens = 128,
    rows: Rows = 16,
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    json: Json = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Also put the tables into this document.")] = None,
) -> None:
    """The training recipe, one thing varied at a time: loss, positions, rank, rate, replay, targets, cases. A row is written as
    soon as it is there."""
    from service.evaluation.ablate import run_ablate
    from service.evaluation.bench import host
    from service.evaluation.bench.report import Report, publish
    from service.evaluation.prompts import read_prompts

    settings = settings_from(config, models__target=target, models__draft=draft)
    models, general = _folders(settings)
    names = None if only is None else [name.strip() for name in only.split(",")]
    command = _again(context)
    head = {"command": command, "machine": host.describe(), "training": settings.training.model_dump()}
    found: dict[str, dict[str, object]] = {}
    with stages("ablate") as on_step:
        for outcome in run_ablate(
            settings,
            models,
            general,
            read_prompts(train, limit=train_limit),
            _tests(test, test_limit),
            cases=cases,
            only=names,
            max_tokens=max_tokens,
            rows=rows,
            on_step=on_step,
        ):
            name, title = outcome.table.name, f"{outcome.title} of {train.name.removesuffix('.jsonl')}"
            found[name] = outcome.plain()
            write_json(json, head | {"tables": found})
            report = Report(name, title, command, outcome.columns, outcome.cells(), found[name], {})
            publish(report, json=None, png=None, markdown=markdown)
            if outcome.complete:
                table(title, outcome.columns, outcome.cells())


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
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Also put the result into this document.")] = None,
) -> None:
    """Traffic whose topic changes, through the loop's own store, policy, training and gate: static draft, loop, loop without
    replay, and the best of each topic. Nothing is served: greedy text is the same whatever drafts it."""
    from service.evaluation.bench import host
    from service.evaluation.bench.report import Report, publish
    from service.evaluation.chart import draw_lines
    from service.evaluation.stream import parts_of, run_stream

    settings = settings_from(config, models__target=target, models__draft=draft)
    models, general = _folders(settings)
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
    command = _again(context)
    head = {"command": command, "machine": host.describe(), "training": settings.training.model_dump()}
    table(title, found.columns, found.cells())
    write_json(json, head | found.plain())
    publish(
        Report("stream", title, command, found.columns, found.cells(), {}, {}), json=None, png=None, markdown=markdown
    )
    if png is not None:
        levels = [(part.topic, len(part.lines), found.best[part.topic][0]) for part in found.parts]
        lines = {arm: found.moving(arm) for arm in found.courses}
        draw_lines(png, lines, levels, title, f"agreement, mean over {window} requests")


@eval_.command()
def score(
    adapter: Annotated[
        list[str] | None, typer.Option(help='Adapter version, or "bare"; repeat for more. Without: bare and active.')
    ] = None,
    k: Annotated[str, typer.Option(help="Draft lengths, separated by commas.")] = "1,2,3,4",
    vocabulary: Annotated[
        int | None, typer.Option(min=0, help="Let the draft propose so many tokens beside a row's own; 0: all.")
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
    """What adapters would be worth on the logged traffic, by draft length and sampling setting. Reads only."""
    from service.app import open_stores
    from service.evaluation.forecasts import run_score

    settings = settings_from(config, models__target=target, models__draft=draft)
    models = _pair_folders(settings)
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
    told = [
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
    columns = ("adapter", "sampling (generations)", "K", "tokens per call", "kept, by position", "tokens/s, predicted")
    table("logged, held-out generations", columns, told)
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
