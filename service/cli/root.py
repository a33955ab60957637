"""The command tree."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from service.cli import bench, cases, completion, data, demo, drafts, keys, operate, runs, serving, status, talk
from service.cli import config as settings
from service.cli import eval as evaluation
from service.cli.examples import add_examples
from service.core import package_version

FORMER = {"practise": "practice"}
"""Former names of commands."""


class RootGroup(TyperGroup):
    """The commands, which can also be called by their former names."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See click.Group."""
        return super().resolve_command(ctx, [*(FORMER.get(name, name) for name in args[:1]), *args[1:]])


app = typer.Typer(
    name="redraft",
    cls=RootGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"redraft {package_version('redraft')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    show_completion: completion.Show = None,
    install_completion: completion.Install = None,
) -> None:
    """Speculative decoding on MLX whose draft model keeps learning from the traffic it serves."""


app.command()(serving.serve)
app.command()(serving.trainer)
app.command()(status.status)
app.command()(demo.demo)
app.command()(serving.doctor)
app.add_typer(serving.models, name="models")
app.command("make-draft")(drafts.make_draft)
app.command()(talk.generate)
app.command()(talk.chat)
app.command()(operate.train)
app.command()(operate.practice)
app.add_typer(evaluation.group, name="eval")
app.add_typer(bench.group, name="bench")
app.add_typer(cases.cases, name="cases")
app.add_typer(data.data, name="data")
app.add_typer(operate.adapters, name="adapters")
app.add_typer(runs.runs, name="runs")
app.add_typer(settings.config, name="config")
app.add_typer(data.db, name="db")
app.add_typer(keys.keys, name="keys")
add_examples(app)
