"""`bench`: figures that anybody can measure again, one module a command.

REDRAFT_BLAS=shipped before a command measures on the BLAS that MLX ships.
"""

from __future__ import annotations

import typer

from service.cli.bench import decode, round, serve, store, swap, train

group = typer.Typer(
    name="bench",
    help="Measure speed, contenders taking turns. With REDRAFT_BLAS=shipped in the environment: on the BLAS that MLX ships.",
    no_args_is_help=True,
)
group.command()(decode.decode)
group.command()(serve.serve)
group.command()(train.train)
group.command()(swap.swap)
group.command()(store.store)
group.command("round")(round.round_)
