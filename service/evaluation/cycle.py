"""`redraft eval cycle`: serve prompts, train once through the real loop, and measure what that changed."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from service.core import AdapterRef, Generation
from service.engine.adapters import load, served
from service.evaluation.agreement import measure
from service.evaluation.progress import OnProgress, silent
from service.evaluation.prompts import PromptLine
from service.evaluation.target_outputs import greedy_generations
from service.evaluation.training_run import serve_and_train
from service.models.pair import Pair, load_pair
from service.settings import Settings

Figures = dict[str, float | int]


def run_cycle(
    settings: Settings,
    models: tuple[Path, Path],
    train: Sequence[PromptLine],
    tests: Mapping[str, Sequence[PromptLine]],
    *,
    replay: float | None = None,
    practice_minutes: float | None = None,
    beside: bool = False,
    max_tokens: int = 128,
    keep: Path | None = None,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Serve `train`, train once at the settings' values, and measure agreement on `tests` before and after.

    models: folders of target and draft. replay: another replay share than the settings'. practice_minutes: the run is one of
    practice, for so long. beside: one client goes on asking
    during the run. keep: folder to leave database, adapters and log in.

    Returns tests{name{before, after}}, verdict, state, train_prompts, replay, train_seconds, training and, with `beside`,
    beside{before, during}: tokens per second of the one client. Raises RedraftError when a request or the run fails.
    """
    with tempfile.TemporaryDirectory(prefix="redraft-cycle-") as scratch:
        result = serve_and_train(
            settings,
            train,
            keep or Path(scratch),
            replay=replay,
            practice_minutes=practice_minutes,
            beside=beside,
            max_tokens=max_tokens,
            on_progress=on_progress,
        )
        pair = load_pair(*models)
        generations = {
            name: greedy_generations(
                pair, lines, settings.home, on_step=lambda done, of, name=name: on_progress(name, done, of)
            )
            for name, lines in tests.items()
        }
        figures = _before_and_after(pair, result.adapter, generations, on_progress)
    found: dict[str, Any] = {
        "tests": figures,
        "verdict": result.run["verdict"],
        "state": result.run["state"],
        "train_prompts": len(train),
        "replay": settings.training.replay if replay is None else replay,
        "practice_minutes": practice_minutes,
        "train_seconds": result.seconds,
        "training": settings.training.model_dump(),
    }
    if result.client_speed is not None:
        found["beside"] = {"before": result.client_speed.before, "during": result.client_speed.during}
    return found


def _before_and_after(
    pair: Pair, adapter: AdapterRef, generations: Mapping[str, Sequence[Generation]], on_progress: OnProgress
) -> dict[str, dict[str, Figures]]:
    """Figures of the bare draft and of the draft with the adapter, by test."""
    assert pair.draft is not None and pair.provenance.draft == adapter.draft
    before = served(pair.draft).model
    after = load(before, adapter, adapter.draft).model
    found: dict[str, dict[str, Figures]] = {}
    for name, answers in generations.items():
        on_progress(f"scoring {name}", 0, 1)
        found[name] = {
            when: measure(model, answers, pair.vocabulary)[0].plain()
            for when, model in (("before", before), ("after", after))
        }
    return found
