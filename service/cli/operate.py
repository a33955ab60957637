"""`train`, `practice` and `adapters`: operator requests to a running server over HTTP, and reads of the log."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import httpx
import typer
from pydantic import BaseModel, ValidationError

from service.cli.console import out, progress, require_consent, table, write_json
from service.cli.models import active_adapter, model_folders, pair_folders
from service.cli.options import (
    API_KEY,
    LOCAL,
    VERSION,
    Config,
    Json,
    Remote,
    Url,
    Yes,
    adapter_name,
    adapter_version,
    settings_from,
)
from service.core import (
    BARE_DRAFT,
    AdapterRef,
    AdapterRefused,
    BadRequest,
    RedraftError,
    RunState,
    Unavailable,
)
from service.settings import LOOPBACK, Settings

Shape = TypeVar("Shape", bound=BaseModel)

adapters = typer.Typer(help="Adapter versions of the draft.", no_args_is_help=True)


def call(
    url: str,
    method: str,
    path: str,
    sent: object = None,
    *,
    home: Path | None = None,
    headers: Mapping[str, str] | None = None,
) -> httpx.Response:
    """One call to a server, with the key in REDRAFT_API_KEY. Without a key, a server on this machine gets the token in
    the folder `home`. Returns any response. Raises Unavailable if there is none."""
    local = is_local(url)
    sent_headers = dict(headers or {})
    if key := os.environ.get(API_KEY) or (_token(home) if home is not None and local else None):
        sent_headers["Authorization"] = f"Bearer {key}"
    # Local calls bypass proxies, which would see the token and mark the request as forwarded.
    direct = {"http://": None, "https://": None} if local else None
    try:
        with httpx.Client(mounts=direct, timeout=120.0) as client:
            return client.request(method, f"{url.rstrip('/')}{path}", headers=sent_headers, json=sent)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unavailable(f"no server answers at {url} ({error}); is `redraft serve` running?") from error


def _token(home: Path) -> str | None:
    from service.store.access.local_token import read_token

    return read_token(home)


def is_local(url: str) -> bool:
    """Whether a URL has a loopback address."""
    try:
        host = httpx.URL(url).host
        return host in LOOPBACK or ip_address(host).is_loopback
    except (httpx.InvalidURL, ValueError):
        return False


def ask(
    url: str,
    method: str,
    path: str,
    sent: object = None,
    *,
    home: Path | None = None,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """One call to the server's API through `call`. Raises RedraftError with the server's message, Unavailable if no
    server answers."""
    answer = call(url, method, path, sent, home=home, headers=headers)
    try:
        body = answer.json()
        refused = str(body["error"]["message"]) if answer.is_error else None
    except (ValueError, KeyError, TypeError):
        body = refused = None
    if refused is not None:
        raise RedraftError(refused)
    if not isinstance(body, dict):
        raise Unavailable(f"what answers at {url} (status {answer.status_code}) is not `redraft serve`")
    return cast("dict[str, Any]", body)


def read(url: str, path: str, shape: type[Shape], *, home: Path | None = None) -> Shape:
    """The response to a GET request through `ask`, parsed as `shape`. Raises Unavailable if it has another shape."""
    body = ask(url, "GET", path, home=home)
    try:
        return shape.model_validate(body)
    except ValidationError as error:
        raise Unavailable(f"what answers at {url} is not `redraft serve`, or one of another version") from error


def train(url: Url = LOCAL, wait: Annotated[bool, typer.Option(help="Follow the run to its end.")] = True) -> None:
    """Start a training run on a running server.

    Exits with 0 if the run was promoted or rejected (the gate's verdict, either way), with 1 if it ended without a
    verdict. With --no-wait: with 0 once it is started.
    """
    _follow(url, "/train", wait)


def practice(
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes for writing and training together.")] = 15.0,
    url: Url = LOCAL,
    wait: Annotated[bool, typer.Option(help="Follow the run to its end.")] = True,
    by_itself: Annotated[
        bool | None,
        typer.Option("--on/--off", help="Start no run now; turn automatic practice runs on or off."),
    ] = None,
) -> None:
    """Let the target of a running server write text similar to logged traffic, and train the draft on it.

    The run pauses while requests are answered. Exits like `train`. With --on or --off, the server remembers, also
    across restarts, whether practice starts automatically while it is idle; this is refused if its configuration sets
    training.practice.
    """
    if by_itself is not None:
        now = ask(url, "PUT", "/practice", {"on": by_itself})
        out.print(f"practice by itself is {practice_text(now)}", highlight=False, soft_wrap=True)
        return
    _follow(url, f"/train?practice_minutes={minutes:g}", wait)


def practice_text(state: dict[str, Any]) -> str:
    """Describes whether practice starts automatically."""
    text = "on" if state["on"] else "off"
    return f"{text}, waits: {state['waits']}" if state["waits"] else text


def _follow(url: str, path: str, wait: bool) -> None:
    run = ask(url, "POST", path, headers={"Idempotency-Key": uuid.uuid4().hex})
    with progress(f"run {run['id']}") as bar:
        while wait and not RunState(run["state"]).over:
            time.sleep(1.0)
            run = ask(url, "GET", f"/train/{run['id']}")
            done = run["progress"]
            state = "writing" if done["writing"] else run["state"]
            note = state if done["loss"] is None else f"{state}, loss {done['loss']:.3f}"
            bar(done["step"], done["steps"] or 1, note)
    state = RunState(run["state"])
    if state.gives_texts_back:
        reason = run["error"] or "the server gives no reason"
        raise RedraftError(f"run {run['id']} {state.words}: {reason}; its texts were given back")
    why = (run["verdict"] or {}).get("reason") or ""
    out.print(f"run {run['id']}: {run['state']} {why}", highlight=False, soft_wrap=True)


@adapters.command("list")
def list_adapters(url: Remote = None, config: Config = None, json: Json = None) -> None:
    """List all adapter versions, newest first, with the start of their pair's fingerprints (target and draft); for this
    machine's database also the folders."""
    from service.api.schemas import AdapterAnswer, AdaptersAnswer
    from service.store.stores import open_stores

    settings, folders = settings_from(config), dict[int, Path]()
    if url is not None:
        found = read(url, "/adapters", AdaptersAnswer, home=settings.home).adapters
    else:
        stores = open_stores(settings)
        try:
            known = stores.adapters.all()
        finally:
            stores.close()
        found = [AdapterAnswer.model_validate(ref) for ref in known]
        folders = {ref.id: ref.folder for ref in known}
    rows = [
        (a.id, a.state, adapter_name(a.parent), a.run or "", a.erased_texts or "", a.rank, a.sha256[:12],
         f"{a.created_at:%Y-%m-%d %H:%M}", f"{(a.target or '?')[:6]} {a.draft[:6]}",
         *([folders[a.id]] if url is None else []))
        for a in found
    ]  # fmt: skip
    columns = ("id", "state", "parent", "run", "erased texts", "rank", "sha256", "made", "pair")
    table("adapters", (*columns, "folder") if url is None else columns, rows)
    here = [{"folder": str(folders[a.id])} if url is None else {} for a in found]
    write_json(json, {"adapters": [a.model_dump(mode="json") | folder for a, folder in zip(found, here, strict=True)]})


@adapters.command()
def activate(
    adapter: Annotated[
        int, typer.Argument(parser=adapter_version, metavar=VERSION, help="A version, or `bare` for the base draft.")
    ],
    url: Url = LOCAL,
) -> None:
    """Switch a running server to an adapter version."""
    _show_switch(ask(url, "POST", f"/adapters/{adapter}/activate"))


@adapters.command()
def remove(
    adapter: Annotated[
        int, typer.Argument(parser=adapter_version, metavar=VERSION, help="A version that is not serving.")
    ],
    yes: Yes = False,
    url: Url = LOCAL,
) -> None:
    """Delete the files of an adapter version. It can no longer serve; its run and verdict stay on record."""
    for known in ask(url, "GET", "/adapters")["adapters"]:
        if known["id"] == adapter:
            about = f"{known['state']}, of run {known['run']}, made {known['created_at'][:16].replace('T', ' ')}"
            require_consent(
                f"delete the files of adapter {adapter} ({about}) at {url}? It cannot serve any more then.", yes
            )
    ask(url, "DELETE", f"/adapters/{adapter}/files")
    out.print(f"the files of adapter {adapter} are deleted")


@adapters.command()
def rollback(
    url: Url = LOCAL,
    expected: Annotated[
        int | None,
        typer.Option(
            parser=adapter_version,
            metavar=VERSION,
            help="Only roll back if this version is serving.",
        ),
    ] = None,
) -> None:
    """Switch a running server back to the active adapter's parent. This counts as a lost watch: the texts the adapter
    learnt from are quarantined, and the next run waits."""
    _show_switch(ask(url, "POST", "/adapters/rollback" + ("" if expected is None else f"?expected={expected}")))


def _show_switch(answer: dict[str, Any]) -> None:
    active = answer["active"]
    out.print(f"{'the bare draft' if active == BARE_DRAFT else f'adapter {active}'} serves now")


@adapters.command()
def export(
    adapter: int,
    folder: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    fuse: Annotated[bool, typer.Option("--fuse", help="Write a complete draft model with the adapter merged.")] = False,
    config: Config = None,
) -> None:
    """Export an adapter for mlx-lm: for `--adapter-path`, or with --fuse for `--draft-model`."""
    from service.learning.export import export_adapter, export_fused
    from service.models.pair import mlx_lm_runs
    from service.store.stores import open_stores

    settings = settings_from(config)
    stores = open_stores(settings)
    try:
        ref = stores.adapters.get(adapter)
    finally:
        stores.close()
    if not fuse:
        export_adapter(ref, folder)
    else:
        draft = model_folders(settings).draft
        if draft is None:
            raise RedraftError("these settings name no draft model to fold the adapter into")
        if not mlx_lm_runs(draft):
            raise BadRequest(
                "mlx-lm cannot draft with a head that reads hidden states: export without --fuse", field="fuse"
            )
        export_fused(ref, draft, folder)
    out.print(f"adapter {adapter} written to {folder}", highlight=False, soft_wrap=True)


@adapters.command()
def push(
    repo: Annotated[
        str, typer.Argument(help="Repository on the Hugging Face hub, ORG/NAME; created if it does not exist.")
    ],
    adapter: Annotated[int | None, typer.Option(min=1, help="Version; by default the active one.")] = None,
    base_model: Annotated[
        str | None,
        typer.Option(help="Hub name of the adapter's draft; by default models.draft, if that is a hub name."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make the repository public.")] = False,
    config: Config = None,
) -> None:
    """Upload an adapter with a model card to the hub, with the account of `hf auth login` or HF_TOKEN. It was trained
    on recorded requests and may reveal what they were about: the repository is private unless --public is given."""
    import tempfile

    from service.learning import hub
    from service.models.catalog import hub_name
    from service.store.registry.adapters import EvaluationKind
    from service.store.stores import open_stores

    settings = settings_from(config)
    base = base_model or hub_name(settings.models.draft or "")
    if base is None:
        raise BadRequest(
            f"{settings.models.draft or 'the draft'} has no name on the hub: give --base-model", field="base_model"
        )
    stores = open_stores(settings)
    try:
        ref = stores.adapters.get(adapter) if adapter is not None else active_adapter(stores, *pair_folders(settings))
        if ref is None:
            raise RedraftError("no adapter is active")
        if base_model is None:
            _require_own_draft(ref, settings)
        texts = stores.runs.texts(ref.run) if ref.run is not None else 0
        judged = stores.adapters.evaluations(ref.id, EvaluationKind.GATE)
    finally:
        stores.close()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "adapter"
        target, verdict = settings.models.target, judged[-1][1] if judged else None
        target = hub_name(target) or Path(target).name
        hub.write_folder(ref, folder, base_model=base, target=target, texts=texts, verdict=verdict)
        url = hub.push(folder, repo, private=not public, message=f"Adapter {ref.id}")
    out.print(f"adapter {ref.id} is at {url}", highlight=False, soft_wrap=True)


def _require_own_draft(ref: AdapterRef, settings: Settings) -> None:
    """Raises AdapterRefused unless the settings name the draft that an adapter was trained for, BadRequest if that
    draft is not on this disk for comparison."""
    from service.models.fingerprint import model_fingerprint
    from service.models.machine import folder_at_hand

    name = settings.models.draft or ""
    folder = folder_at_hand(name, settings.home)
    if folder is None:
        raise BadRequest(
            f"{name} is not on this disk, so it cannot be compared with the draft of adapter {ref.id}: give --base-model",
            field="base_model",
        )
    if model_fingerprint(folder) != ref.draft:
        raise AdapterRefused(
            f"adapter {ref.id} was trained for another draft than {name}: give that one's name with --base-model"
        )
