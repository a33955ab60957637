"""`eval`: measurements of a draft, of the loop, and of what guards it, one module a command."""

from __future__ import annotations

import typer

from service.cli.eval import agreement, cycle, gate, poison, score, stream

group = typer.Typer(name="eval", help="Measure a draft, or a whole cycle of the loop.", no_args_is_help=True)
group.command()(agreement.agreement)
group.command()(cycle.cycle)
group.command()(stream.stream)
group.command()(score.score)
group.command()(gate.gate)
group.command()(poison.poison)
