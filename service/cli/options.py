"""Options that several commands share."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, cast

import typer

from service.cli.console import only_json
from service.core import BARE_DRAFT
from service.settings import Settings, load_settings

Config = Annotated[Path | None, typer.Option("--config", help="A TOML file of settings; see configs/.")]
Model = Annotated[
    str | None,
    typer.Argument(help="Target model: catalogue name, hub name, or folder; the same as --target.", show_default=False),
]
Target = Annotated[
    str | None, typer.Option("--target", "--model", "-m", help="Target model: catalogue name, hub name, or folder.")
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "--draft-model",
        help='Draft model, or "none" for no speculation; by default a matching one is looked for.',
    ),
]
Database = Annotated[
    str | None,
    typer.Option("--database", help="URL of the database (store.url); by default SQLite in the home folder."),
]
Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        callback=only_json,
        help="Also write the result to this file as JSON; -: write only JSON, to standard output.",
    ),
]
Prompts = Annotated[Path, typer.Option(help="JSON lines with id, domain, prompt.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Maximum output tokens per prompt.")]
Markdown = Annotated[Path | None, typer.Option("--markdown", help="Also insert the result into this document.")]
Url = Annotated[str, typer.Option("--url", help="URL of the server.", envvar="REDRAFT_URL")]
Remote = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="Ask the server at this URL; by default, read the database of these settings.",
        envvar="REDRAFT_URL",
    ),
]
API_KEY = "REDRAFT_API_KEY"
"""Environment variable with the key that `serve` accepts from clients and that commands send to a server."""
FORMER_API_KEY = "REDRAFT_SERVER__API_KEY"
LOCAL = "http://127.0.0.1:8321"
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask. Required for deletion without a terminal.")]
BARE = "bare"
"""The base draft in arguments and output of commands about adapter versions."""
VERSION = "VERSION|bare"
"""How help shows a parameter that takes an adapter version."""


def given_flags(**flags: object) -> dict[str, object]:
    """The given flags, by the settings' dotted names; in a flag's name the dot is written as two underscores."""
    return {name.replace("__", "."): value for name, value in flags.items() if value is not None}


def settings_from(config: Path | None, **flags: object) -> Settings:
    """Settings with the given flags, named as in `given_flags`."""
    return load_settings(config, given_flags(**flags))


def one_target(model: str | None, target: str | None) -> str | None:
    """The target named on a command line, as the argument or as --target; None: neither. Raises typer.BadParameter if
    both differ."""
    if None not in (model, target) and model != target:
        raise typer.BadParameter(f"two models are named, {model} and {target} (--target)", param_hint="MODEL")
    return target if model is None else model


def adapter_version(text: str) -> int:
    """The id of an adapter version; `bare` or 0 is the base draft. Raises typer.BadParameter."""
    if text == BARE:
        return BARE_DRAFT
    if not text.isascii() or not text.isdigit():
        raise typer.BadParameter(f"{text!r} is not a version: give a number, or {BARE} for the base draft")
    return int(text)


def adapter_name(version: int) -> str:
    """An adapter version as commands show it: its id, or `bare`."""
    return str(version) if version != BARE_DRAFT else BARE


def again(context: typer.Context) -> str:
    """The command line that repeats this measurement: the given options, files by name only, without output files."""
    group = context.parent.info_name if context.parent is not None else None
    words = ["redraft", group or "", context.info_name or ""]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name in {"json", "png", "markdown"} or source is None or source.name != "COMMANDLINE":
            continue
        value: object = context.params[name]
        for one in cast("list[object]", value) if isinstance(value, list | tuple) else [value]:
            flag = [parameter.opts[0]] if parameter.param_type_name == "option" else []
            words += [*flag, *([] if one is True else [str(one).rpartition("/")[2]])]
    shipped = "REDRAFT_BLAS=shipped " if os.environ.get("REDRAFT_BLAS") == "shipped" else ""
    return shipped + shlex.join(words)
