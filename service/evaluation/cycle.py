"""`redraft eval cycle`: serve prompts through the real loop, one training run at default settings, and what it changed."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from service.engine.adapters import load, served
from service.evaluation.agreement import Agreement, measure
from service.evaluation.target_outputs import greedy_generations
from service.evaluation.prompts import PromptLine
from service.evaluation.training_run import Step, serve_and_train
from service.models.pair import load_pair
from service.settings import Settings


def run_cycle(
    settings: Settings,
    models: tuple[Path, Path],
    train: Sequence[PromptLine],
    tests: dict[str, list[PromptLine]],
    *,
    replay: float | None = None,
    beside: bool = False,
    max_tokens: int = 128,
    keep: Path | None = None,
    on_step: Step = lambda stage, done, of: None,
) -> dict[str, Any]:
    """tests{name{before, after}}, verdict, train_seconds. models: target and draft folders. replay: another replay share.
    beside: one client goes on asking, and its tokens per second before and during the run are told.

    keep: folder to leave database, adapters and log in. Raises RedraftError when a request or the run fails.
    """
    with tempfile.TemporaryDirectory(prefix="redraft-cycle-") as scratch:
        folder = keep or Path(scratch)
        run, adapter = serve_and_train(
            settings, train, folder, replay=replay, beside=beside, max_tokens=max_tokens, on_step=on_step
        )
        pair = load_pair(*models)
        assert pair.draft is not None and pair.provenance.draft == adapter.draft
        generations = {
            name: greedy_generations(pair, lines, settings.home, on_step=lambda d, n, name=name: on_step(name, d, n))
            for name, lines in tests.items()
        }
        static = served(pair.draft).model
        after = load(static, adapter, adapter.draft).model
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
        **({"beside": dict(zip(("before", "during"), run["beside"], strict=True))} if beside else {}),
    }
