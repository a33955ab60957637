"""`eval cycle`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.console import out, stages, table, write_json
from service.cli.models import pair_folders
from service.cli.options import Config, Json, settings_from

if TYPE_CHECKING:
    from service.evaluation.prompts import PromptLine


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
    practice_minutes: Annotated[
        float | None,
        typer.Option(min=0.1, help="Train on text that the target writes, for so long, and not on the log."),
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
    tests = _test_prompts(test, test_limit)
    with stages("cycle") as on_progress:
        found = run_cycle(
            settings,
            pair_folders(settings),
            read_prompts(train, limit=train_limit),
            tests,
            replay=replay,
            practice_minutes=practice_minutes,
            beside=beside,
            keep=keep,
            on_progress=on_progress,
        )
    _show(found)
    write_json(json, found)


def _show(found: dict[str, Any]) -> None:
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
    if client := found.get("beside"):
        before, during = client["before"], client["during"]
        out.print(f"one client: {before:.1f} tokens/s before, {during:.1f} during the run", highlight=False)


def _test_prompts(files: list[Path], limit: int | None) -> dict[str, list[PromptLine]]:
    """Prompts of FILE or FILE:DOMAIN, by the name of the domain or else of the file."""
    from service.evaluation.prompts import read_prompts

    found: dict[str, list[PromptLine]] = {}
    for item in files:
        path, _, domain = str(item).rpartition(":") if ":" in str(item) and not item.is_file() else (str(item), "", "")
        name = domain or Path(path).name.removesuffix(".jsonl")
        found[name] = read_prompts(Path(path), domain=domain or None, limit=limit)
    return found
