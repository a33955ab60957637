"""`cases` and `db`: the log, without loading any model."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.console import err, out, table, write_json
from service.cli.operate import ask
from service.cli.options import LOCAL, Config, Json, Url, settings_from
from service.core import DatabaseTaken, RedraftError, Selection
from service.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from service.cli.case_text import CaseReader, CaseText
    from service.store.log.cases import CaseRow
    from service.store.stores import Stores

cases = typer.Typer(help="What was recorded: failure cases and the generations they belong to.", no_args_is_help=True)
db = typer.Typer(help="The database.", no_args_is_help=True)


@cases.command("list")
def list_cases(
    config: Config = None,
    limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 20,
    offset: Annotated[int, typer.Option(min=0)] = 0,
    text: Annotated[
        bool,
        typer.Option("--text", help="Show tokens as the target's tokenizer decodes them, and the text before them."),
    ] = False,
    json: Json = None,
) -> None:
    """Where the draft was rejected: what it proposed, and what the target said instead."""
    from service.cli.case_text import CaseReader
    from service.store.stores import open_stores

    settings = settings_from(config)
    stores = open_stores(settings)
    try:
        found = stores.cases.newest(limit, offset)
        texts = _texts(stores, found, CaseReader(settings)) if text and found else {}
    finally:
        stores.close()
    if text:
        columns = ("id", "domain", "before", "drafted", "target", "p", "q", "")
        rows = [_text_row(r, texts[r.id]) for r in found]
    else:
        columns = ("id", "generation", "domain", "at", "drafted", "target", "p", "q", "", "trained by run")
        rows = [
            (r.id, r.generation[:12], r.domain or "", r.case.position, r.case.drafted, r.case.target, f"{r.case.p:.3f}",
             f"{r.case.q:.3f}", "tie" if r.case.tie else "", r.trained_run or "")
            for r in found
        ]  # fmt: skip
    table("failure cases", columns, rows)
    write_json(json, {"cases": [_plain(r) | ({"text": _fields(texts[r.id])} if text else {}) for r in found]})


@cases.command()
def show(
    case: Annotated[int, typer.Argument(min=1, help="Id of the failure case, as `cases list` shows it.")],
    config: Config = None,
    json: Json = None,
) -> None:
    """One failure case: the text before it, what the draft proposed, what the target said, and what came after.

    Text is decoded by the target's tokenizer, where that is on this disk; what a terminal would act on is shown as an escape.
    """
    from service.cli.case_text import CaseReader
    from service.store.stores import open_stores

    settings = settings_from(config)
    stores = open_stores(settings)
    try:
        found = stores.cases.get(case)
        try:
            text = _texts(stores, [found], CaseReader(settings))[case]
        except RedraftError as error:
            # The figures are there without it.
            err.print(str(error), highlight=False, soft_wrap=True)
            text = None
    finally:
        stores.close()
    one = found.case
    before, drafted, target, after = _quoted(text)
    rows: list[tuple[str, object]] = [
        ("generation", found.generation),
        ("domain", found.domain or ""),
        ("recorded", f"{found.created_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("output position", one.position),
        ("text before", before),
        (f"drafted (token {one.drafted})", drafted),
        (f"target (token {one.target})", target),
        ("text after", after),
        ("probability of the drafted token: target, draft", f"{one.p:.4f}, {one.q:.4f}"),
        ("target's best over its second, nats", f"{one.margin:.4f}{' (a tie)' if one.tie else ''}"),
        ("trained by run", found.trained_run or ""),
    ]
    table(f"failure case {case}", ("what", "value"), rows)
    write_json(json, _plain(found) | {"text": _fields(text)})


def _texts(stores: Stores, found: Sequence[CaseRow], reader: CaseReader) -> dict[int, CaseText | None]:
    """Failure cases as text, by their ids; None where their tokens are another tokenizer's."""
    from service.cli.case_text import AFTER, BEFORE

    return {row.id: reader.read(row.case, stores.cases.context(row.id, BEFORE, AFTER)) for row in found}


def _text_row(row: CaseRow, text: CaseText | None) -> tuple[object, ...]:
    one = row.case
    before, drafted, target, _ = _quoted(text)
    figures = (f"{one.p:.3f}", f"{one.q:.3f}", "tie" if one.tie else "")
    return (row.id, row.domain or "", before, drafted or one.drafted, target or one.target, *figures)


def _quoted(text: CaseText | None) -> tuple[str, str, str, str]:
    """Its parts within quotes, so that spaces at their ends are seen; empty without a text."""
    if text is None:
        return "", "", "", ""
    return f'"{text.before}"', f'"{text.drafted}"', f'"{text.target}"', f'"{text.after}"'


def _fields(text: CaseText | None) -> dict[str, Any] | None:
    return None if text is None else asdict(text)


def _plain(row: CaseRow) -> dict[str, Any]:
    """A failure case as JSON can hold it."""
    about = {"id": row.id, "generation": row.generation, "domain": row.domain}
    return about | asdict(row.case) | {"trained_run": row.trained_run, "created_at": row.created_at.isoformat()}


@cases.command()
def stats(config: Config = None, json: Json = None) -> None:
    """Counts of what was recorded."""
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
    write_json(json, asdict(found))


@cases.command()
def purge(
    config: Config = None,
    keep: Annotated[int | None, typer.Option(min=0, help="Keep this many newest generations.")] = None,
    id: Annotated[list[str] | None, typer.Option(help="Erase the generation of this answer; may be repeated.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Erase what was asked with the key of this name.")] = None,
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

    chosen = bool(id or api_key or client or domain or before)
    if (keep is not None) + chosen + everything != 1:
        raise typer.BadParameter("say one of --keep N, --id/--api-key/--client/--domain/--before, --everything")
    settings = settings_from(config)
    stores = open_stores(settings)
    try:
        if keep is not None:
            gone = stores.generations.purge(keep, spare_replay=False).result()
            out.print(f"{gone} generations deleted")
            return
        selection = Selection(
            ids=frozenset(id) if id else None,
            api_key=api_key or None,
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
def quarantined(config: Config = None, json: Json = None) -> None:
    """Quarantined texts: what adapters that were rolled back had learnt, and what runs crashed over."""
    from service.store.stores import open_stores

    stores = open_stores(settings_from(config))
    try:
        found = stores.quarantine.all()
    finally:
        stores.close()
    rows = [
        ("crashes" if h.run is None else f"adapter {h.adapter} rolled back", h.run or "", h.cases, h.generations)
        for h in found
    ]
    table("quarantined", ("after", "run", "failure cases", "generations"), rows)
    write_json(json, {"quarantined": [asdict(each) for each in found]})


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
