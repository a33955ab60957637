"""`cases`: rejections of the draft and quarantined texts, without loading a model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.console import err, out, table, write_json
from service.cli.operate import read
from service.cli.options import Config, Json, Remote, settings_from
from service.core import RedraftError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from service.api.page.schemas import CaseAnswer
    from service.cli.case_text import CaseText, TextReader
    from service.store.log.cases import CaseRow
    from service.store.stores import Stores

cases = typer.Typer(help="Where the draft was rejected, and which texts are quarantined.", no_args_is_help=True)


@cases.command("list")
def list_cases(
    config: Config = None,
    url: Remote = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number shown, newest first.")] = 20,
    offset: Annotated[int, typer.Option(min=0)] = 0,
    text: Annotated[
        bool,
        typer.Option("--text", help="Decode tokens with the target's tokenizer, and show the text before them."),
    ] = False,
    json: Json = None,
) -> None:
    """List failure cases: what the draft proposed, and what the target chose instead. With --url, the cases of that
    server's pair, as text."""
    from service.cli.case_text import TextReader
    from service.store.stores import open_stores

    settings = settings_from(config)
    if url is not None:
        _list_served(url, settings.home, limit, offset, json)
        return
    stores = open_stores(settings)
    try:
        found = stores.cases.newest(limit, offset)
        texts = _texts(stores, found, TextReader(settings)) if text and found else {}
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


def _list_served(url: str, home: Path, limit: int, offset: int, json: Path | None) -> None:
    """Lists the newest failure cases of a server, page by page."""
    from service.api.page.routes import MAX_CASES
    from service.api.page.schemas import CasesAnswer

    found: list[CaseAnswer] = []
    before = ""
    while len(found) < offset + limit:
        asked = min(offset + limit - len(found), MAX_CASES)
        page = read(url, f"/cases?order=newest&limit={asked}{before}", CasesAnswer, home=home).cases
        found += page
        if len(page) < asked:
            break
        before = f"&before={page[-1].case}"
    del found[:offset]
    rows = [
        (c.case, c.id[:12], c.domain or "", c.position, f'"{c.context}"', f'"{c.drafted}"', f'"{c.target}"', _share(c.p),
         _share(c.q), "tie" if c.tie else "")
        for c in found
    ]  # fmt: skip
    columns = ("id", "generation", "domain", "at", "before", "drafted", "target", "p", "q", "")
    table("failure cases", columns, rows)
    write_json(json, {"cases": [case.model_dump(mode="json") for case in found]})


def _share(probability: float | None) -> str:
    return "?" if probability is None else f"{probability:.3f}"


@cases.command()
def show(
    case: Annotated[int, typer.Argument(min=1, help="Id of the failure case, as `cases list` shows it.")],
    config: Config = None,
    json: Json = None,
) -> None:
    """Show one failure case: the text before it, the draft's proposal, the target's token, and the text after it.

    Text is decoded with the target's tokenizer if it is on this disk; control characters are shown as escapes.
    """
    from service.cli.case_text import TextReader
    from service.store.stores import open_stores

    settings = settings_from(config)
    stores = open_stores(settings)
    try:
        found = stores.cases.get(case)
        try:
            text = _texts(stores, [found], TextReader(settings))[case]
        except RedraftError as error:
            # Without text, the figures can still be shown.
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


def _texts(stores: Stores, found: Sequence[CaseRow], reader: TextReader) -> dict[int, CaseText | None]:
    """Failure cases as text, by id; None if their tokens belong to another tokenizer."""
    from service.cli.case_text import AFTER, BEFORE

    return {row.id: reader.read(row.case, stores.cases.context(row.id, BEFORE, AFTER)) for row in found}


def _text_row(row: CaseRow, text: CaseText | None) -> tuple[object, ...]:
    one = row.case
    before, drafted, target, _ = _quoted(text)
    figures = (f"{one.p:.3f}", f"{one.q:.3f}", "tie" if one.tie else "")
    return (row.id, row.domain or "", before, drafted or one.drafted, target or one.target, *figures)


def _quoted(text: CaseText | None) -> tuple[str, str, str, str]:
    """Its parts in quotes, so that spaces at their ends are visible; empty without text."""
    if text is None:
        return "", "", "", ""
    return f'"{text.before}"', f'"{text.drafted}"', f'"{text.target}"', f'"{text.after}"'


def _fields(text: CaseText | None) -> dict[str, Any] | None:
    return None if text is None else asdict(text)


def _plain(row: CaseRow) -> dict[str, Any]:
    """A failure case as a JSON-compatible value."""
    about = {"id": row.id, "generation": row.generation, "domain": row.domain}
    return about | asdict(row.case) | {"trained_run": row.trained_run, "created_at": row.created_at.isoformat()}


@cases.command()
def stats(config: Config = None, json: Json = None) -> None:
    """Show counts of recorded data."""
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
def quarantined(config: Config = None, json: Json = None) -> None:
    """List quarantined texts: those learnt by rolled-back adapters, and those that crashed training runs."""
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
    """Release quarantined texts, so that runs may learn from them again."""
    from service.store.stores import open_stores

    stores = open_stores(settings_from(config))
    try:
        free = stores.quarantine.release(run)
    finally:
        stores.close()
    out.print(f"{free} failure cases released")
