"""`runs`: training runs of the log, without loading any model."""

from __future__ import annotations

from typing import Annotated

import typer

from service.cli.console import err, out
from service.cli.options import Config, settings_from

runs = typer.Typer(help="Training runs.", no_args_is_help=True)


@runs.command()
def export(
    run: Annotated[list[int] | None, typer.Argument(min=1, help="Ids of runs; by default all that are over.")] = None,
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            "--tracking-uri",
            envvar="MLFLOW_TRACKING_URI",
            help="Where MLflow is; by default where MLflow itself would be.",
        ),
    ] = None,
    experiment: Annotated[
        str, typer.Option(envvar="MLFLOW_EXPERIMENT_NAME", help="MLflow's experiment; made where there is none.")
    ] = "redraft",
    artifacts: Annotated[
        bool,
        typer.Option("--artifacts", help="Send the adapters' files too; they may reveal what requests were about."),
    ] = False,
    config: Config = None,
) -> None:
    """Export training runs to MLflow, where that is installed (pip install mlflow-skinny, or mlflow). What was exported before
    is left as it is; no text of a request is sent."""
    from service.learning.mlflow_export import export_runs
    from service.store.stores import open_stores

    stores = open_stores(settings_from(config))
    try:
        done = export_runs(
            stores.runs, stores.adapters, run or (), uri=tracking_uri, experiment=experiment, with_files=artifacts
        )
    finally:
        stores.close()
    if done.without_files:
        which = ", ".join(map(str, done.without_files))
        err.print(f"files not sent (gone, altered, or the adapter is revoked): adapters {which}", highlight=False)
    there = f", {len(done.known)} were there" if done.known else ""
    out.print(f"{len(done.new)} runs exported to {experiment}{there}", highlight=False, soft_wrap=True)
