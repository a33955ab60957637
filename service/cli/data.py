"""`data` and `db`: export or erase recorded requests, without loading a model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from service.cli.console import STDOUT, err, out, require_consent
from service.cli.operate import ask, is_local
from service.cli.options import LOCAL, Config, Url, Yes, settings_from
from service.core import DatabaseTaken, RedraftError, Selection
from service.settings import Settings

if TYPE_CHECKING:
    from service.cli.case_text import TextReader
    from service.core import Generation
    from service.store.stores import Stores

data = typer.Typer(help="Recorded requests: export or erase them.", no_args_is_help=True)
db = typer.Typer(help="The database.", no_args_is_help=True)

Ids = Annotated[list[str] | None, typer.Option("--id", help="The generation of this answer; may be repeated.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", help="Generations requested with the key of this name.")]
Client = Annotated[str | None, typer.Option("--client", help="Generations of this client.")]
Domain = Annotated[str | None, typer.Option("--domain", help="Generations of this domain.")]
Before = Annotated[datetime | None, typer.Option("--before", help="Generations recorded before this local time.")]
Everything = Annotated[bool, typer.Option("--everything", help="The whole log.")]
RETIRED = ", and retire every adapter that learnt an erased text"
PAGE = 200
"""Generations read at a time."""


@data.command()
def export(
    to: Annotated[Path, typer.Option("--out", help="Output file, readable only by its owner; -: standard output.")],
    config: Config = None,
    id: Ids = None,
    api_key: ApiKey = None,
    client: Client = None,
    domain: Domain = None,
    before: Before = None,
    everything: Everything = False,
) -> None:
    """Export recorded generations that match all criteria as JSON lines, oldest first: prompt and answer as text and as
    tokens, tags, sampling, and failure cases. Text is decoded with the target's tokenizer if it is on this disk."""
    from service.cli.case_text import TextReader
    from service.store.stores import open_stores

    settings = settings_from(config)
    selection = _selection(id, api_key, client, domain, before, everything)
    stores = open_stores(settings)
    try:
        try:
            reader = TextReader(settings)
        except RedraftError as error:
            # Without text, the tokens can still be exported.
            err.print(str(error), highlight=False, soft_wrap=True)
            reader = None
        names = stores.generations.names(selection)
        written = 0
        with _opened(to) as file:
            for start in range(0, len(names), PAGE):
                for found in reversed(stores.generations.by_ids(names[start : start + PAGE])):
                    file.write(json.dumps(_line(found, reader), ensure_ascii=False) + "\n")
                    written += 1
    finally:
        stores.close()
    err.print(f"{written} generations written", highlight=False)


@data.command("erase")
def erase_data(
    config: Config = None,
    keep: Annotated[int | None, typer.Option(min=0, help="Keep this many newest generations.")] = None,
    id: Ids = None,
    api_key: ApiKey = None,
    client: Client = None,
    domain: Domain = None,
    before: Before = None,
    everything: Everything = False,
    retire_adapters: Annotated[
        bool, typer.Option("--retire-adapters", help="Adapters that learnt an erased text never serve again.")
    ] = False,
    yes: Yes = False,
    url: Url = LOCAL,
) -> None:
    """Delete recorded generations and their failure cases: all except the newest (--keep), or those that match all
    criteria. The latter are also erased from every other place that stores text, by the server at --url if one is
    serving from this database. If --url is on another machine, that server erases its records, and nothing is deleted
    here."""
    from service.store.stores import open_stores

    chosen = bool(id or api_key or client or domain or before)
    if (keep is not None) + chosen + everything != 1:
        raise typer.BadParameter("give one of --keep N, --id/--api-key/--client/--domain/--before, --everything")
    settings = settings_from(config)
    selection = _selection(id, api_key, client, domain, before, everything) if keep is None else None
    if not is_local(url):
        if selection is None:
            raise typer.BadParameter("refers to this machine's database: leave out --url", param_hint="--keep")
        require_consent(f"erase {_in_words(selection)} at {url}{RETIRED if retire_adapters else ''}?", yes)
        _show_erased(ask(url, "DELETE", "/generations", selection.given() | {"retire_adapters": retire_adapters}))
        return
    stores = open_stores(settings)
    try:
        if keep is not None:
            count = max(stores.generations.stats().generations - keep, 0)
            require_consent(
                f"delete {count} recorded generations with their failure cases, all but the newest {keep}?", yes
            )
            gone = stores.generations.purge(keep, spare_replay=False).result()
            out.print(f"{gone} generations deleted")
            return
        assert selection is not None
        require_consent(_what_goes(stores, selection, retire_adapters=retire_adapters), yes)
        erased = _erase(stores, settings, selection, retire_adapters=retire_adapters, url=url)
    finally:
        stores.close()
    _show_erased(erased)


def _what_goes(stores: Stores, selection: Selection, *, retire_adapters: bool) -> str:
    """The question that names what an erasure deletes."""
    learnt = sorted(stores.lineage.adapters(selection))
    adapters = f" (adapters that learnt them: {', '.join(map(str, learnt))})" if learnt else ""
    retired = RETIRED if retire_adapters else ""
    count = len(stores.generations.names(selection))
    return f"delete {count} recorded generations with their failure cases{adapters}{retired}?"


def _in_words(selection: Selection) -> str:
    """Describes the selected generations."""
    given = {name: value for name, value in selection.given().items() if name != "everything"}
    texts = [f"{name} {', '.join(value) if isinstance(value, list) else value}" for name, value in given.items()]
    return f"the recorded generations of {', '.join(texts)}" if texts else "all that is recorded"


def _show_erased(erased: dict[str, Any]) -> None:
    out.print(f"{erased['generations']} generations deleted")
    for what, numbers in (("learnt them", erased["adapters"]), ("are revoked", erased["revoked"])):
        if numbers:
            out.print(f"adapters that {what}: {', '.join(map(str, numbers))}")


def _erase(
    stores: Stores, settings: Settings, selection: Selection, *, retire_adapters: bool, url: str
) -> dict[str, Any]:
    """core.Erased as a JSON object. If no server is serving from an SQLite database, none can start on it for the
    duration of the erasure, at most a lease of 25 s."""
    from service.app import erase
    from service.store.processes.members import Members, Role

    members = Members(stores.database, Role.COMMAND)
    try:
        members.join()
    except DatabaseTaken:
        asked = selection.given() | {"retire_adapters": retire_adapters}
        return ask(url, "DELETE", "/generations", asked, home=settings.home)
    try:
        return asdict(erase(stores, settings, selection, retire_adapters=retire_adapters))
    finally:
        members.leave()


def _selection(
    ids: list[str] | None,
    api_key: str | None,
    client: str | None,
    domain: str | None,
    before: datetime | None,
    everything: bool,
) -> Selection:
    from service.api.compatible import client_tag

    if bool(ids or api_key or client or domain or before) is everything:
        raise typer.BadParameter("give one or more of --id/--api-key/--client/--domain/--before, or --everything")
    return Selection(
        ids=frozenset(ids) if ids else None,
        api_key=api_key or None,
        client=client_tag(client or None),
        domain=domain or None,
        before=before,
        everything=everything,
    )


@contextmanager
def _opened(to: Path) -> Generator[TextIO]:
    if to == STDOUT:
        yield sys.stdout
        return
    # Contains clients' text: readable only by the owner, even if the file already existed.
    with os.fdopen(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        yield file


def _line(found: Generation, reader: TextReader | None) -> dict[str, Any]:
    prompt, tokenizer = found.prompt, found.provenance.tokenizer
    return {
        "id": found.id,
        "created_at": found.created_at.isoformat(),
        "api_key": prompt.api_key,
        "client": prompt.client,
        "domain": prompt.domain,
        "prompt": reader.text(prompt.tokens, tokenizer) if reader is not None else None,
        "answer": reader.text(found.output, tokenizer) if reader is not None else None,
        "prompt_tokens": prompt.tokens,
        "answer_tokens": found.output,
        "finish_reason": found.finish,
        "sampling": asdict(prompt.sampling),
        "failure_cases": [asdict(case) for case in found.cases],
    }


@db.command("upgrade")
def upgrade_database(config: Config = None) -> None:
    """Create the database, or upgrade it to this version's revision."""
    from service.store.database import revision, upgrade

    url = settings_from(config).database_url
    upgrade(url)
    out.print(f"the database is at revision {revision(url)}")
