"""The command line, run in the test's own process, and its tree of commands."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer

from service.cli.root import app

TREE = typer.main.get_command(app)


def commands(group: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Every command and group with its path, the root first."""
    found = [(path, group)]
    for name, command in getattr(group, "commands", {}).items():
        found += commands(command, (*path, name))
    return found


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


Redraft = Callable[..., Outcome]


def cells(text: str) -> list[list[str]]:
    """The rows of a printed table, without the header."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]


def one_sentence(done: Outcome) -> None:
    """Exactly one line, on stderr only."""
    assert done.status != 0
    assert done.out == ""
    assert re.fullmatch(r"redraft: \S[^\n]*\n", done.err), done.err
