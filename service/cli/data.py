"""`cases` and `db`: the log, without loading any model."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.console import out, table
from service.cli.operate import ask
from service.cli.options import LOCAL, Config, Url, settings_from
from service.core import DatabaseTaken, Selection
from service.settings import Settings

if TYPE_CHECKING:
    from service.store.stores import Stores

cases = typer.Typer(help="What was recorded: failure cases and the generations they belong to.", no_args_is_help=True)
db = typer.Typer(help="The database.", no_args_is_help=True)


@cases.command("list")
def list_cases(
    config: Config = None,
    limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 20,
    offset: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Where the draft was rejected."""
    from service.store.stores import open_stores

    stores = open_stores(settings_from(config))
    try:
        rows = [
            (r.generation[:12], r.domain or "", r.case.position, r.case.drafted, r.case.target, f"{r.case.p:.3f}",
             f"{r.case.q:.3f}", "tie" if r.case.tie else "", r.trained_run or "")
            for r in stores.cases.newest(limit, offset)
        ]  # fmt: skip
    finally:
        stores.close()
    table("failure cases", ("generation", "domain", "at", "drafted", "target", "p", "q", "", "trained by run"), rows)


@cases.command()
def stats(config: Config = None) -> None:
    """Counts."""
    from service.store.stores import open_stores

    stores = open_stores(settings_from(config))
    try:
        found = stores.generations.stats()
    finally:
        stores.close()
    rows: list[tuple[str, object]] = [
        ("requests recorded", found.requests),
        ("generations", found.generations),
        ("output tokens", found.tokens),
        ("failure cases", found.cases),
        ("of these near-ties", found.ties),
        ("trained", found.trained),
        ("quarantined", found.quarantined),
        *((f"generations of {name or 'no domain'}", count) for name, count in sorted(found.domains.items())),
    ]
    table("recorded", ("what", "count"), rows)


@cases.command()
def purge(
    config: Config = None,
    keep: Annotated[int | None, typer.Option(min=0, help="Keep this many newest generations.")] = None,
    id: Annotated[list[str] | None, typer.Option(help="Erase the generation of this answer; may be repeated.")] = None,
    client: Annotated[str | None, typer.Option(help="Erase the generations of this client.")] = None,
    domain: Annotated[str | None, typer.Option(help="Erase the generations of this domain.")] = None,
    before: Annotated[
        datetime | None, typer.Option(help="Erase what was recorded before this moment (local time).")
    ] = None,
    everything: Annotated[bool, typer.Option("--everything", help="Erase the whole log.")] = False,
    retire_adapters: Annotated[
        bool, typer.Option("--retire-adapters", help="Adapters that learnt an erased text never serve again.")
    ] = False,
    url: Url = LOCAL,
) -> None:
    """Delete recorded generations with their cases: all but the newest (--keep), or those that match all that is said. These
    are erased from every other place that keeps texts too, by the server at --url where one serves from this database."""
    from service.api.compatible import client_tag
    from service.store.stores import open_stores

    chosen = bool(id or client or domain or before)
    if (keep is not None) + chosen + everything != 1:
        raise typer.BadParameter("say one of --keep N, --id/--client/--domain/--before, --everything")
    settings = settings_from(config)
    stores = open_stores(settings)
    try:
        if keep is not None:
            gone = stores.generations.purge(keep, spare_replay=False).result()
            out.print(f"{gone} generations deleted")
            return
        selection = Selection(
            ids=frozenset(id) if id else None,
            client=client_tag(client or None),
            domain=domain or None,
            before=before,
            everything=everything,
        )
        erased = _erase(stores, settings, selection, retire_adapters=retire_adapters, url=url)
    finally:
        stores.close()
    out.print(f"{erased['generations']} generations deleted")
    for what, numbers in (("learnt them", erased["adapters"]), ("are revoked", erased["revoked"])):
        if numbers:
            out.print(f"adapters that {what}: {', '.join(map(str, numbers))}")


def _erase(
    stores: Stores, settings: Settings, selection: Selection, *, retire_adapters: bool, url: str
) -> dict[str, Any]:
    """core.Erased as an object. Where nobody serves from the database, no server can start on it meanwhile, as long as a lease
    of 25 s lasts."""
    from service.app import erase
    from service.store.processes.members import Members, Role

    members = Members(stores.database, Role.COMMAND)
    try:
        members.join()
    except DatabaseTaken:
        return ask(url, "DELETE", "/generations", selection.given() | {"retire_adapters": retire_adapters})
    try:
        return asdict(erase(stores, settings, selection, retire_adapters=retire_adapters))
    finally:
        members.leave()


@cases.command()
def quarantined(config: Config = None) -> None:
    """Quarantined texts: what adapters that were rolled back had learnt, and what runs crashed over."""
    from service.store.stores import open_stores

    stores = open_stores(settings_from(config))
    try:
        rows = [
            ("crashes" if h.run is None else f"adapter {h.adapter} rolled back", h.run or "", h.cases, h.generations)
            for h in stores.quarantine.all()
        ]
    finally:
        stores.close()
    table("quarantined", ("after", "run", "failure cases", "generations"), rows)


@cases.command()
def release(
    config: Config = None,
    run: Annotated[int | None, typer.Option(min=1, help="Only texts that this run quarantined.")] = None,
) -> None:
    """Let runs learn again from quarantined texts."""
    from service.store.stores import open_stores

    stores = open_stores(settings_from(config))
    try:
        free = stores.quarantine.release(run)
    finally:
        stores.close()
    out.print(f"{free} failure cases released")


@db.command("upgrade")
def upgrade_database(config: Config = None) -> None:
    """Create the database, or bring it to this version's revision."""
    from service.store.database import revision, upgrade

    url = settings_from(config).database_url
    upgrade(url)
    out.print(f"the database is at revision {revision(url)}")
