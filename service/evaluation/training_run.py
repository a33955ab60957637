"""One training run through a real server: it answers prompts, records its failure cases, and trains on them when asked."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from service.core import AdapterRef, RedraftError, RunState
from service.evaluation.clients import Clients
from service.evaluation.progress import OnProgress, silent
from service.evaluation.prompts import PromptLine
from service.evaluation.server_process import LocalServer, require_unused
from service.settings import Settings, sqlite_url
from service.store.database import Database
from service.store.registry.adapters import Adapters

CLIENTS = 16
"""Clients at a time that send the training prompts."""
DRAFT_LENGTH = 3
"""Tokens drafted a round in experiments, where no planner chooses."""
NEVER = 10**9
"""As min_cases: a run starts only when it is requested."""
ALONE = 16
"""Requests of the one client before the run, whose speed is compared with that during it."""


@dataclass(frozen=True, slots=True)
class ClientSpeed:
    """Tokens per second of one client, before the run and during it."""

    before: float
    during: float


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """run: the finished run as the API shows it. adapter: its candidate, promoted or not. seconds: from the request to the
    end of the run. client_speed: None unless a client went on asking."""

    run: dict[str, Any]
    adapter: AdapterRef
    seconds: float
    client_speed: ClientSpeed | None = None


def serve_and_train(
    settings: Settings,
    train: Sequence[PromptLine],
    folder: Path,
    *,
    replay: float | None = None,
    practice_minutes: float | None = None,
    beside: bool = False,
    max_tokens: int = 128,
    on_progress: OnProgress = silent,
) -> TrainingResult:
    """Serve the prompts, request one training run and wait for its end.

    folder: keeps database, adapters and log. replay: another replay share than the settings'. practice_minutes: the run is one
    of practice. beside: one client goes on asking during the run. Raises BadRequest for a folder that has a database,
    RedraftError when the server does not start, or when a request or the run fails.
    """
    require_unused(folder)
    server = _server(settings, folder, replay)
    speed: ClientSpeed | None = None
    server.start()
    try:
        clients = Clients(server.url, iter(train), clients=CLIENTS, max_tokens=max_tokens)
        clients.wait(lambda done: on_progress("serving", done, len(train)))
        clients.raise_failures()
        if beside:
            run, seconds, speed = _train_beside_client(server, train, max_tokens, practice_minutes, on_progress)
        else:
            run, started, ended = _train(server, practice_minutes, on_progress)
            seconds = ended - started
    finally:
        server.stop()
    if run["adapter"] is None:
        raise RedraftError(f"the run {run['state']}: {run['error']}")
    database = Database(sqlite_url(folder / "redraft.db"))
    try:
        return TrainingResult(run, Adapters(database, folder / "adapters").get(run["adapter"]), seconds, speed)
    finally:
        database.close()


def _server(settings: Settings, folder: Path, replay: float | None) -> LocalServer:
    training = settings.training.model_dump(exclude_unset=True) | {"min_cases": NEVER, "tick_seconds": 0.5}
    # What an operator chose in this home is no part of the measurement.
    training["practice"] = settings.training.practice
    if replay is not None:
        training["replay"] = replay
    return LocalServer(
        folder,
        {
            "models": settings.models.model_dump(exclude_none=True),
            # Always drafting: cases are wanted here, and a draft that does not pay for a full batch leaves none.
            "engine": {"max_rows": CLIENTS, "adaptive": False, "num_draft_tokens": DRAFT_LENGTH},
            "training": training,
            "gate": settings.gate.model_dump(exclude_unset=True),
        },
        settings.home,
    )


def _train(
    server: LocalServer, practice_minutes: float | None, on_progress: OnProgress
) -> tuple[dict[str, Any], float, float]:
    """Request a run and wait for its end: the run, and time.monotonic() at its start and its end."""
    run = server.post("/train" if practice_minutes is None else f"/train?practice_minutes={practice_minutes:g}")
    started = time.monotonic()
    while not RunState(run["state"]).over:
        time.sleep(0.5)
        run = server.get(f"/train/{run['id']}")
        on_progress(run["state"], run["progress"]["step"], run["progress"]["steps"] or 1)
    return run, started, time.monotonic()


def _train_beside_client(
    server: LocalServer,
    train: Sequence[PromptLine],
    max_tokens: int,
    practice_minutes: float | None,
    on_progress: OnProgress,
) -> tuple[dict[str, Any], float, ClientSpeed]:
    """The run, its seconds, and the speed of one client before it and during it."""
    alone = Clients(server.url, iter(train[:ALONE]), clients=1, max_tokens=max_tokens)
    alone.wait(lambda done: on_progress("one client, alone", done, ALONE))
    before = _speed(alone, 0.0, time.monotonic())
    with _asking(server, train, max_tokens) as client:
        run, started, ended = _train(server, practice_minutes, on_progress)
    return run, ended - started, ClientSpeed(before, _speed(client, started, ended))


@contextmanager
def _asking(server: LocalServer, train: Sequence[PromptLine], max_tokens: int) -> Generator[Clients]:
    """One client that asks until the block ends: its prompts never do."""
    client = Clients(server.url, cycle(train), clients=1, max_tokens=max_tokens)
    try:
        yield client
    finally:
        client.stop()


def _speed(clients: Clients, after: float, before: float) -> float:
    """Tokens per second of requests that were sent and answered between two moments; 0 without any."""
    clients.raise_failures()
    inside = [answer for answer in clients.answers if after <= answer.started and answer.ended <= before]
    seconds = sum(answer.ended - answer.started for answer in inside)
    return sum(answer.count for answer in inside) / seconds if seconds else 0.0
