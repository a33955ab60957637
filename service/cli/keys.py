"""`keys`: API keys of a server."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.console import err, out, require_consent, table, write_json
from service.cli.options import Config, Database, Json, Yes, settings_from
from service.core import Access

if TYPE_CHECKING:
    from service.store.stores import Stores

keys = typer.Typer(
    help="API keys. Once one exists, every request to a server of this database needs a key; servers follow within a second.",
    no_args_is_help=True,
)


class Role(StrEnum):
    """What a key allows."""

    CLIENT = Access.CLIENT.role
    """To generate."""
    OPERATOR = Access.OPERATOR.role
    """Everything."""


@keys.command()
def create(
    name: Annotated[str, typer.Argument(help="Name of the key: letters, digits, dots, dashes, underscores.")],
    role: Annotated[
        Role,
        typer.Option(help="client: generate. operator: also train, switch adapters, read and erase recorded text."),
    ] = Role.CLIENT,
    config: Config = None,
    database: Database = None,
) -> None:
    """Create a key and print it. It is shown only once: the database stores just its hash."""
    stores = _open(config, database, create=True)
    try:
        secret = stores.keys.create(name, Access[role.upper()])
    finally:
        stores.close()
    err.print(f"the key of {name} ({role}); it is not shown again:", highlight=False)
    out.print(secret, highlight=False, soft_wrap=True)


@keys.command("list")
def list_keys(config: Config = None, database: Database = None, json: Json = None) -> None:
    """List all keys by name, including revoked ones."""
    stores = _open(config, database)
    try:
        found = stores.keys.all()
    finally:
        stores.close()
    rows = [
        (key.name, key.access.role, f"{key.created_at:%Y-%m-%d %H:%M}",
         "" if key.revoked_at is None else f"{key.revoked_at:%Y-%m-%d %H:%M}")
        for key in found
    ]  # fmt: skip
    table("API keys", ("name", "role", "made", "revoked"), rows)
    plain = [
        {"name": key.name, "role": key.access.role, "created_at": key.created_at.isoformat(),
         "revoked_at": None if key.revoked_at is None else key.revoked_at.isoformat()}
        for key in found
    ]  # fmt: skip
    write_json(json, {"keys": plain})


@keys.command()
def revoke(name: str, yes: Yes = False, config: Config = None, database: Database = None) -> None:
    """Revoke a key and end the page sessions opened with it. Its name cannot be reused, and servers keep requiring a
    key when none is left."""
    stores = _open(config, database)
    try:
        open_ones = [key for key in stores.keys.all() if key.name == name and key.revoked_at is None]
        for key in open_ones:
            made = f"{key.access.role}, made {key.created_at:%Y-%m-%d %H:%M}"
            require_consent(f"revoke the key of {name} ({made}) and end its sessions? Its name is not used again.", yes)
        stores.keys.revoke(name)
    finally:
        stores.close()
    out.print(f"the key of {name} opens nothing any more", highlight=False)


def _open(config: Path | None, database: str | None, *, create: bool = False) -> Stores:
    from service.store.stores import open_stores

    return open_stores(settings_from(config, store__url=database), create=create)
