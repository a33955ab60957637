"""Generations as the engine records them, for the tests of the store."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
from sqlalchemy import URL

from service.core import (
    AdapterRef,
    FailureCase,
    FinishReason,
    Generation,
    Prompt,
    Provenance,
    Round,
    RunState,
    Sampling,
    Targets,
    TrainingRun,
    Verdict,
)
from service.store.log.generations import split_of
from service.store.registry.adapters import Adapters
from service.store.registry.runs import Runs

WHO = Provenance("t" * 64, "k" * 64, "d" * 64)
WON = Verdict(True, "better", 40, 4000, 0.1, 0.05, 0.15, {"code": (0.1, 0.05, 0.15)})
LOST = Verdict(False, "not proven better", 40, 4000, 0.0, -0.05, 0.05)
ADAPTERS = Path("adapters")
START = datetime(2026, 1, 1, tzinfo=UTC)

_counter = itertools.count()


def url_of(path: Path) -> str:
    return URL.create("sqlite", database=str(path)).render_as_string()


def texts(split: str, count: int, tag: str = "question") -> list[str]:
    """First user messages that belong to the given split."""
    found = (f"{tag} {i}" for i in itertools.count())
    return list(itertools.islice((text for text in found if split_of(text) == split), count))


TRAIN_TEXT = texts("train", 1)[0]
HELD_OUT_TEXT = texts("held_out", 1)[0]


def case(position: int, *, tie: bool = False) -> FailureCase:
    return FailureCase(position, drafted=7, target=9, p=0.125, q=0.625, margin=0.0 if tie else 1.5, tie=tie)


def targets(positions: int, top: int = 4, seed: int = 0) -> Targets:
    rng = np.random.default_rng(seed)
    logprobs = -np.sort(rng.uniform(0, 9, (positions, top)), axis=1)
    tail = np.where(rng.uniform(size=positions) < 0.3, -np.inf, -1.0)
    return Targets(
        top,
        rng.integers(0, 50_000, (positions, top)).astype("<u4").tobytes(),
        logprobs.astype("<f2").tobytes(),
        tail.astype("<f2").tobytes(),
    )


def promote(runs: Runs, adapters: Adapters, run: TrainingRun) -> AdapterRef:
    """The adapter of a claimed run, which serves then."""
    ref = adapters.add(
        run_id=run.id,
        fencing=run.fencing,
        folder=ADAPTERS / f"run-{run.id}",
        sha256="",
        rank=1,
        scale=1.0,
        keys=[],
        draft=WHO.draft,
        parent=run.parent,
    )
    for state in (RunState.TRAINING, RunState.SCORING, RunState.STAGING):
        runs.move(run.id, run.fencing, state)
    runs.promote(run.id, run.fencing, ref.id, WON)
    return ref


def reject(runs: Runs, run: TrainingRun) -> None:
    """End a claimed run with the gate's verdict against it."""
    for state in (RunState.TRAINING, RunState.SCORING):
        runs.move(run.id, run.fencing, state)
    runs.reject(run.id, run.fencing, None, LOST)


def generation(
    *,
    id: str | None = None,
    first_user: str = TRAIN_TEXT,
    tokens: Sequence[int] = (1, 2, 3),
    output: Sequence[int] | None = None,
    cases: Sequence[FailureCase] | None = None,
    who: Provenance = WHO,
    domain: str | None = "code",
    client: str | None = "ada",
    store: bool = True,
    collected: Targets | None = None,
    created: datetime | None = None,
) -> Generation:
    """A text that differs from every other call's unless its output is given."""
    number = next(_counter)
    output = (4, 5, 6, 7, 8 + number) if output is None else output
    return Generation(
        id=id or f"g{number}",
        prompt=Prompt(
            tokens=tuple(tokens),
            sampling=Sampling(temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, seed=3, stop=("\n\n", "µ")),
            domain=domain,
            client=client,
            store=store,
            first_user=first_user,
        ),
        output=tuple(output),
        finish=FinishReason.STOP,
        rounds=(Round(0, 0, 4, 2, 3), Round(5, 3, 1, 1, 2)),
        cases=(case(2),) if cases is None else tuple(cases),
        logprobs=tuple(-0.25 * i for i in range(len(output))),
        sampled_logprobs=tuple(-0.125 * i for i in range(len(output))),
        targets=collected,
        provenance=who,
        created_at=created or START + timedelta(seconds=number),
    )
