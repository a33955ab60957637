"""One training run through the real loop: a server answers prompts, logs its failures, and trains on them when told."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from service.core import AdapterRef, RedraftError
from service.evaluation.prompts import PromptLine
from service.evaluation.server_process import LocalServer
from service.evaluation.clients import Traffic
from service.settings import Settings, sqlite_url
from service.store.adapters import Adapters
from service.store.database import Database

CLIENTS = 16
DRAFTED = 3
"""Tokens drafted a round, in experiments where no engine chooses."""
NEVER = 10**9
OVER = {"promoted", "rejected", "failed", "crashed"}

Step = Callable[[str, int, int], None]
"""stage, done, of."""


ALONE = 16
"""Requests of one client before a run, to compare with."""


def serve_and_train(
    settings: Settings,
    train: Sequence[PromptLine],
    folder: Path,
    *,
    replay: float | None = None,
    beside: bool = False,
    max_tokens: int = 128,
    on_step: Step = lambda stage, done, of: None,
) -> tuple[dict[str, Any], AdapterRef]:
    """The finished run as the API tells it, with `train_seconds`, and its adapter, whatever the gate said of it. `folder` keeps
    database, adapters and log. replay: another replay share. beside: one client goes on asking; the run then has `beside`, its
    tokens per second before the run and during it. Raises RedraftError when a request or the run fails."""
    training = settings.training.model_dump(exclude_unset=True) | {"min_cases": NEVER, "tick_seconds": 0.5}
    if replay is not None:
        training["replay"] = replay
    server = LocalServer(
        folder,
        {
            "models": settings.models.model_dump(exclude_none=True),
            # Always drafting: cases are wanted here, and a draft that does not pay for a full batch leaves none.
            "engine": {"max_rows": CLIENTS, "adaptive": False, "num_draft_tokens": DRAFTED},
            "training": training,
            "gate": settings.gate.model_dump(exclude_unset=True),
        },
        settings.home,
    )
    meanwhile: Traffic | None = None
    server.start()
    try:
        traffic = Traffic(server.url, iter(train), clients=CLIENTS, max_tokens=max_tokens)
        traffic.wait(lambda done: on_step("serving", done, len(train)))
        _check(traffic)
        speeds: list[float] = []
        if beside:
            alone = Traffic(server.url, iter(train[:ALONE]), clients=1, max_tokens=max_tokens)
            alone.wait(lambda done: on_step("one client, alone", done, ALONE))
            speeds.append(_speed(alone, 0.0, time.monotonic()))
            meanwhile = Traffic(server.url, cycle(train), clients=1, max_tokens=max_tokens)
        run = server.post("/train")
        begun = time.monotonic()
        while run["state"] not in OVER:
            time.sleep(0.5)
            run = server.get(f"/train/{run['id']}")
            on_step(run["state"], run["progress"]["step"], run["progress"]["steps"] or 1)
        over = time.monotonic()
        run["train_seconds"] = over - begun
        if meanwhile is not None:
            meanwhile.stop()
            run["beside"] = [*speeds, _speed(meanwhile, begun, over)]
    finally:
        try:
            if meanwhile is not None:
                meanwhile.stop()  # its prompts never end: left alone, it would ask a server that is gone
        finally:
            server.stop()
    if run["adapter"] is None:
        raise RedraftError(f"the run {run['state']}: {run['error']}")
    database = Database(sqlite_url(folder / "redraft.db"))
    try:
        return run, Adapters(database, folder / "adapters").get(run["adapter"])
    finally:
        database.close()


def _check(traffic: Traffic) -> None:
    if failed := [answer.error for answer in traffic.answers if answer.error]:
        raise RedraftError(f"{len(failed)} of {len(traffic.answers)} requests failed: {failed[0]}")


def _speed(traffic: Traffic, after: float, before: float) -> float:
    """Tokens per second of requests that were asked and answered between two moments; 0 without any."""
    _check(traffic)
    inside = [answer for answer in traffic.answers if after <= answer.begun and answer.ended <= before]
    seconds = sum(answer.ended - answer.begun for answer in inside)
    return sum(answer.count for answer in inside) / seconds if seconds else 0.0
