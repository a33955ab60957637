"""`config`: the settings as the other commands read them."""

from __future__ import annotations

import json as encoding
import os
from dataclasses import replace
from typing import Annotated

import typer

from service.cli.console import table, write_json
from service.cli.options import API_KEY, Config, Database, Draft, Json, Target, given_flags
from service.core import BadRequest
from service.settings import Origin, Setting, list_settings

config = typer.Typer(help="Settings and where their values come from.", no_args_is_help=True)


@config.command()
def show(
    name: Annotated[
        list[str] | None, typer.Argument(help="Settings (engine.max_rows) or sections (engine); by default all.")
    ] = None,
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    host: Annotated[str | None, typer.Option(help="As `serve` takes it.")] = None,
    port: Annotated[int | None, typer.Option(help="As `serve` takes it.")] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="As `serve` takes it.")] = None,
    database: Database = None,
    train: Annotated[bool, typer.Option("--train/--no-train", help="As `serve` takes it.")] = True,
    json: Json = None,
) -> None:
    """Show every setting, its value, and its source: a flag, the environment, the --config file, or the default.

    Flags override the environment, which overrides the file. Unknown names in the file or the environment are errors.
    Passwords are not shown.
    """
    flags = given_flags(
        models__target=target,
        models__draft=draft,
        server__host=host,
        server__port=port,
        engine__num_draft_tokens=num_draft_tokens,
        store__url=database,
        training__run_here=None if train else False,
    )
    key = os.environ.get(API_KEY)
    listed = list_settings(config, flags | ({"server.api_key": key} if key else {}))
    if key:
        # `serve` also reads it under the name that client commands use.
        listed = [
            replace(each, origin=Origin.ENVIRONMENT) if each.name == "server.api_key" else each for each in listed
        ]
    found = _chosen(listed, name or [])
    shown = {each.name: _plain(each) for each in found}
    rows = [(each.name, _text(shown[each.name]), each.origin) for each in found]
    table("settings", ("name", "value", "from"), rows)
    plain = [{"name": each.name, "value": shown[each.name], "from": each.origin} for each in found]
    write_json(json, {"settings": plain})


def _chosen(found: list[Setting], names: list[str]) -> list[Setting]:
    """The settings with these names or in these sections, or all. Raises BadRequest for an unknown name."""
    for name in names:
        if not any(_named(each, name) for each in found):
            raise BadRequest(f"there is no setting {name}", field="name")
    return [each for each in found if not names or any(_named(each, name) for name in names)]


def _named(setting: Setting, name: str) -> bool:
    return setting.name == name or setting.name.startswith(f"{name}.")


def _plain(setting: Setting) -> object:
    """Its value as a JSON-compatible value, without a password."""
    from service.store.backends.backend import shown, sqlite_path

    value = setting.value
    if setting.name == "store.url" and isinstance(value, str) and sqlite_path(value) is None:
        return shown(value)
    return value if value is None or isinstance(value, bool | int | float | list) else str(value)


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else encoding.dumps(value)
