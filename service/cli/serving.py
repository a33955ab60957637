"""`serve`, `doctor`, `models`."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from service.cli.console import at_terminal, err, out, require_consent, stages, table, write_json
from service.cli.names import check_model, check_models
from service.cli.options import (
    API_KEY,
    FORMER_API_KEY,
    Config,
    Database,
    Draft,
    Json,
    Model,
    Target,
    Yes,
    one_target,
    settings_from,
)
from service.cli.practice_question import ask_aside, tolerate_background
from service.core import RedraftError, StoreError
from service.open_files import OpenFilesLimit
from service.settings import Settings

if TYPE_CHECKING:
    import mlx.nn as nn

    from service.learning.loading import TrainingOutlook

log = logging.getLogger(__name__)

models = typer.Typer(help="Models: list, download and remove them.", no_args_is_help=True)


def serve(
    model: Model = None,
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 picks a free one.")] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            "--alias",
            "--served-model-name",
            "-a",
            help="A name of the model in the API, replacing its own; may be repeated (server.model_aliases).",
        ),
    ] = None,
    max_context: Annotated[
        int | None,
        typer.Option(
            "--max-context",
            "--max-model-len",
            "--ctx-size",
            "-c",
            help="Maximum prompt and output tokens of one request; by default the model's own limit.",
        ),
    ] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="Draft length per round; 0: no speculation.")] = None,
    database: Database = None,
    train: Annotated[
        bool,
        typer.Option("--train/--no-train", help="Train here, or leave it to other processes that share the database."),
    ] = True,
    record: Annotated[
        bool,
        typer.Option(
            "--record/--no-record", help="Record prompts and answers; without them, the draft does not learn."
        ),
    ] = True,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=API_KEY,
            help="A client's key, in addition to those of `redraft keys`. The environment keeps it out of process lists.",
        ),
    ] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate for HTTPS (PEM).")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error; request lines have level info.")
    ] = None,
) -> None:
    """Serve a model over HTTP (OpenAI's, Anthropic's and Redraft's own routes), and improve its draft while serving."""
    from service.app import start_notices
    from service.server import run_server

    settings = settings_from(
        config,
        models__target=one_target(model, target),
        models__draft=draft,
        server__host=host,
        server__port=port,
        server__model_aliases=alias or None,
        server__log_level=log_level,
        engine__max_context=max_context,
        engine__num_draft_tokens=num_draft_tokens,
        store__url=database,
        training__run_here=None if train else False,
        training__enabled=None if record else False,
        store__record=None if record else False,
        server__api_key=api_key,
        server__ssl_certfile=ssl_certfile,
        server__ssl_keyfile=ssl_keyfile,
    )
    check_models(settings)
    say = _log(settings)
    for notice in (*start_notices(settings), *_key_notices()):
        say(notice)
    if at_terminal():
        tolerate_background()

    def ready(url: str, token: str | None, choose_practice: Callable[[bool], object]) -> None:
        # Loaded objects live as long as the process. Every full collection would walk all of them and stall all answers
        # for 0.1 s.
        gc.collect()
        gc.freeze()
        say(f"redraft serves at {url}")
        # Only at a terminal: a file or log collector must not receive access to recorded text.
        if token is not None and sys.stderr.isatty() and settings.server.log_format != "json":
            err.print(f"the page, with recorded texts: {url}/#token={token}", highlight=False, soft_wrap=True)
        ask_aside(settings, choose_practice)

    _exit(run_server(settings, ready))


def _key_notices() -> list[str]:
    """Notices about a key in the environment, which may be meant only for client commands."""
    notices: list[str] = []
    if os.environ.get(API_KEY):
        notices.append(f"{API_KEY} is set: requests need that key, or one of `redraft keys`")
    if any(name.upper() == FORMER_API_KEY for name in os.environ):
        notices.append(f"{FORMER_API_KEY} is {API_KEY} now, for this command and those that call a server")
    return notices


def trainer(
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    database: Database = None,
) -> None:
    """Train for the servers of a PostgreSQL database on a separate machine. Use the servers' settings: the same pair
    and the same shared adapter folder (store.adapters). Servers started with --no-train leave all runs to the trainer;
    others do so while it is running."""
    from service.trainer import run_trainer

    settings = settings_from(config, models__target=target, models__draft=draft, store__url=database)
    check_models(settings)
    say = _log(settings)
    _exit(run_trainer(settings, lambda: say("redraft trains")))


def _log(settings: Settings) -> Callable[[str], None]:
    """Sets up the log. Returns a function that prints notices for the user, as JSON lines if the log is JSON."""
    from service.logs import set_up

    set_up(settings.server.log_format, settings.server.log_level)
    if settings.server.log_format == "json":
        return log.info
    return lambda text: err.print(text, highlight=False, soft_wrap=True)


def _exit(status: int) -> NoReturn:
    # Everything is written and closed. MLX's CUDA back end aborts while the interpreter shuts down (MLX 0.32.4 on an
    # H200: a clean
    # stop ended with SIGABRT), which a process supervisor would take for a crash.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def doctor(
    model: Model = None,
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    speed: Annotated[
        bool,
        typer.Option(
            "--speed",
            help="Also load the models (made or downloaded first) and time calls and rounds: a minute or more.",
        ),
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            help="Instead, show what a Mac with this much memory (such as 16GiB) gets with these models, on this disk or not.",
        ),
    ] = None,
    free: Annotated[
        str | None,
        typer.Option(
            "--free",
            help="With --memory: free memory once the models are loaded; by default what macOS usually leaves.",
        ),
    ] = None,
    tflops: Annotated[
        float,
        typer.Option(
            "--tflops",
            min=0.01,
            help="With --memory: the device's speed in large matrix products, which determines the time of a training run.",
        ),
    ] = 4.0,
    device: Annotated[
        Literal["metal", "cpu"], typer.Option("--device", help="With --memory: cpu computes in float32, as Linux does.")
    ] = "metal",
    json: Json = None,
) -> None:
    """Show device, precision, speed, versions, memory and disk, and report problems.

    Exits with 1 if something prevents `redraft serve` from working (no MLX, an outdated package, an unavailable
    database, a model that is missing or does not fit into memory). What only costs speed is a warning. Without a named
    draft, it shows which one `serve` would use. For models on this disk it shows, without loading them, their memory
    and the maximum request length. With --memory, this machine is ignored: it shows the context and rows that a Mac of
    that size gets, the memory of each part, and whether training fits. With --speed: the cost of target calls and draft
    steps, and the acceptance rate from which drafting pays (docs/tuning.md).
    """
    from service.cli.models import draft_of
    from service.models.machine import examine
    from service.store.database import describe

    settings = settings_from(config, models__target=one_target(model, target), models__draft=draft)
    drafting, how = draft_of(settings)
    names = [settings.models.target, *([drafting] if drafting else [])]
    if memory is not None:
        _plan(settings, names, memory, free, tflops, device, json)
        return
    if free is not None:
        raise typer.BadParameter("requires --memory", param_hint="--free")
    found = examine(settings.home, names, revision=settings.models.revision)
    try:
        database = describe(settings.database_url)
    except StoreError as error:
        database = "cannot be used"
        found.problems.append(str(error))
    gib = 2**30
    products = "not measured" if found.gflops is None else f"{found.gflops:.0f} GFLOP/s (float32 matrix product)"
    if found.slow_gflops is not None:
        products += f"; {found.slow_gflops:.0f} with the BLAS that MLX ships with"
    rows: list[tuple[str, object]] = [
        ("system", found.system),
        ("cores", found.cores),
        ("device", found.device or "no working MLX"),
        ("precision", found.precision),
        ("matrix speed", products),
        ("fast BLAS", found.blas or "none"),
        ("open files", _open_files(found.open_files)),
        ("memory", f"{found.host_memory / gib:.1f} GiB"),
        ("memory free", f"{found.host_memory_free / gib:.1f} GiB"),
        ("draft", how),
        ("models need", f"{found.needed / gib:.2f} GiB" if found.needed is not None else _unknown(settings, names)),
        ("disk free", f"{found.disk_free / gib:.1f} GiB"),
        ("database", database),
        *((f"version of {name}", version) for name, version in found.versions.items()),
    ]
    loaded = None
    if found.device_memory_free is not None:
        try:
            loaded = _models_at_hand(settings, names)
        except RedraftError as error:
            loaded = _without_draft(settings, names)
            if loaded is not None:
                found.warnings.append(f"the draft is left out: {error}")
            elif str(error) not in found.problems:  # What is wrong with a file was found before.
                found.problems.append(str(error))
    table("redraft doctor", ("what", "here"), rows)
    for problem in found.problems:
        out.print(f"! {problem}", style="red", highlight=False)
    for warning in found.warnings:
        out.print(f"warning: {warning}", style="yellow", highlight=False)
    if not found.problems and not found.warnings:
        out.print("nothing is wrong", style="green")
    sizes = None
    if loaded is not None and found.device_memory_free is not None:
        sizes = _memory(settings, loaded, found.device_memory_free, found.gflops)
    timed = _speed(settings) if speed and not found.problems else None
    more = {"database": database, "memory": sizes, "speed": timed}
    write_json(json, asdict(found) | {name: each for name, each in more.items() if each is not None})
    if found.problems:
        raise typer.Exit(1)


def _plan(
    settings: Settings,
    names: Sequence[str],
    memory: str,
    free: str | None,
    tflops: float,
    on: Literal["metal", "cpu"],
    json: Path | None,
) -> None:
    """Prints what a machine of this size gets. Exits with 1 if nothing can be served."""
    from service.evaluation.pair_plan import plan_pair

    sizes = _bytes(memory, "--memory"), None if free is None else _bytes(free, "--free")
    found = plan_pair(names, settings, memory=sizes[0], free=sizes[1], tflops=tflops, on=on)
    plan, row, training = found.plan, found.plan.budget.row, found.training
    rows = [
        ("memory", _size(found.memory)),
        ("weights", _size(found.weights)),
        ("free once they are loaded", _size(found.free)),
        ("freed memory held for reuse, at most", _size(plan.cache)),
        ("activations of a prefill, about", _size(plan.activations)),
        ("adapters of the draft, two at most", _size(plan.adapters)),
        ("requests and cached prefixes, at most", _size(plan.budget.size)),
        ("a token of a request", _size(row.first + row.scores)),
        ("a request, whatever its length", _size(row.fixed)),
        ("tokens of a request, at most", f"{found.context:,}"),
        ("requests of 4,096 tokens together", str(found.rows)),
    ]
    if training is not None:
        rows.append(("how a run trains beside an idle server", _training(training)))
    table("redraft doctor", ("what", " + ".join(names)), rows)
    for line in found.assumed:
        out.print(f"assumed: {line}", highlight=False)
    if plan.problem is not None:
        out.print(f"! {plan.problem}", style="red", highlight=False)
    write_json(json, found.as_json())
    if plan.problem is not None:
        raise typer.Exit(1)


def _bytes(text: str, option: str) -> int:
    """Bytes of a size such as "16GiB", "16 GB" (10^9) or "512MiB"; a bare number is GiB."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:(T|G|M)(i?)B?)?\s*", text, re.IGNORECASE)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a size: write it as 16GiB", param_hint=option)
    number, prefix, binary = found.groups()
    power = {"M": 2, "G": 3, "T": 4}[(prefix or "G").upper()]
    return int(float(number) * (1024 if binary or not prefix else 1000) ** power)


@dataclass(frozen=True, slots=True)
class ModelsAtHand:
    """Folders of a target and its draft on this disk, and the models in them without weights."""

    target: Path
    draft: Path | None
    target_model: nn.Module
    draft_model: nn.Module | None


def _without_draft(settings: Settings, names: Sequence[str]) -> ModelsAtHand | None:
    """The target without its draft, if `serve` would leave out an unusable draft that was not named. None: it would
    not, or the target cannot be served either."""
    if settings.models.draft is not None or len(names) < 2:
        return None
    try:
        return _models_at_hand(settings, names[:1])
    except RedraftError:
        return None


def _unknown(settings: Settings, names: Sequence[str]) -> str:
    """Why the models' memory is unknown."""
    from service.models.machine import folders_at_hand

    here = folders_at_hand(names, settings.home, settings.models.revision)
    return "not known" if here else "not on disk yet"


def _open_files(limit: OpenFilesLimit) -> str:
    soft, hard = ("no limit" if each is None else f"{each:,}" for each in (limit.soft, limit.hard))
    return soft if soft == hard else f"{soft}; hard limit {hard}, towards which `serve` raises it"


def _models_at_hand(settings: Settings, names: Sequence[str]) -> ModelsAtHand | None:
    """The models of these names without weights, None if one is not on disk. Raises ModelError or PairError if they
    cannot be served."""
    from service.models.machine import folders_at_hand
    from service.models.pair import unread_pair

    folders = folders_at_hand(names, settings.home, settings.models.revision)
    if len(folders) < len(names):
        return None
    target, draft = folders[0], folders[1] if len(folders) > 1 else None
    return ModelsAtHand(target, draft, *unread_pair(target, draft))


def _memory(settings: Settings, loaded: ModelsAtHand, free: int, gflops: float | None) -> dict[str, Any]:
    """The memory for serving these models, in bytes, printed as a table. free: bytes of the device's memory. gflops:
    its speed; None: unknown."""
    from service.engine.device import cache_limit
    from service.engine.footprint import weight_bytes
    from service.evaluation.pair_plan import plan_models
    from service.learning.loading import training_shape

    models = (loaded.target_model, loaded.draft_model)
    weights, rank = weight_bytes(*models), settings.training.rank
    shape = None if loaded.draft is None else training_shape(loaded.target, loaded.draft, rank=rank)
    plan, outlook = plan_models(
        models, shape, settings, max(free - weights, 0), cache=cache_limit(), tflops=gflops and gflops / 1e3
    )
    budget, row = plan.budget, plan.budget.row
    memory: dict[str, Any] = {
        "weights": weights,
        "kv_per_token": row.first,
        "kv": budget.size,
        "activations": plan.activations,
        "adapters": plan.adapters,
        "row": row.fixed,
        "scores_per_token": row.scores,
        "prefix": plan.prefix,
        "cache_limit": plan.cache,
        "training": plan.training,
        "training_outlook": None if outlook is None else asdict(outlook),
        "total_free": free,
    }
    windows = [max(most for most, _ in row.windows)] if row.windows else []
    rows = [
        ("free", _size(free)),
        ("weights", _size(memory["weights"])),
        ("a training run, while there is one, at most", _size(memory["training"])),
        *(() if outlook is None else (("how a run trains", _training(outlook)),)),
        ("activations of a prefill, about", _size(plan.activations)),
        ("adapters of the draft, two at most", _size(plan.adapters)),
        ("freed memory held for reuse, at most", _size(memory["cache_limit"])),
        ("a token of a request", _size(row.first)),
        *((f"behind {most:,} tokens, for windows are full", _size(row.position)) for most in windows),
        ("a request, whatever its length", _size(row.fixed)),
        ("requests and cached prefixes, at most", _size(budget.size)),
        ("of which cached prefixes, at most", _size(min(memory["prefix"], budget.size))),
        *(
            (f"tokens that fit for each of {n} requests", f"{budget.longest(n):,}")
            for n in (1, settings.engine.max_rows)
        ),
    ]
    table("memory", ("what", "here"), rows)
    if plan.problem is not None:
        out.print(f"! {plan.problem}", style="red", highlight=False)
    return memory


def _training(outlook: TrainingOutlook) -> str:
    """Describes how a run trains."""
    if not outlook.fits:
        return f"does not fit: {outlook}"
    time = "" if outlook.minutes is None else f", an epoch of a full window in about {max(outlook.minutes, 1):,.0f} min"
    return f"{outlook}, {_size(outlook.peak_bytes)}{time}"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**10:.1f} KiB"


def _speed(settings: Settings) -> dict[str, Any]:
    """Times the models and prints the tables."""
    from service.cli.models import model_folders
    from service.evaluation.bench.doctor_speed import run_speed

    folders = model_folders(settings)
    with stages("doctor") as on_progress:
        timed = run_speed((folders.target, folders.draft), on_progress)
    sizes, curves, steps = list(timed["call_ms"]), list(timed["call_ms"].values()), timed["step_ms"]
    lines = [
        (f"target, {n} token{'s' if n > 1 else ''} a row", [_ms(each[n], each[1]) for each in curves])
        for n in curves[0]
    ]
    if steps:
        lines.append(("draft step", [_ms(steps[rows], each[1]) for rows, each in zip(sizes, curves, strict=True)]))
    columns = ("call", *(f"{rows} row{'s' if rows > 1 else ''}, ms (of a call over 1 token)" for rows in sizes))
    table("speed", columns, [(name, *cells) for name, cells in lines])
    rows = [(f"a round beyond its calls, {mode}", f"{ms:.2f} ms") for mode, ms in timed["overhead_ms"].items()]
    rows += [
        (f"drafts of {k} pay from an acceptance rate of", "never" if rate is None else f"{rate:.2f}")
        for k, rate in timed["pays_from"].items()
    ]
    table("one stream", ("what", "here"), rows)
    return timed


def _ms(ms: float, one: float) -> str:
    return f"{ms:.2f} ({ms / one:.2f} x)"


@models.command("list")
def list_models(config: Config = None, json: Json = None) -> None:
    """List models in the catalogue and on this disk (including the hub's cache): their size, the memory of their
    weights on this machine, and their default draft. Hub names and folders that are not listed work as well."""
    from service.cli.models import model_rows

    rows = model_rows(settings_from(config).home)
    table("models", ("name", "from", "on disk", "memory", "draft"), [row.cells() for row in rows])
    for row in rows:
        if row.problem is not None:
            out.print(f"! {row.name} cannot be served: {row.problem}", style="red", highlight=False, soft_wrap=True)
    write_json(json, {"models": [asdict(row) for row in rows]})


@models.command("get")
def get_model(name: str, config: Config = None) -> None:
    """Download or convert a model now instead of at the first start, and print its folder."""
    from service.models.catalog import cached, hub_name, resolve
    from service.models.draft_choice import choices

    settings = settings_from(config)
    revision = settings.models.revision if name == settings.models.target else None
    check_model(name, settings.home, revision)
    folder = resolve(name, settings.home, revision=revision, on_step=lambda step: err.print(step, highlight=False))
    out.print(str(folder), highlight=False, soft_wrap=True)
    for choice in choices(name, folder, settings.home)[:1]:
        err.print(f"its draft: {choice.name}, {choice.why}", highlight=False, soft_wrap=True)
        if hub_name(choice.name) and cached(choice.name) is None:
            err.print(f"fetch it too: redraft models get {choice.name}", highlight=False, soft_wrap=True)


@models.command("remove")
def remove(
    name: Annotated[str, typer.Argument(help="A name from `redraft models list`.")],
    yes: Yes = False,
    force: Annotated[
        bool, typer.Option("--force", help="Remove it even if an active adapter was trained for it.")
    ] = False,
    config: Config = None,
) -> None:
    """Delete a model from this disk: a converted or generated one, or all revisions in the hub's cache, which other
    programs share. Refused while an active adapter was trained for it."""
    from service.cli.models import require_unneeded
    from service.models.inventory import remove_model, stored_model

    settings = settings_from(config)
    model = stored_model(name, settings.home)
    if not force:
        require_unneeded(model, settings)
    require_consent(f"remove {model.name} ({_size(model.size)}, {model.origin})?", yes)
    remove_model(model)
    out.print(f"{model.name} removed, {_size(model.size)}", highlight=False, soft_wrap=True)
