"""The command tree."""

from __future__ import annotations

import typer

from service.cli import bench, data, demo, drafts, keys, operate, runs, serving, talk
from service.cli import eval as evaluation

app = typer.Typer(
    name="redraft",
    help="Speculative decoding on MLX whose draft model keeps learning from the traffic it serves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(serving.serve)
app.command()(serving.trainer)
app.command()(demo.demo)
app.command()(serving.doctor)
app.add_typer(serving.models, name="models")
app.command("make-draft")(drafts.make_draft)
app.command()(talk.generate)
app.command()(talk.chat)
app.command()(operate.train)
app.add_typer(evaluation.group, name="eval")
app.add_typer(bench.group, name="bench")
app.add_typer(data.cases, name="cases")
app.add_typer(operate.adapters, name="adapters")
app.add_typer(runs.runs, name="runs")
app.add_typer(data.db, name="db")
app.add_typer(keys.keys, name="keys")
