"""Output of the commands: progress on stderr, tables on stdout, JSON files for programs; and questions at a terminal."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from service.core import BadRequest

# Markup is off because printed text contains names chosen by clients.
out = Console(markup=False, emoji=False)
err = Console(stderr=True, markup=False, emoji=False)

STDOUT = Path("-")
"""As the file of --json: standard output, which then contains nothing else."""

HEARTBEAT_SECONDS = 8.0
"""Longest silence of work in stages if stderr is not a terminal."""


def fail(message: str) -> None:
    """Prints one line about an error on stderr."""
    err.print(Text.assemble(("redraft:", "bold red"), " ", message), highlight=False, soft_wrap=True)


class Bar(Protocol):
    """Moves a progress bar."""

    def __call__(self, done: int, of: int, note: str = "") -> None:
        """`done` of `of` (0: unknown), and a note next to the bar."""
        ...


class Stages(Protocol):
    """Reports the progress of work in stages."""

    def __call__(self, stage: str, done: int, of: int, note: str = "") -> None:
        """The stage, `done` of `of` in it (0: unknown), and a note."""
        ...


@contextmanager
def progress(title: str) -> Generator[Bar]:
    """A bar on stderr; silence when stderr is not a terminal."""
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
            bars.update(task, completed=done, total=of or None, note=note)

        yield update


@contextmanager
def stages(title: str) -> Generator[Stages]:
    """Progress of work in stages, on stderr: a line for every new stage, and between them a bar or, if stderr is not a
    terminal, the latest state every HEARTBEAT_SECONDS."""
    seen: set[str] = set()
    state, printed_at, over = title, time.monotonic(), threading.Event()

    def print_line(line: str) -> None:
        nonlocal printed_at
        printed_at = time.monotonic()
        err.print(line, highlight=False, soft_wrap=True)

    def heartbeat() -> None:
        while not over.wait(HEARTBEAT_SECONDS / 16):
            if time.monotonic() - printed_at >= HEARTBEAT_SECONDS:
                print_line(f"  {state} ({time.monotonic() - started:.0f} s)")

    with progress(title) as bar:

        def on_progress(stage: str, done: int, of: int, note: str = "") -> None:
            nonlocal state
            count = f"{done} of {of}" if of else str(done) if done else ""
            details = ", ".join(part for part in (count, note) if part)
            state = f"{stage}: {details}" if details else stage
            bar(done, of, f"{stage}, {note}" if note else stage)
            if stage not in seen:
                seen.add(stage)
                print_line(stage)

        started = time.monotonic()
        thread = threading.Thread(target=heartbeat, name="progress", daemon=True)
        if not sys.stderr.isatty():
            thread.start()
        try:
            yield on_progress
        finally:
            over.set()
            if thread.ident is not None:
                thread.join()


def at_terminal() -> bool:
    """Whether a user can be asked: input and output are a terminal, and this process is not in its background, where
    reading would stop it."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:
        # The terminal has no job control.
        return True


def agrees(question: str) -> bool | None:
    """The user's answer, no by default; None if the input ended or cannot be read."""
    while True:
        # `input` would write its prompt to stderr, which may be a file.
        out.print(f"{question} [y/N]: ", end="", highlight=False, soft_wrap=True)
        try:
            answer = input().strip().lower()
        except (EOFError, OSError):
            out.print()
            return None
        if answer in {"", "n", "no", "y", "yes"}:
            return answer.startswith("y")


def require_consent(question: str, yes: bool) -> None:
    """Asks before something is deleted. yes: consent was given on the command line. question: names what would be
    deleted. Raises BadRequest if no terminal is available, typer.Abort if the answer is no."""
    if yes:
        return
    if not at_terminal():
        raise BadRequest(f"{printable(question)} There is no terminal for a confirmation: pass --yes", field="yes")
    if not agrees(printable(question)):
        raise typer.Abort


def printable(text: str) -> str:
    """Text made safe for a terminal: control characters, and those that change the direction or order of others, become
    escapes such as \\x1b."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a table on stdout, one or more lines per row. All cells are made printable."""
    made = Table(title=title, title_justify="left")
    for name in columns:
        made.add_column(name, overflow="fold")
    for row in rows:
        made.add_row(*(printable(str(value)) for value in row))
    out.print(made)


def only_json(context: typer.Context, path: Path | None) -> Path | None:
    """The callback of --json: with `-`, the command's other output on stdout is suppressed."""
    if path == STDOUT:
        out.quiet = True
        context.call_on_close(lambda: setattr(out, "quiet", False))
    return path


def write_json(path: Path | None, content: Mapping[str, object], *, so_far: bool = False) -> None:
    """Writes `content` to the path, creating its folder, or to STDOUT; without a path, nothing. so_far: more will
    follow, for which a file is rewritten and stdout is not written yet. Raises OSError."""
    text = json.dumps(content, indent=2) + "\n"
    if path == STDOUT:
        if not so_far:
            sys.stdout.write(text)
    elif path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
