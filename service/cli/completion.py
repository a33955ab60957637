"""Shell completion, for the shell that is named: Typer's own options guess it, and fail where there is none to be found."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import completion_init, get_completion_script, install

VARIABLE = "_REDRAFT_COMPLETE"
"""Environment variable by which a shell asks for completions."""

# Makes Typer answer what the scripts ask.
completion_init()


class Shell(StrEnum):
    """Shells that have a script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"
    POWERSHELL = "powershell"


def _show(shell: Shell | None) -> None:
    if shell is not None:
        typer.echo(get_completion_script(prog_name="redraft", complete_var=VARIABLE, shell=shell.value))
        raise typer.Exit


def _install(shell: Shell | None) -> None:
    if shell is not None:
        _, path = install(shell=shell.value, prog_name="redraft", complete_var=VARIABLE)
        typer.echo(f"completion for {shell} is in {path}: it works in shells that are started from now on")
        raise typer.Exit


Show = Annotated[
    Shell | None,
    typer.Option(
        "--show-completion", callback=_show, is_eager=True, help="Show the script that completes in this shell."
    ),
]
Install = Annotated[
    Shell | None,
    typer.Option("--install-completion", callback=_install, is_eager=True, help="Install it for this shell."),
]
