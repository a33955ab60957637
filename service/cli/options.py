"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.settings import Settings, load_settings

Config = Annotated[Path | None, typer.Option("--config", help="A TOML file of settings; see configs/.")]
Target = Annotated[str | None, typer.Option("--target", help="Target model: catalogue name, hub name, or folder.")]
Draft = Annotated[str | None, typer.Option("--draft", help='Draft model, or "none"; by default the one that ships.')]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file as JSON.")]
Url = Annotated[str, typer.Option("--url", help="Where the server is.", envvar="REDRAFT_URL")]
LOCAL = "http://127.0.0.1:8321"


def settings_from(config: Path | None, **flags: object) -> Settings:
    """Settings with the flags that were given; a flag's name has its dot written as two underscores."""
    given = {name.replace("__", "."): value for name, value in flags.items() if value is not None}
    return load_settings(config, given)
