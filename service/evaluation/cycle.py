"""`redraft eval cycle`: serve prompts through the real loop, one training run at default settings, and what it changed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from service.core import AdapterRef, RedraftError
from service.engine.draft import load, served
from service.evaluation.agreement import Agreement, measure
from service.evaluation.outputs import greedy_generations
from service.evaluation.prompts import PromptLine
from service.evaluation.server import LocalServer
from service.evaluation.traffic import Traffic
from service.models.pair import load_pair
from service.settings import Settings, sqlite_url
from service.store.adapters import Adapters
from service.store.database import Database

CLIENTS = 16
NEVER = 10**9
OVER = {"promoted", "rejected", "failed", "crashed"}

Step = Callable[[str, int, int], None]


def run_cycle(
    settings: Settings,
    models: tuple[Path, Path],
    train: Sequence[PromptLine],
    tests: dict[str, list[PromptLine]],
    *,
    replay: float | None = None,
    max_tokens: int = 128,
    keep: Path | None = None,
    on_step: Step = lambda stage, done, of: None,
) -> dict[str, Any]:
    """tests{name{before, after}}, verdict, train_seconds. models: target and draft folders. replay: another replay share.

    keep: folder to leave database, adapters and log in. Raises RedraftError when a request or the run fails.
    """
    with tempfile.TemporaryDirectory(prefix="redraft-cycle-") as scratch:
        folder = keep or Path(scratch)
        run, adapter, draft_fingerprint = _serve_and_train(settings, train, folder, replay, max_tokens, on_step)
        pair = load_pair(*models)
        assert pair.draft is not None and pair.provenance.draft == draft_fingerprint
        generations = {
            name: greedy_generations(pair, lines, settings.home, on_step=lambda d, n, name=name: on_step(name, d, n))
            for name, lines in tests.items()
        }
        static = served(pair.draft).model
        after = load(static, adapter, draft_fingerprint).model
        found: dict[str, dict[str, dict[str, float | int]]] = {}
        for name, told in generations.items():
            on_step(f"scoring {name}", 0, 1)
            both: list[Agreement] = [measure(model, told, pair.vocabulary)[0] for model in (static, after)]
            found[name] = {"before": both[0].plain(), "after": both[1].plain()}
    return {
        "tests": found,
        "verdict": run["verdict"],
        "state": run["state"],
        "train_prompts": len(train),
        "replay": settings.training.replay if replay is None else replay,
        "train_seconds": run["train_seconds"],
        "training": settings.training.model_dump(),
    }


def _serve_and_train(
    settings: Settings,
    train: Sequence[PromptLine],
    folder: Path,
    replay: float | None,
    max_tokens: int,
    on_step: Step,
) -> tuple[dict[str, Any], AdapterRef, str]:
    training = settings.training.model_dump(exclude_unset=True) | {"min_cases": NEVER, "tick_seconds": 0.5}
    if replay is not None:
        training["replay"] = replay
    server = LocalServer(
        folder,
        {
            "models": settings.models.model_dump(exclude_none=True),
            "engine": {"max_rows": CLIENTS},
            "training": training,
            "gate": settings.gate.model_dump(exclude_unset=True),
        },
        settings.home,
    )
    server.start()
    try:
        traffic = Traffic(server.url, iter(train), clients=CLIENTS, max_tokens=max_tokens)
        traffic.wait(lambda done: on_step("serving", done, len(train)))
        if failed := [answer.error for answer in traffic.answers if answer.error]:
            raise RedraftError(f"{len(failed)} of {len(train)} requests failed: {failed[0]}")
        run = server.post("/train")
        begun = time.monotonic()
        while run["state"] not in OVER:
            time.sleep(0.5)
            run = server.get(f"/train/{run['id']}")
            on_step(run["state"], run["progress"]["step"], run["progress"]["steps"] or 1)
        run["train_seconds"] = time.monotonic() - begun
    finally:
        server.stop()
    if run["adapter"] is None:
        raise RedraftError(f"the run {run['state']}: {run['error']}")
    database = Database(sqlite_url(folder / "redraft.db"))
    try:
        adapter = Adapters(database).get(run["adapter"])
    finally:
        database.close()
    return run, adapter, adapter.draft
