"""`runs`: training runs in the log or of a server, without loading a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.console import table, write_json
from service.cli.operate import read
from service.cli.options import Config, Json, Remote, adapter_name, settings_from

if TYPE_CHECKING:
    from service.api.schemas import ProgressAnswer, RunAnswer, VerdictAnswer

GIVEN_BACK = "its texts were given back"

runs = typer.Typer(help="Training runs.", no_args_is_help=True)


@runs.command("list")
def list_runs(
    limit: Annotated[int, typer.Option(min=1, help="Maximum number shown, newest first.")] = 20,
    before: Annotated[int | None, typer.Option(min=1, help="Only runs before this one.")] = None,
    url: Remote = None,
    config: Config = None,
    json: Json = None,
) -> None:
    """List training runs, newest first."""
    from service.api.schemas import RunAnswer
    from service.store.stores import open_stores

    settings = settings_from(config)
    if url is not None:
        found = _latest(url, settings.home, limit, before)
    else:
        stores = open_stores(settings)
        try:
            found = [RunAnswer.model_validate(run) for run in stores.runs.latest(limit, before)]
        finally:
            stores.close()
    rows = [
        (r.id, r.state.words, r.trigger, f"{r.created_at:%Y-%m-%d %H:%M}", adapter_name(r.parent), r.cases, r.generations,
         r.adapter or "", outcome(r))
        for r in found
    ]  # fmt: skip
    columns = ("id", "state", "trigger", "started", "on top of", "cases", "generations", "adapter", "outcome")
    table("training runs", columns, rows)
    write_json(json, {"runs": [run.model_dump(mode="json") for run in found]})


def _latest(url: str, home: Path, limit: int, before: int | None) -> list[RunAnswer]:
    """The newest runs of a server, page by page."""
    from service.api.runs import MAX_RUNS
    from service.api.schemas import RunsAnswer

    found: list[RunAnswer] = []
    while len(found) < limit:
        asked = min(limit - len(found), MAX_RUNS)
        after = "" if before is None else f"&before={before}"
        page = read(url, f"/runs?limit={asked}{after}", RunsAnswer, home=home).runs
        found += page
        if len(page) < asked:
            break
        before = page[-1].id
    return found


@runs.command()
def show(
    run: Annotated[int, typer.Argument(min=1, help="Id of the run.")],
    url: Remote = None,
    config: Config = None,
    json: Json = None,
) -> None:
    """Show one training run: its progress, and its verdict by domain."""
    from service.api.schemas import RunAnswer
    from service.store.stores import open_stores

    settings = settings_from(config)
    if url is not None:
        found = read(url, f"/runs/{run}", RunAnswer, home=settings.home)
    else:
        stores = open_stores(settings)
        try:
            found = RunAnswer.model_validate(stores.runs.get(run))
        finally:
            stores.close()
    rows: list[tuple[str, object]] = [
        ("state", found.state.words),
        ("trigger", found.trigger),
        ("started", f"{found.created_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("ended", "" if found.finished_at is None else f"{found.finished_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("on top of adapter", adapter_name(found.parent)),
        ("failure cases", found.cases),
        ("generations", found.generations),
        ("progress", _progress(found.progress)),
        ("adapter it made", found.adapter or ""),
        ("outcome", outcome(found)),
        *_verdict_rows(found.verdict),
    ]
    table(f"training run {run}", ("what", "value"), rows)
    write_json(json, found.model_dump(mode="json"))


def outcome(run: RunAnswer) -> str:
    """The reason for a run's outcome: the gate's, or the error with the note that its texts can be used again; empty
    while it runs."""
    if run.verdict is not None:
        return run.verdict.reason
    return "; ".join(filter(None, [run.error, GIVEN_BACK if run.texts_given_back else None]))


def _progress(progress: ProgressAnswer) -> str:
    parts = [f"step {progress.step} of {progress.steps}"]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.3f} nats")
    if progress.tokens_per_second is not None:
        parts.append(f"{progress.tokens_per_second:.0f} tokens/s")
    if progress.paused is not None:
        parts.append(f"paused: {progress.paused}")
    return ", ".join(parts)


def _verdict_rows(verdict: VerdictAnswer | None) -> list[tuple[str, object]]:
    if verdict is None:
        return []
    rows: list[tuple[str, object]] = [
        ("predicted gain (90 % interval)", _gain(verdict.gain, verdict.low90, verdict.high90)),
        ("measured on", f"{verdict.prompts} prompts, {verdict.tokens} tokens"),
    ]
    if verdict.p_value is not None and verdict.level is not None:
        rows.append(("p-value (level of the test)", f"{verdict.p_value:.2g} ({verdict.level:.2g})"))
    return rows + [
        (f"gain in {name or 'no domain'}", _gain(*gain[:3])) for name, gain in sorted(verdict.domains.items())
    ]


def _gain(gain: float | None, low: float | None, high: float | None) -> str:
    return f"{_percent(gain)} ({_percent(low)} to {_percent(high)})"


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{share:+.1%}"
