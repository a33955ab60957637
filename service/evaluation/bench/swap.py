"""`redraft bench swap`: what running streams feel of a swap, and what recording costs."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import cast

import mlx.core as mx
from mlx.utils import tree_flatten

from service.app import open_stores
from service.core import BARE_DRAFT, AdapterRef, RedraftError, Trigger
from service.evaluation.bench.synthetic_log import fill
from service.evaluation.bench.recording_cost import OFF, ON, measure_recording
from service.evaluation.bench.report import Report, ratios
from service.evaluation.candidates import register
from service.evaluation.server_process import LocalServer
from service.evaluation.sql_prompts import traffic
from service.evaluation.clients import Answer, Traffic
from service.learning import lora
from service.models import vocabulary
from service.models.pair import Pair, load_model, load_pair
from service.settings import Settings, sqlite_url

SWAP, QUIET = "swap", "quiet"
SETTLE_SECONDS = 0.5
"""After a swap was answered: what it set off is over by then."""
NOISE = 0.01
"""Standard deviation of the made adapters' B: another draft, about as good."""
PROMISED_GAP, PROMISED_RATE = 1.5, 0.98

Step = Callable[[str, int, int], None]
Window = tuple[float, float]


def run_swap(
    settings: Settings,
    models: tuple[Path, Path],
    *,
    clients: int = 8,
    swaps: int = 10,
    max_tokens: int = 64,
    rows: Sequence[int] = (1, 16),
    turns: int = 5,
    tokens: int = 32,
    on_step: Step = lambda stage, done, of: None,
) -> Report:
    """models: folders of target and draft. rows, turns, tokens: batches, turns and tokens a stream of the measurement of
    recording. Raises RedraftError.

    Gaps are between two pieces of one stream as a client sees them. Every swap, from its request to half a second after
    its answer, is followed by a time as long without one, and the two are compared.
    """
    pair = load_pair(*models)
    if pair.draft is None or clients < 1 or swaps < 1:
        raise RedraftError("swapping needs a draft, a client and a swap")
    with tempfile.TemporaryDirectory(prefix="redraft-bench-") as scratch:
        folder = Path(scratch)
        speeds: dict[str, list[float]] = {}
        for count in rows:
            found = measure_recording(
                pair,
                settings.engine,
                folder,
                count,
                turns=turns,
                tokens=tokens,
                on_step=lambda done, of, count=count: on_step(f"recording, {count} rows", done, of),
            )
            speeds |= {f"{name}_{count}": values for name, values in found.items()}
        refs = _adapters(settings, folder, pair, models[1])
        answers, windows = _serve(settings, folder, refs, clients, swaps, max_tokens, on_step)
    gaps = {name: [_gaps_ms(answers, window) for window in windows[name]] for name in (SWAP, QUIET)}
    if not all(each for arm in gaps.values() for each in arm):
        raise RedraftError("no stream ran during a swap: ask for more clients or longer answers")
    longest = {name: [max(each) for each in arm] for name, arm in gaps.items()}
    failed = [answer.error for answer in answers if answer.error]
    compared = ratios(longest, [(SWAP, QUIET)]) | ratios(speeds, [(f"{ON}_{n}", f"{OFF}_{n}") for n in rows])
    whole = max(longest[SWAP]) / max(longest[QUIET])
    shown = {name: f"{r.median:.3f} ({r.low:.3f} to {r.high:.3f})" for name, r in compared.items()}

    def both(of: Callable[[str], float]) -> tuple[str, str]:
        return f"{of(SWAP):.0f}", f"{of(QUIET):.0f}"

    def recorded(n: int) -> tuple[object, ...]:
        on, off = (f"{name}_{n}" for name in (ON, OFF))
        rates = (f"{median(speeds[on]):.1f}", f"{median(speeds[off]):.1f}")
        return (f"tokens/s recorded, {n} rows", *rates, shown[f"{on}/{off}"], f">= {PROMISED_RATE}")

    return Report(
        name="swap",
        title=f"{swaps} swaps under {clients} streams, and recording",
        command=f"redraft bench swap --clients {clients} --swaps {swaps}",
        columns=("what", "with", "without", "ratio", "promised"),
        rows=(
            ("longest gap, ms", *both(lambda name: max(longest[name])), f"{whole:.2f}", f"<= {PROMISED_GAP}"),
            ("longest, median of swaps, ms", *both(lambda name: median(longest[name])), shown[f"{SWAP}/{QUIET}"], ""),
            ("99 % of gaps below, ms", *both(lambda name: _p99(gaps[name])), "", ""),
            ("requests failed", len(failed), "", "", "0"),
            *(recorded(n) for n in rows),
        ),
        plain={
            "arms": {
                name: {
                    "longest_gap_ms": max(longest[name]),
                    "p99_gap_ms": _p99(gaps[name]),
                    "gaps": sum(map(len, gaps[name])),
                }
                for name in (SWAP, QUIET)
            }
            | {name: {"tokens_per_second": median(values)} for name, values in speeds.items()},
            "ratios": {name: asdict(found) for name, found in compared.items()},
            "longest_gap_ratio": whole,
            "requests": len(answers),
            "failed_requests": len(failed),
            "swap_seconds": median([end - begin - SETTLE_SECONDS for begin, end in windows[SWAP]]),
            "settings": {
                "clients": clients,
                "swaps": swaps,
                "max_tokens": max_tokens,
                "rank": settings.training.rank,
                "turns": turns,
                "tokens": tokens,
                "num_draft_tokens": settings.engine.num_draft_tokens,
            },
        },
        bars={
            "longest gap, ms": {name: max(longest[name]) for name in (QUIET, SWAP)},
            **{
                f"tokens/s, {n} rows": {"off": median(speeds[f"{OFF}_{n}"]), "on": median(speeds[f"{ON}_{n}"])}
                for n in rows
            },
        },
    )


def _p99(windows: Sequence[Sequence[float]]) -> float:
    every = [gap for window in windows for gap in window]
    return quantiles([*every, *every], n=100, method="inclusive")[98]


def _gaps_ms(answers: Sequence[Answer], window: Window) -> list[float]:
    """Of every silence between two pieces of one stream that touches the window."""
    return [
        1000.0 * (after - before)
        for answer in answers
        for before, after in itertools.pairwise(answer.arrivals)
        if before < window[1] and after > window[0]
    ]


def _adapters(settings: Settings, folder: Path, pair: Pair, draft: Path) -> list[AdapterRef]:
    """Two adapters as a run leaves them (folder, vocabulary, row), of small random weights."""
    who = pair.provenance
    kept = vocabulary.read(draft)
    stores = open_stores(_on(settings, folder), create=True)
    try:
        # An adapter belongs to a run, and a run to cases.
        fill(stores.generations, who, 500)
        run = stores.runs.claim(trigger=Trigger.MANUAL, who=who, parent=BARE_DRAFT, limit=1)
        assert run is not None
        made: list[AdapterRef] = []
        for seed in (1, 2):
            model = load_model(draft).model
            shape = lora.wrap(model, rank=settings.training.rank, scale=settings.training.scale, seed=seed)
            noisy = [
                (name, NOISE * mx.random.normal(array.shape))
                for name, array in cast("list[tuple[str, mx.array]]", tree_flatten(model.trainable_parameters()))
                if name.endswith("lora_b")
            ]
            model.load_weights(noisy, strict=False)
            ref = register(stores.adapters, run, model, shape, folder / "adapters" / f"made-{seed}", who, kept)
            # Only what has served once may be activated.
            stores.adapters.activate(ref.id, who.draft)
            made.append(ref)
    finally:
        stores.close()
    return made


def _on(settings: Settings, folder: Path) -> Settings:
    store = settings.store.model_copy(update={"url": sqlite_url(folder / "redraft.db")})
    return settings.model_copy(update={"store": store})


def _serve(
    settings: Settings,
    folder: Path,
    refs: Sequence[AdapterRef],
    clients: int,
    swaps: int,
    max_tokens: int,
    on_step: Step,
) -> tuple[list[Answer], dict[str, list[Window]]]:
    """All answers of a real server, and the spans of time.monotonic() with and without a swap."""
    sections = {"models": settings.models.model_dump(exclude_none=True), "engine": settings.engine.model_dump()}
    training = settings.training.model_dump() | {"enabled": False}
    server = LocalServer(folder, sections | {"training": training}, settings.home)
    windows: dict[str, list[Window]] = {SWAP: [], QUIET: []}
    server.start()
    try:
        endless = itertools.chain.from_iterable(traffic(200, seed) for seed in itertools.count())
        streams = Traffic(server.url, endless, clients=clients, max_tokens=max_tokens)
        try:
            # Until the first answers are out, prompts are read at every turn.
            while len(streams.answers) < clients:
                time.sleep(0.05)
            for turn in range(swaps):
                on_step("swapping under traffic", turn, swaps)
                begun = time.monotonic()
                server.post(f"/adapters/{refs[turn % len(refs)].id}/activate")
                time.sleep(SETTLE_SECONDS)
                between = time.monotonic()
                time.sleep(between - begun)
                windows[SWAP].append((begun, between))
                windows[QUIET].append((between, time.monotonic()))
        finally:
            streams.stop()
    finally:
        server.stop()
    return streams.answers, windows
