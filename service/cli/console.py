"""What commands print with: progress bars that vanish where nobody watches, tables, and JSON files for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

# What is printed holds names that clients chose: never markup.
out = Console(markup=False)
err = Console(stderr=True, markup=False)


def fail(message: str) -> None:
    err.print(Text.assemble(("redraft:", "bold red"), " ", message), highlight=False, soft_wrap=True)


class Bar(Protocol):
    def __call__(self, done: int, of: int, note: str = "") -> None: ...


@contextmanager
def progress(title: str) -> Generator[Bar]:
    """A bar on stderr; plain silence when stderr is not a terminal."""
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=err, disable=not sys.stderr.isatty(), transient=True) as bars:
        task = bars.add_task(title, total=None, note="")

        def update(done: int, of: int, note: str = "") -> None:
            bars.update(task, completed=done, total=of, note=note)

        yield update


@contextmanager
def stages(title: str) -> Generator[Callable[[str, int, int], None]]:
    """A bar for work in stages (stage, done, of); each stage is also told on a line of its own when it begins."""
    told: set[str] = set()
    with progress(title) as bar:

        def on_step(stage: str, done: int, of: int) -> None:
            bar(done, of, stage)
            if stage not in told:
                told.add(stage)
                err.print(stage, highlight=False)

        yield on_step


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    made = Table(title=title, title_justify="left")
    for name in columns:
        made.add_column(name, overflow="fold")
    for row in rows:
        made.add_row(*(str(value) for value in row))
    out.print(made)


def write_json(path: Path | None, content: Mapping[str, object]) -> None:
    """Nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
