"""Shell completion for a named shell: Typer's own options guess the shell, and fail if they cannot."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import completion_init, get_completion_script, install

VARIABLE = "_REDRAFT_COMPLETE"
"""Environment variable through which a shell requests completions."""

# Enables Typer's side of the scripts.
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
        typer.echo(f"completion for {shell} was installed in {path}: start a new shell to use it")
        raise typer.Exit


Show = Annotated[
    Shell | None,
    typer.Option(
        "--show-completion", callback=_show, is_eager=True, help="Print the completion script for this shell."
    ),
]
Install = Annotated[
    Shell | None,
    typer.Option("--install-completion", callback=_install, is_eager=True, help="Install completion for this shell."),
]
