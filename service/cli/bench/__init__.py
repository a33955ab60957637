"""`bench`: reproducible measurements, one module per command.

REDRAFT_BLAS=shipped measures with the BLAS that MLX ships.
"""

from __future__ import annotations

import typer

from service.cli.bench import decode, round, serve, store, swap, train

group = typer.Typer(
    name="bench",
    help="Measure speed; the compared programs take turns. REDRAFT_BLAS=shipped: use the BLAS that MLX ships.",
    no_args_is_help=True,
)
group.command()(decode.decode)
group.command()(serve.serve)
group.command()(train.train)
group.command()(swap.swap)
group.command()(store.store)
group.command("round")(round.round_)
