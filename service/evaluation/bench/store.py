"""`redraft bench store`: choosing a training batch, recording, and reading /metrics, with a log of a million failure cases."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles

import httpx

from service.core import BARE_DRAFT, Provenance, RedraftError, RunState, Trigger
from service.evaluation.bench.report import Report, Spread, spread
from service.evaluation.bench.synthetic_log import CASES, DOMAINS, fill_log, synthetic_generations
from service.evaluation.clients import Clients
from service.evaluation.progress import OnProgress, silent
from service.evaluation.server_process import LocalServer, engine_settings
from service.evaluation.sql_prompts import traffic_prompts
from service.learning.texts import replay_count
from service.lifecycle.recorder import BATCH
from service.lifecycle.training import RESERVOIR
from service.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from service.settings import Settings, sqlite_url
from service.store.backends.backend import shown
from service.store.database import Database, size_bytes
from service.store.log.generations import Generations
from service.store.log.training_texts import TrainingTexts
from service.store.registry.runs import Runs
from service.store.replay.buffer import Replay
from service.store.stores import open_stores

CHOOSE_SECONDS, RECORD_SECONDS, SCRAPE_SECONDS = 1.0, 1.0, 0.05
"""Promised with a million cases: choosing a batch, recording one, and a read of /metrics take less."""
CHOOSING = ("count open cases", "claim a run", "name its texts", "read its texts", "sample the replay")
"""Steps of choosing a training batch."""
GATE_STEP = "read the held out"
"""What the same child reads for the gate; not part of choosing."""
TICK_SECONDS = 1.0
"""Of the measured server, so that many a scrape meets a tick, which counts the open cases."""


@dataclass(slots=True)
class StepTimes:
    """Seconds by step, one entry a turn."""

    seconds: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    @contextmanager
    def time(self, step: str) -> Generator[None]:
        """Add the wall-clock seconds of the `with` body to `seconds[step]`; nothing when the body raises."""
        started = time.perf_counter()
        yield
        self.seconds.setdefault(step, []).append(time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class _Timings:
    """Seconds, one entry a turn: choosing by step, recording a batch, reading /metrics by load."""

    chosen: dict[str, list[float]]
    recorded: list[float]
    scraped: dict[str, list[float]]

    def spreads(self) -> dict[str, Spread]:
        """Of choosing as a whole, recording, and /metrics by load."""
        whole = [sum(steps) for steps in zip(*(self.chosen[step] for step in CHOOSING), strict=True)]
        return {"choose": spread(whole), "record": spread(self.recorded)} | {
            name: spread(values) for name, values in self.scraped.items()
        }


def run_store(
    settings: Settings,
    models: tuple[Path, Path],
    *,
    cases: int = 1_000_000,
    turns: int = 7,
    scrapes: int = 300,
    streams: int = 4,
    keep: Path | None = None,
    url: str | None = None,
    on_progress: OnProgress = silent,
) -> Report:
    """Fill a database and time what reads and writes it.

    models: folders of target and draft. cases: failure cases in the log. turns: batches recorded and chosen. scrapes: reads of
    /metrics, once while the server is idle and once while `streams` clients are answered. keep: folder to leave the database in
    (0.8 GB for a million cases). url: an empty database to fill instead, which stays full. Raises RedraftError when it is not
    empty, StoreError.
    """
    who = Provenance(model_fingerprint(models[0]), tokenizer_fingerprint(models[0]), model_fingerprint(models[1]))
    with tempfile.TemporaryDirectory(prefix="redraft-bench-") as scratch:
        folder = keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        place = settings.store.model_copy(
            update={"url": url or sqlite_url(folder / "redraft.db"), "adapters": folder / "adapters"}
        )
        settings = settings.model_copy(update={"store": place})
        made = _fill(settings, who, cases, on_progress)
        recorded = _record(settings, who, made, turns, on_progress)
        chosen = _choose(settings, who, turns, on_progress)
        scraped = _scrape(settings, folder, made, scrapes, streams, on_progress)
        database = Database(settings.database_url, read_only=True)
        size, kind = size_bytes(database), database.kind
        database.close()
    used = {
        "cases": made * CASES,
        "generations": made,
        "database": kind,
        "database_bytes": size,
        "turns": turns,
        "scrapes": scrapes,
        "streams": streams,
        "max_generations": settings.training.max_generations,
        "replay": settings.training.replay,
    }
    return _report(
        _Timings(chosen, recorded, scraped),
        title=f"{made * CASES:,} stored failure cases{'' if url is None else f' in {kind}'}",
        command=f"redraft bench store --cases {cases}{'' if url is None else ' --url postgresql://...'}",
        settings=used,
    )


def _report(timings: _Timings, title: str, command: str, settings: Mapping[str, object]) -> Report:
    spreads, scraped = timings.spreads(), timings.scraped
    steps = {step: spread(values) for step, values in timings.chosen.items()}
    limits = {"choose": CHOOSE_SECONDS, "record": RECORD_SECONDS} | dict.fromkeys(scraped, SCRAPE_SECONDS)
    return Report(
        name="store",
        title=title,
        command=command,
        columns=("what", "median (90 %), ms", "slowest of 100, ms", "promised, ms"),
        rows=(
            ("choosing a training batch", _ms(spreads["choose"]), "", f"< {1000 * CHOOSE_SECONDS:.0f}"),
            *((f"  {step}", _ms(steps[step]), "", "") for step in CHOOSING),
            (f"(the gate's: {GATE_STEP})", _ms(steps[GATE_STEP]), "", ""),
            (f"recording {BATCH} generations", _ms(spreads["record"]), "", f"< {1000 * RECORD_SECONDS:.0f}"),
            *(
                (
                    f"/metrics, {name}",
                    _ms(spreads[name]),
                    f"{1000 * _p99(values):.1f}",
                    f"< {1000 * SCRAPE_SECONDS:.0f}",
                )
                for name, values in scraped.items()
            ),
        ),
        plain={
            "arms": {
                name: {
                    "seconds": asdict(found),
                    "limit_seconds": limits[name],
                    **({"p99_seconds": _p99(scraped[name])} if name in scraped else {}),
                }
                for name, found in spreads.items()
            },
            "ratios": {},
            "steps": {step: asdict(found) for step, found in steps.items()},
            "settings": dict(settings),
        },
        bars={
            "choosing a batch, ms": {step.split()[0]: 1000 * steps[step].median for step in CHOOSING},
            "/metrics, ms": {name: 1000 * spreads[name].median for name in scraped},
        },
    )


def _ms(found: Spread) -> str:
    return f"{1000 * found.median:.1f} ({1000 * found.low:.1f} to {1000 * found.high:.1f})"


def _p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]


def _fill(settings: Settings, who: Provenance, cases: int, on_progress: OnProgress) -> int:
    """Fill the log and the replay reservoirs; returns the number of generations."""
    stores = open_stores(settings, create=True)
    try:
        if stores.generations.stats().generations:
            raise RedraftError(f"{shown(settings.database_url)} holds generations already: name an empty database")
        made = fill_log(stores.generations, who, cases, lambda done, of: on_progress("writing the log", done, of))
        for domain in DOMAINS:
            names = [f"{i:032x}" for i in range(made) if DOMAINS[i % len(DOMAINS)] == domain]
            # More than fit, because one in five is held out.
            stores.replay.offer(domain, names[: 2 * RESERVOIR], RESERVOIR, seed=0)
    finally:
        stores.close()
    return made


def _record(settings: Settings, who: Provenance, made: int, turns: int, on_progress: OnProgress) -> list[float]:
    """Seconds of writing one more batch, as the recorder does."""
    seconds: list[float] = []
    stores = open_stores(settings)
    try:
        for turn in range(turns):
            on_progress("recording", turn, turns)
            first = made + turn * BATCH
            batch = synthetic_generations(who, first, first + BATCH)
            started = time.perf_counter()
            stores.generations.add(batch).result()
            seconds.append(time.perf_counter() - started)
    finally:
        stores.close()
    return seconds


def _choose(settings: Settings, who: Provenance, turns: int, on_progress: OnProgress) -> dict[str, list[float]]:
    """Seconds of every step in which a run gets its batch: the server's until the child is started, then the child's, which
    opens the database anew. The run is then given up, so that every turn finds the same."""
    times, training = StepTimes(), settings.training
    stores = open_stores(settings)
    try:
        for turn in range(turns):
            on_progress("choosing a training batch", turn, turns)
            with times.time(CHOOSING[0]):
                stores.training_texts.untrained(who)
            with times.time(CHOOSING[1]):
                run = stores.runs.claim(
                    trigger=Trigger.CASES, who=who, parent=BARE_DRAFT, limit=training.max_generations
                )
            if run is None:
                raise RedraftError("nothing to train on: the log holds too few cases")
            with times.time(CHOOSING[2]):
                stores.training_texts.claimed_names(run.id)
            _read_as_child(times, settings, who, run.id)
            stores.runs.move(run.id, run.fencing, RunState.ENDED)
    finally:
        stores.close()
    return times.seconds


def _read_as_child(times: StepTimes, settings: Settings, who: Provenance, run: int) -> None:
    with times.time(CHOOSING[3]):
        database = Database(settings.database_url, read_only=True)
        Runs(database).get(run)
        fresh = TrainingTexts(database).claimed(run)
    try:
        with times.time(CHOOSING[4]):
            Replay(database).sample(who, 2 * replay_count(len(fresh), settings.training.replay), run)
        with times.time(GATE_STEP):
            Generations(database).held_out(who, settings.gate.max_prompts)
    finally:
        database.close()


def _scrape(
    settings: Settings, folder: Path, made: int, scrapes: int, streams: int, on_progress: OnProgress
) -> dict[str, list[float]]:
    """Seconds of each read of /metrics, idle and under load, from a server on that database."""
    training = settings.training.model_dump() | {"enabled": False, "tick_seconds": TICK_SECONDS}
    store = {"max_generations": max(settings.store.max_generations, 2 * made)}
    sections = {"models": settings.models.model_dump(exclude_none=True), "engine": engine_settings(settings.engine)}
    sections |= {"training": training, "store": store}
    server = LocalServer(folder, sections, settings.home, settings.database_url)
    found: dict[str, list[float]] = {}
    server.start()
    try:
        found["idle"] = _read(server, scrapes, lambda done: on_progress("reading /metrics", done, scrapes))
        clients = Clients(server.url, itertools.cycle(traffic_prompts(100)), clients=streams, max_tokens=64)
        try:
            name = f"{streams} streams"
            found[name] = _read(server, scrapes, lambda done: on_progress("reading /metrics, busy", done, scrapes))
        finally:
            clients.stop()
    finally:
        server.stop()
    clients.raise_failures()
    return found


def _read(server: LocalServer, scrapes: int, on_step: Callable[[int], None]) -> list[float]:
    seconds: list[float] = []
    with httpx.Client(base_url=server.url, timeout=60.0) as client:
        for turn in range(scrapes):
            on_step(turn)
            started = time.perf_counter()
            client.get("/metrics").raise_for_status()
            seconds.append(time.perf_counter() - started)
            # Without a pause nearly all reads would fall between two ticks.
            time.sleep(0.02)
    return seconds
