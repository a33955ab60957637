"""`cases` and `db`: the log, without loading any model."""

from __future__ import annotations

from typing import Annotated

import typer

from service.cli.console import out, table
from service.cli.options import Config, settings_from

cases = typer.Typer(help="What was recorded: failure cases and the generations they belong to.", no_args_is_help=True)
db = typer.Typer(help="The database.", no_args_is_help=True)


@cases.command("list")
def list_cases(
    config: Config = None,
    limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 20,
    offset: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Where the draft was rejected."""
    from service.app import open_stores

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
    from service.app import open_stores

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
    client: Annotated[str | None, typer.Option(help="Erase the generations of this client.")] = None,
    domain: Annotated[str | None, typer.Option(help="Erase the generations of this domain.")] = None,
    everything: Annotated[bool, typer.Option("--everything", help="Erase the whole log.")] = False,
) -> None:
    """Delete recorded generations with their cases. SQLite overwrites their bytes; PostgreSQL frees them by VACUUM."""
    from service.app import open_stores

    if (keep is not None) + bool(client or domain) + everything != 1:
        raise typer.BadParameter("say one of --keep N, --client/--domain NAME, --everything")
    stores = open_stores(settings_from(config))
    try:
        if keep is not None:
            gone = stores.generations.purge(keep, spare_replay=False).result()
        else:
            gone = stores.generations.erase(client=client, domain=domain, everything=everything).result()
    finally:
        stores.close()
    out.print(f"{gone} generations deleted")


@cases.command()
def quarantined(config: Config = None) -> None:
    """Quarantined texts: what adapters that were rolled back had learnt, and what runs crashed over."""
    from service.app import open_stores

    stores = open_stores(settings_from(config))
    try:
        rows = [
            ("crashes" if h.run is None else f"adapter {h.adapter} rolled back", h.run or "", h.cases, h.generations)
            for h in stores.quarantine.held()
        ]
    finally:
        stores.close()
    table("quarantined", ("after", "run", "failure cases", "generations"), rows)


@cases.command()
def release(
    config: Config = None,
    run: Annotated[int | None, typer.Option(min=1, help="Only texts that this run put aside.")] = None,
) -> None:
    """Let runs learn again from quarantined texts."""
    from service.app import open_stores

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
