"""`redraft bench swap`: what running streams notice of a swap, and what recording costs."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles

import mlx.core as mx

from service.core import BARE_DRAFT, AdapterRef, Provenance, RedraftError, TrainingRun, Trigger
from service.engine import device
from service.evaluation.bench.recording_cost import OFF, ON, measure_recording
from service.evaluation.bench.report import Report, ratios
from service.evaluation.bench.synthetic_log import fill_log
from service.evaluation.clients import Answer, Clients, gaps_ms
from service.evaluation.progress import OnProgress, silent
from service.evaluation.server_process import LocalServer, engine_settings
from service.evaluation.sql_prompts import traffic_prompts
from service.learning import lora
from service.models import vocabulary
from service.models.arrays import named_arrays
from service.models.pair import Pair, load_model, load_pair
from service.settings import Settings, sqlite_url
from service.store.artifacts import publish
from service.store.stores import Stores, open_stores

SWAP, QUIET = "swap", "quiet"
SETTLE_SECONDS = 0.5
"""Seconds after the answer to a swap, in which all that it caused is over."""
NOISE = 0.01
"""Standard deviation of the LoRA B matrices of the adapters: another draft, about as good."""
PROMISED_GAP, PROMISED_RATE = 1.5, 0.98

Span = tuple[float, float]
"""Start and end, of time.monotonic()."""


@dataclass(frozen=True, slots=True)
class _Swaps:
    """All answers, and by SWAP and QUIET the spans with and without a swap, in pairs of equal length."""

    answers: list[Answer]
    spans: dict[str, list[Span]]

    def gaps_ms(self, arm: str) -> list[list[float]]:
        """By span, the silences within streams that touch it."""
        gaps = [gap for answer in self.answers for gap in gaps_ms(answer)]
        return [[ms for before, after, ms in gaps if before < end and after > start] for start, end in self.spans[arm]]


def run_swap(
    settings: Settings,
    models: tuple[Path, Path],
    *,
    title: str,
    command: str,
    clients: int = 8,
    swaps: int = 10,
    max_tokens: int = 64,
    rows: Sequence[int] = (1, 16),
    turns: int = 5,
    tokens: int = 32,
    on_progress: OnProgress = silent,
) -> Report:
    """Measure gaps between two events of one stream as clients see them, and decoding with and without recording.

    A swap's span reaches from its request to SETTLE_SECONDS after its answer, and is followed by a span as long without a
    swap.

    models: folders of target and draft. title, command: of the report. clients: streams at a time. max_tokens: of one answer.
    rows, turns, tokens: batch sizes, turns and tokens of a stream of the measurement of recording. Raises RedraftError when no
    stream ran during a swap.
    """
    device.limit_cache()
    pair = load_pair(*models)
    if pair.draft is None or clients < 1 or swaps < 1:
        raise RedraftError("swapping needs a draft, a client and a swap")
    with tempfile.TemporaryDirectory(prefix="redraft-bench-") as scratch:
        folder = Path(scratch)
        speeds = _recording(settings, pair, folder, rows, turns, tokens, on_progress)
        refs = _make_adapters(settings, folder, pair, models[1])
        # The server is to find the memory of this process.
        del pair
        mx.clear_cache()
        measured = _serve(settings, folder, refs, clients, swaps, max_tokens, on_progress)
    gaps = {arm: measured.gaps_ms(arm) for arm in (SWAP, QUIET)}
    if not all(each for arm in gaps.values() for each in arm):
        raise RedraftError("no stream ran during a swap: ask for more clients or longer answers")
    used = {
        "clients": clients,
        "swaps": swaps,
        "max_tokens": max_tokens,
        "rank": settings.training.rank,
        "turns": turns,
        "tokens": tokens,
        "num_draft_tokens": settings.engine.num_draft_tokens,
    }
    return _report(measured, gaps, speeds, rows, used, title, command)


def _recording(
    settings: Settings,
    pair: Pair,
    folder: Path,
    rows: Sequence[int],
    turns: int,
    tokens: int,
    on_progress: OnProgress,
) -> dict[str, list[float]]:
    """Tokens per second by turn, by `record_on_N` and `record_off_N` for batches of N rows."""
    speeds: dict[str, list[float]] = {}
    for count in rows:
        found = measure_recording(
            pair,
            settings.engine,
            folder,
            count,
            turns=turns,
            tokens=tokens,
            on_step=lambda done, of, count=count: on_progress(f"recording, {count} rows", done, of),
        )
        speeds |= {f"{name}_{count}": values for name, values in found.items()}
    return speeds


def _report(
    measured: _Swaps,
    gaps: Mapping[str, Sequence[Sequence[float]]],
    speeds: Mapping[str, Sequence[float]],
    rows: Sequence[int],
    settings: Mapping[str, object],
    title: str,
    command: str,
) -> Report:
    longest = {arm: [max(each) for each in spans] for arm, spans in gaps.items()}
    failed = [answer.error for answer in measured.answers if answer.error]
    compared = ratios(longest, [(SWAP, QUIET)]) | ratios(speeds, [(f"{ON}_{n}", f"{OFF}_{n}") for n in rows])
    whole = max(longest[SWAP]) / max(longest[QUIET])
    shown = {name: f"{r.median:.3f} ({r.low:.3f} to {r.high:.3f})" for name, r in compared.items()}

    def both(of: Callable[[str], float]) -> tuple[str, str]:
        return f"{of(SWAP):.0f}", f"{of(QUIET):.0f}"

    return Report(
        name="swap",
        title=title,
        command=command,
        columns=("what", "with", "without", "ratio", "promised"),
        rows=(
            ("longest gap, ms", *both(lambda arm: max(longest[arm])), f"{whole:.2f}", f"<= {PROMISED_GAP}"),
            ("longest, median of swaps, ms", *both(lambda arm: median(longest[arm])), shown[f"{SWAP}/{QUIET}"], ""),
            ("99 % of gaps below, ms", *both(lambda arm: _p99(gaps[arm])), "", ""),
            ("requests failed", len(failed), "", "", "0"),
            *(_recorded_cells(n, speeds, shown) for n in rows),
        ),
        plain={
            "arms": {
                arm: {
                    "longest_gap_ms": max(longest[arm]),
                    "p99_gap_ms": _p99(gaps[arm]),
                    "gaps": sum(map(len, gaps[arm])),
                }
                for arm in (SWAP, QUIET)
            }
            | {name: {"tokens_per_second": median(values)} for name, values in speeds.items()},
            "ratios": {name: asdict(found) for name, found in compared.items()},
            "longest_gap_ratio": whole,
            "requests": len(measured.answers),
            "failed_requests": len(failed),
            "swap_seconds": median([end - start - SETTLE_SECONDS for start, end in measured.spans[SWAP]]),
            "settings": dict(settings),
        },
        bars={
            "longest gap, ms": {arm: max(longest[arm]) for arm in (QUIET, SWAP)},
            **{
                f"tokens/s, {n} rows": {"off": median(speeds[f"{OFF}_{n}"]), "on": median(speeds[f"{ON}_{n}"])}
                for n in rows
            },
        },
    )


def _recorded_cells(n: int, speeds: Mapping[str, Sequence[float]], shown: Mapping[str, str]) -> tuple[object, ...]:
    on, off = f"{ON}_{n}", f"{OFF}_{n}"
    rates = (f"{median(speeds[on]):.1f}", f"{median(speeds[off]):.1f}")
    return (f"tokens/s recorded, {n} rows", *rates, shown[f"{on}/{off}"], f">= {PROMISED_RATE}")


def _p99(spans: Sequence[Sequence[float]]) -> float:
    every = [gap for gaps in spans for gap in gaps]
    return quantiles([*every, *every], n=100, method="inclusive")[98]


def _make_adapters(settings: Settings, folder: Path, pair: Pair, draft: Path) -> list[AdapterRef]:
    """Two adapters of small random weights, with folder, vocabulary and row as a training run leaves them."""
    who = pair.provenance
    places = {"url": sqlite_url(folder / "redraft.db"), "adapters": folder / "adapters"}
    store = settings.store.model_copy(update=places)
    stores = open_stores(settings.model_copy(update={"store": store}), create=True)
    try:
        # An adapter belongs to a run, and a run to recorded generations.
        fill_log(stores.generations, who, 500)
        run = stores.runs.claim(trigger=Trigger.MANUAL, who=who, parent=BARE_DRAFT, limit=1)
        assert run is not None
        made: list[AdapterRef] = []
        for seed in (1, 2):
            made.append(_make_adapter(settings, stores, run, who, draft, folder, seed))
            # Only what has served once may be activated by hand.
            stores.adapters.activate(made[-1].id, who.target, who.draft)
    finally:
        stores.close()
    return made


def _make_adapter(
    settings: Settings, stores: Stores, run: TrainingRun, who: Provenance, draft: Path, folder: Path, seed: int
) -> AdapterRef:
    model = load_model(draft).model
    shape = lora.wrap(model, rank=settings.training.rank, scale=settings.training.scale, seed=seed)
    noisy = [
        (name, NOISE * mx.random.normal(array.shape))
        for name, array in named_arrays(model.trainable_parameters())
        if name.endswith("lora_b")
    ]
    model.load_weights(noisy, strict=False)
    final = folder / "adapters" / f"made-{seed}"
    scratch = final.with_name(f".{final.name}.part")
    lora.save(model, shape, scratch, draft=who.draft, target=who.target, run=run.id, parent=run.parent)
    reduced = vocabulary.read(draft)
    if reduced is not None:
        vocabulary.write(reduced, scratch)
    return stores.adapters.add(
        run_id=run.id,
        fencing=run.fencing,
        folder=final,
        sha256=publish(scratch, final),
        rank=shape.rank,
        scale=shape.scale,
        keys=shape.keys,
        draft=who.draft,
        parent=run.parent,
    )


def _serve(
    settings: Settings,
    folder: Path,
    refs: Sequence[AdapterRef],
    clients: int,
    swaps: int,
    max_tokens: int,
    on_progress: OnProgress,
) -> _Swaps:
    """Swap between the adapters of a real server while clients stream."""
    sections = {"models": settings.models.model_dump(exclude_none=True), "engine": engine_settings(settings.engine)}
    training = settings.training.model_dump() | {"enabled": False}
    server = LocalServer(folder, sections | {"training": training}, settings.home)
    spans: dict[str, list[Span]] = {SWAP: [], QUIET: []}
    server.start()
    try:
        endless = itertools.chain.from_iterable(traffic_prompts(200, seed) for seed in itertools.count())
        streams = Clients(server.url, endless, clients=clients, max_tokens=max_tokens)
        try:
            # Until the first answers are complete, prompts are prefilled at every turn.
            while len(streams.answers) < clients:
                time.sleep(0.05)
            for turn in range(swaps):
                on_progress("swapping under traffic", turn, swaps)
                started = time.monotonic()
                server.post(f"/adapters/{refs[turn % len(refs)].id}/activate")
                time.sleep(SETTLE_SECONDS)
                between = time.monotonic()
                time.sleep(between - started)
                spans[SWAP].append((started, between))
                spans[QUIET].append((between, time.monotonic()))
        finally:
            streams.stop()
    finally:
        server.stop()
    return _Swaps(streams.answers, spans)
