"""`redraft bench store`: a log of a million failure cases, generations recorded there, a training batch chosen from it, and
/metrics meanwhile."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles

import httpx

from service.app import open_stores
from service.core import BARE_DRAFT, Provenance, RedraftError, RunState, Trigger
from service.evaluation.bench.synthetic_log import CASES, DOMAINS, fill, generated
from service.evaluation.bench.report import Report, Spread, spread
from service.evaluation.server_process import LocalServer
from service.evaluation.sql_prompts import traffic
from service.evaluation.clients import Traffic
from service.learning.buffer import replay_count
from service.lifecycle.recorder import BATCH
from service.lifecycle.training import RESERVOIR
from service.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from service.settings import Settings, sqlite_url
from service.store.backend import shown
from service.store.database import Database, size_bytes
from service.store.generations import Generations
from service.store.replay import Replay
from service.store.runs import Runs

CHOOSE_SECONDS, RECORD_SECONDS, SCRAPE_SECONDS = 1.0, 1.0, 0.05
"""What is promised of a million cases: choosing a batch, recording one, and a scrape take less."""
CHOOSING = ("count open cases", "claim a run", "name its texts", "read its texts", "sample the replay")
ASIDE = "read the held out"
"""What the same child reads for the gate: no part of choosing what to train on."""
TICK_SECONDS = 1.0
"""Of the measured server, so that many a scrape meets a tick, which counts the open cases."""

Step = Callable[[str, int, int], None]


@dataclass(slots=True)
class Clock:
    """Seconds by step, one entry a turn."""

    seconds: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    @contextmanager
    def time(self, step: str) -> Generator[None]:
        """Add the wall-clock seconds of the `with` body to `seconds[step]`; nothing when the body raises."""
        begun = time.perf_counter()
        yield
        self.seconds.setdefault(step, []).append(time.perf_counter() - begun)


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
    on_step: Step = lambda stage, done, of: None,
) -> Report:
    """models: folders of target and draft. scrapes: reads of /metrics, once while the server is idle and once while
    `streams` clients are answered. keep: folder to leave the database in (0.8 GB for a million cases). url: an empty database
    to fill instead of SQLite in a folder; it stays full. Raises RedraftError.
    """
    who = Provenance(model_fingerprint(models[0]), tokenizer_fingerprint(models[0]), model_fingerprint(models[1]))
    with tempfile.TemporaryDirectory(prefix="redraft-bench-") as scratch:
        folder = keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        place = settings.store.model_copy(update={"url": url or sqlite_url(folder / "redraft.db")})
        settings = settings.model_copy(update={"store": place})
        made = _log(settings, who, cases, on_step)
        recorded = _record(settings, who, made, turns, on_step)
        chosen = _choose(settings, who, turns, on_step)
        scraped = _scrape(settings, folder, made, scrapes, streams, on_step)
        database = Database(settings.database_url, read_only=True)
        size, kind = size_bytes(database), database.kind
        database.close()
    whole = [sum(parts) for parts in zip(*(chosen[step] for step in CHOOSING), strict=True)]
    spreads = {"choose": spread(whole), "record": spread(recorded)} | {
        name: spread(values) for name, values in scraped.items()
    }
    steps = {step: spread(values) for step, values in chosen.items()}
    limits = {"choose": CHOOSE_SECONDS, "record": RECORD_SECONDS} | dict.fromkeys(scraped, SCRAPE_SECONDS)
    return Report(
        name="store",
        title=f"{made * CASES:,} stored failure cases{'' if url is None else f' in {kind}'}",
        command=f"redraft bench store --cases {cases}{'' if url is None else ' --url postgresql://...'}",
        columns=("what", "median (90 %), ms", "slowest of 100, ms", "promised, ms"),
        rows=(
            ("choosing a training batch", _ms(spreads["choose"]), "", f"< {1000 * CHOOSE_SECONDS:.0f}"),
            *((f"  {step}", _ms(steps[step]), "", "") for step in CHOOSING),
            (f"(the gate's: {ASIDE})", _ms(steps[ASIDE]), "", ""),
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
            "settings": {
                "cases": made * CASES,
                "generations": made,
                "database": kind,
                "database_bytes": size,
                "turns": turns,
                "scrapes": scrapes,
                "streams": streams,
                "max_generations": settings.training.max_generations,
                "replay": settings.training.replay,
            },
        },
        bars={
            "choosing a batch, ms": {step.split()[0]: 1000 * steps[step].median for step in CHOOSING},
            "/metrics, ms": {name: 1000 * spreads[name].median for name in scraped},
        },
    )


def _ms(found: Spread) -> str:
    return f"{1000 * found.median:.1f} ({1000 * found.low:.1f} to {1000 * found.high:.1f})"


def _p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]


def _log(settings: Settings, who: Provenance, cases: int, on_step: Step) -> int:
    """The database with a full log and a full replay reservoir; how many generations it holds."""
    stores = open_stores(settings, create=True)
    try:
        if stores.generations.stats().generations:
            raise RedraftError(f"{shown(settings.database_url)} holds generations already: name an empty database")
        made = fill(stores.generations, who, cases, lambda done, of: on_step("writing the log", done, of))
        for domain in DOMAINS:
            held = [f"{i:032x}" for i in range(made) if DOMAINS[i % len(DOMAINS)] == domain]
            # More than fit: one in five is held out.
            stores.replay.offer(domain, held[: 2 * RESERVOIR], RESERVOIR, seed=0)
    finally:
        stores.close()
    return made


def _record(settings: Settings, who: Provenance, made: int, turns: int, on_step: Step) -> list[float]:
    """Seconds of writing a batch as the recorder does, behind the others."""
    seconds: list[float] = []
    stores = open_stores(settings)
    try:
        for turn in range(turns):
            on_step("recording", turn, turns)
            first = made + turn * BATCH
            batch = generated(who, first, first + BATCH)
            begun = time.perf_counter()
            stores.generations.add(batch).result()
            seconds.append(time.perf_counter() - begun)
    finally:
        stores.close()
    return seconds


def _choose(settings: Settings, who: Provenance, turns: int, on_step: Step) -> dict[str, list[float]]:
    """Seconds of every step in which a run comes by its batch: the server's until the child is started, then the child's,
    which opens the database anew. The run is then given up, so that every turn finds the same."""
    clock, training = Clock(), settings.training
    stores = open_stores(settings)
    try:
        for turn in range(turns):
            on_step("choosing a training batch", turn, turns)
            with clock.time(CHOOSING[0]):
                stores.generations.counts(who)
            with clock.time(CHOOSING[1]):
                run = stores.runs.claim(
                    trigger=Trigger.CASES, who=who, parent=BARE_DRAFT, limit=training.max_generations
                )
            if run is None:
                raise RedraftError("nothing to train on: the log holds too few cases")
            with clock.time(CHOOSING[2]):
                stores.generations.claimed_names(run.id)
            _read_as_child(clock, settings, who, run.id)
            stores.runs.move(run.id, run.fencing, RunState.CRASHED, give_back=True)
    finally:
        stores.close()
    return clock.seconds


def _read_as_child(clock: Clock, settings: Settings, who: Provenance, run: int) -> None:
    with clock.time(CHOOSING[3]):
        database = Database(settings.database_url, read_only=True)
        Runs(database).get(run)
        fresh = Generations(database).claimed(run)
    try:
        with clock.time(CHOOSING[4]):
            Replay(database).sample(who, 2 * replay_count(len(fresh), settings.training.replay), run)
        with clock.time(ASIDE):
            Generations(database).held_out(who, settings.gate.max_prompts)
    finally:
        database.close()


def _scrape(
    settings: Settings, folder: Path, made: int, scrapes: int, streams: int, on_step: Step
) -> dict[str, list[float]]:
    """Seconds of each read of /metrics, from a server over that database, whose tick looks at it every second."""
    training = settings.training.model_dump() | {"enabled": False, "tick_seconds": TICK_SECONDS}
    store = {"max_generations": max(settings.store.max_generations, 2 * made)}
    sections = {"models": settings.models.model_dump(exclude_none=True), "engine": settings.engine.model_dump()}
    sections |= {"training": training, "store": store}
    server = LocalServer(folder, sections, settings.home, settings.database_url)
    found: dict[str, list[float]] = {}
    server.start()
    try:
        found["idle"] = _read(server, scrapes, lambda done: on_step("reading /metrics", done, scrapes))
        clients = Traffic(server.url, itertools.cycle(traffic(100)), clients=streams, max_tokens=64)
        try:
            name = f"{streams} streams"
            found[name] = _read(server, scrapes, lambda done: on_step("reading /metrics, busy", done, scrapes))
        finally:
            clients.stop()
    finally:
        server.stop()
    if failed := [answer.error for answer in clients.answers if answer.error]:
        raise RedraftError(f"{len(failed)} requests failed: {failed[0]}")
    return found


def _read(server: LocalServer, scrapes: int, on_step: Callable[[int], None]) -> list[float]:
    seconds: list[float] = []
    with httpx.Client(base_url=server.url, timeout=60.0) as client:
        for turn in range(scrapes):
            on_step(turn)
            begun = time.perf_counter()
            client.get("/metrics").raise_for_status()
            seconds.append(time.perf_counter() - begun)
            # A scraper comes seldom; without a pause nearly all would fall between two ticks.
            time.sleep(0.02)
    return seconds
