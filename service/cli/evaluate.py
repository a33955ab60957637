"""`demo` and `eval`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.console import out, progress, stages, table, write_json
from service.cli.models import pair_folders
from service.cli.options import Config, Draft, Json, Target, settings_from
from service.core import BARE_DRAFT, BadRequest, RedraftError

if TYPE_CHECKING:
    from service.evaluation.prompts import PromptLine

eval_ = typer.Typer(name="eval", help="Measure a draft, or a whole cycle of the loop.", no_args_is_help=True)
Prompts = Annotated[Path, typer.Option(help="JSON lines with id, domain, prompt.")]


Rows = Annotated[int, typer.Option(min=1, help="Prompts the target answers together; an accelerator takes hundreds.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Output tokens of one prompt, at most.")]


def test_prompts(files: list[Path], limit: int | None) -> dict[str, list[PromptLine]]:
    """FILE or FILE:DOMAIN, by the domain's or the file's name."""
    from service.evaluation.prompts import read_prompts

    found: dict[str, list[PromptLine]] = {}
    for item in files:
        path, _, domain = str(item).rpartition(":") if ":" in str(item) and not item.is_file() else (str(item), "", "")
        name = domain or Path(path).name.removesuffix(".jsonl")
        found[name] = read_prompts(Path(path), domain=domain or None, limit=limit)
    return found


def demo(
    full: Annotated[
        bool, typer.Option("--full", help="More traffic, a longer run, more held-out prompts: 10 minutes on two cores.")
    ] = False,
    prompts: Annotated[Path | None, typer.Option(help="Traffic of your own, as JSON lines.")] = None,
    png: Annotated[Path, typer.Option(help="Where to draw the result.")] = Path("redraft-demo.png"),
    keep: Annotated[Path | None, typer.Option(help="Leave the server's log, database and adapters here.")] = None,
    config: Config = None,
    json: Json = None,
) -> None:
    """Show the whole loop on a real server: traffic, failures logged, draft retrained, proven, swapped in live.

    Takes about four minutes on two cores. Exits with 1 when an answer differs from what the target alone says, when a request
    failed, or when no adapter was promoted.
    """
    from service.evaluation import demo as demonstration
    from service.evaluation.charts import draw
    from service.evaluation.prompts import read_prompts

    settings = settings_from(config)
    lines = read_prompts(prompts) if prompts else None
    with stages("redraft demo") as on_progress:
        report = demonstration.run_demo(
            settings,
            pair_folders(settings),
            scale=demonstration.FULL if full else demonstration.QUICK,
            prompts=lines,
            on_progress=on_progress,
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
    write_json(json, report.plain())
    draw(
        png,
        {
            "agreement, held-out": {"before": agreement["before"], "after": agreement["after"]},
            "tokens per target call (K = 4)": {"before": calls["before"], "after": calls["after"]},
            "tokens/s, one stream": bars,
        },
        "Redraft demo",
    )
    out.print(f"drawn in {png.resolve()}", highlight=False, soft_wrap=True)
    if problems := report.problems():
        raise RedraftError("; ".join(problems))


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
    """How well the draft predicts the target's greedy text (128 tokens a prompt, decoded once and cached)."""
    from service.app import open_stores
    from service.engine.adapters import load, served
    from service.evaluation.agreement import measure
    from service.evaluation.target_outputs import greedy_generations
    from service.evaluation.prompts import read_prompts
    from service.models.pair import load_pair

    settings = settings_from(config, models__target=target, models__draft=draft)
    lines = read_prompts(prompts, domain=domain, limit=limit)
    pair = load_pair(*pair_folders(settings))
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
        generations = greedy_generations(pair, lines, settings.home, on_step=bar)
    found, _ = measure(model, generations, pair.vocabulary)
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
    beside: Annotated[
        bool,
        typer.Option(
            "--beside", help="Let one client go on asking during the run, and report its speed before and during it."
        ),
    ] = False,
    keep: Annotated[Path | None, typer.Option(help="Leave the server's log, database and adapters here.")] = None,
    config: Config = None,
    json: Json = None,
) -> None:
    """Serve prompts through the real loop, train once at the given settings, gate, and measure before and after."""
    from service.evaluation.cycle import run_cycle
    from service.evaluation.prompts import read_prompts

    settings = settings_from(config)
    tests = test_prompts(test, test_limit)
    with stages("cycle") as on_step:
        found = run_cycle(
            settings,
            pair_folders(settings),
            read_prompts(train, limit=train_limit),
            tests,
            replay=replay,
            beside=beside,
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
    if beside:
        before, during = (found["beside"][when] for when in ("before", "during"))
        out.print(f"one client: {before:.1f} tokens/s before, {during:.1f} during the run", highlight=False)
    write_json(json, found)
