"""Options and output that the evaluations share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli.console import table

Rows = Annotated[int, typer.Option(min=1, help="Prompts the target answers together; an accelerator takes hundreds.")]


def show(
    name: str,
    title: str,
    command: str,
    columns: tuple[str, ...],
    rows: tuple[tuple[object, ...], ...],
    markdown: Path | None,
) -> None:
    """Print the table and, where `markdown` is given, put it into that document as a section. Raises OSError."""
    from service.evaluation.bench.report import Report, publish

    table(title, columns, rows)
    publish(Report(name, title, command, columns, rows, {}, {}), png=None, markdown=markdown)
