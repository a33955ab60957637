"""`redraft bench serve`: several clients over HTTP, every server in turn with the same prompts."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from service.core import BadRequest, RedraftError
from service.evaluation.bench.adapter import BenchAdapter
from service.evaluation.bench.arms import PLAIN, choose, missing, rotated
from service.evaluation.bench.report import Report, Spread, ratios, spread
from service.evaluation.bench.servers import SERVERS, BenchServer, ServerPlan, fused_draft
from service.evaluation.clients import Answer, Clients
from service.evaluation.progress import OnProgress, silent
from service.evaluation.prompts import PromptLine
from service.models.pair import mlx_lm_runs
from service.settings import Settings

WARM_UP = PromptLine("warm-up", "warm-up", "Write one sentence about the weather.")
WARM_UP_TOKENS = 32
OURS = [name for name in SERVERS if not name.startswith("mlx_lm")]
THEIRS = [name for name in SERVERS if name.startswith("mlx_lm")]
PAIRS = [*((name, PLAIN) for name in OURS if name != PLAIN), *product(OURS, THEIRS)]
"""Servers whose ratio is reported: ours to plain, and ours to mlx-lm's."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked. Every turn at every number of clients has prompts of its own, the same for every server: no server gets a
    prompt twice, whatever it caches."""

    lines: Sequence[PromptLine]
    clients: Sequence[int]
    turns: int
    max_tokens: int

    def cells(self) -> list[tuple[int, list[PromptLine]]]:
        """(clients, prompts), turn by turn, with as many prompts for each client as the file allows. Raises BadRequest when
        that is none."""
        each = len(self.lines) // (self.turns * sum(self.clients))
        if each == 0:
            raise BadRequest(
                f"{len(self.lines)} prompts are too few: {self.turns} turns of {', '.join(map(str, self.clients))} clients "
                f"need {self.turns * sum(self.clients)}, one for each client",
                field="prompts",
            )
        shuffled = iter(random.Random(0).sample(list(self.lines), len(self.lines)))
        return [
            (clients, [next(shuffled) for _ in range(each * clients)])
            for _ in range(self.turns)
            for clients in self.clients
        ]


ESTIMATE = "redraft:spec_decode_estimated_speedup"


@dataclass(frozen=True, slots=True)
class Turn:
    """The answers of one server to the prompts of one turn, in their order. estimated: the speed-up over plain that the server
    reported when they were there; None where it reports none."""

    answers: list[Answer]
    estimated: float | None


Measured = dict[int, dict[str, list[Turn]]]
"""clients -> server -> its turns."""


def run_serve(
    settings: Settings,
    models: tuple[Path, Path | None],
    load: Load,
    *,
    title: str,
    command: str,
    arms: Sequence[str] | None = None,
    adapter: BenchAdapter | None = None,
    mlx_lm_draft: Path | None = None,
    on_progress: OnProgress = silent,
) -> Report:
    """Ask every server in turn. All run all the time; those that are not measured wait idle.

    models: folders of target and draft. arms: None for all that draft and adapter allow; the plain one always runs. adapter:
    of the `adapted` server. mlx_lm_draft: the draft of mlx_lm.server; None for the same, where it runs that.

    JSON: clients{N{arms{NAME{tokens_per_second, low, high, tokens_per_call, identical, same_text, first_ms{p50, p95},
    gap_ms{p50, p95}, estimated_speedup, …}}, ratios{"A/B"{median, low, high}}}}; `arms` and `ratios` on top are those of the
    most clients. estimated_speedup: the server's own, the median of the turns' ends.
    same_text: the share of answers whose text is the plain server's; identical: whether all are. tokens_per_call: of one
    stream, None where a server does not report it. Raises BadRequest for servers that cannot be made, RedraftError when one
    does not start or a request fails.
    """
    cells = load.cells()
    target, draft = models
    if adapter is not None and draft is None:
        raise BadRequest("an adapter needs the draft it belongs to, and there is none", field="draft")
    with tempfile.TemporaryDirectory(prefix="redraft-bench-") as scratch, ExitStack() as running:
        folder = Path(scratch)
        adapted = fused_draft(adapter, draft, folder / "fused") if adapter and draft else None
        if mlx_lm_draft is None and draft is not None and mlx_lm_runs(draft):
            mlx_lm_draft = draft
        plan = ServerPlan(settings, target, draft, adapted, mlx_lm_draft, folder, max(load.clients))
        servers = _make(replace(plan, servers=len(_make(plan, arms))), arms)
        for number, (name, server) in enumerate(servers.items()):
            on_progress("starting the servers", number, len(servers))
            running.callback(server.process.stop)
            server.process.start()
            _ask(name, server, [WARM_UP], 1, WARM_UP_TOKENS)
        measured = _measure(servers, load, cells, on_progress)
    used = {
        "prompts_per_client_and_turn": len(cells[0][1]) // cells[0][0],
        "turns": load.turns,
        "max_tokens": load.max_tokens,
        "engine": settings.engine.model_dump(include={"num_draft_tokens", "adaptive", "prefill_chunk"}),
        "record": settings.store.record,
        "adapter": adapter.origin if adapter else None,
    }
    return _report(measured, title, command, used)


def _make(plan: ServerPlan, names: Sequence[str] | None) -> dict[str, BenchServer]:
    made = {name: SERVERS[name](plan) for name in choose(names, list(SERVERS))}
    for name in names or ():
        if made[name] is None:
            raise BadRequest(missing(name), field="arms")
    return {name: server for name, server in made.items() if server is not None}


def _measure(
    servers: Mapping[str, BenchServer],
    load: Load,
    cells: Sequence[tuple[int, Sequence[PromptLine]]],
    on_progress: OnProgress,
) -> Measured:
    measured: Measured = {clients: {name: [] for name in servers} for clients in load.clients}
    for cell, (clients, lines) in enumerate(cells):
        for place, name in enumerate(rotated(list(servers), cell // len(load.clients))):
            on_progress("asking", cell * len(servers) + place, len(cells) * len(servers))
            answers = _ask(name, servers[name], lines, clients, load.max_tokens)
            measured[clients][name].append(Turn(answers, _estimated(servers[name]) if name in OURS else None))
    return measured


def _estimated(server: BenchServer) -> float | None:
    """The estimated speed-up in the server's metrics; None where it has none, as without anything that drafts."""
    lines = server.process.request("GET", "/metrics").text.splitlines()
    values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{ESTIMATE}{{", f"{ESTIMATE} "))]
    return next((value for value in values if value > 0), None)


def _ask(name: str, server: BenchServer, lines: Sequence[PromptLine], clients: int, max_tokens: int) -> list[Answer]:
    """All answers, in the order of the prompts. Raises RedraftError when a request fails."""
    running = Clients(server.process.url, iter(lines), clients=clients, max_tokens=max_tokens, ask=server.ask)
    running.wait()
    try:
        running.raise_failures()
    except RedraftError as error:
        raise RedraftError(f"{name}: {error}; {server.process.tail()}") from error
    places = {id(line): place for place, line in enumerate(lines)}
    return sorted(running.answers, key=lambda answer: places[id(answer.line)])


def rate(answers: Sequence[Answer]) -> float:
    """Output tokens of all streams per second, from the first request to the end of the last answer."""
    seconds = max(answer.ended for answer in answers) - min(answer.started for answer in answers)
    return sum(answer.count for answer in answers) / seconds


def _figures(turns: Sequence[Turn], plain: Sequence[Turn]) -> dict[str, Any]:
    answers = [answer for turn in turns for answer in turn.answers]
    speed = spread([rate(turn.answers) for turn in turns])
    alike = [a.text == b.text for a, b in zip(answers, (one for turn in plain for one in turn.answers), strict=True)]
    estimates = [turn.estimated for turn in turns if turn.estimated is not None]
    tokens, calls = sum(answer.count for answer in answers), sum(answer.calls for answer in answers)
    return {
        "tokens_per_second": speed.median,
        "low": speed.low,
        "high": speed.high,
        "first_ms": _percentiles([answer.arrivals[0] - answer.started for answer in answers if answer.arrivals]),
        "gap_ms": _percentiles([after - before for one in answers for before, after in pairwise(one.arrivals)]),
        "tokens_per_call": tokens / calls if calls else None,
        "identical": all(alike),
        "same_text": sum(alike) / len(alike),
        "requests": len(answers),
        "tokens": tokens,
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "turns": [rate(turn.answers) for turn in turns],
        "estimated_speedup": float(np.median(estimates)) if estimates else None,
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """In milliseconds; None where nothing was observed."""
    return {f"p{p}": 1000.0 * float(np.percentile(seconds, p)) if seconds else None for p in (50, 95)}


def _report(measured: Measured, title: str, command: str, settings: dict[str, Any]) -> Report:
    clients: dict[str, dict[str, Any]] = {}
    rows: list[tuple[object, ...]] = []
    bars: dict[str, Mapping[str, float]] = {}
    for number, by_server in measured.items():
        arms = {name: _figures(turns, by_server[PLAIN]) for name, turns in by_server.items()}
        found: dict[str, Spread] = ratios({name: arm["turns"] for name, arm in arms.items()}, PAIRS)
        clients[str(number)] = {"arms": arms, "ratios": {name: asdict(one) for name, one in found.items()}}
        bars[f"tokens/s, {number} client{'s' * (number > 1)}"] = {
            name: float(arm["tokens_per_second"]) for name, arm in arms.items()
        }
        rows += [_row(number, name, arm) for name, arm in arms.items()]
        rows += [
            (number, name, f"{one.median:.2f} x ({one.low:.2f} to {one.high:.2f})", "", "", "", "")
            for name, one in found.items()
        ]
    most = clients[str(max(measured))]
    plain = {"arms": most["arms"], "ratios": most["ratios"], "clients": clients, "settings": settings}
    columns = (
        "clients",
        "server or ratio",
        "tokens/s, median (90 %)",
        "first token, p50 / p95",
        "between pieces",
        "same text",
        "speed-up as it estimates",
    )
    return Report("serve", title, command, columns, tuple(rows), plain, bars)


def _row(clients: int, name: str, arm: Mapping[str, Any]) -> tuple[object, ...]:
    speed = f"{arm['tokens_per_second']:.1f} ({arm['low']:.1f} to {arm['high']:.1f})"
    first, gap = (
        " / ".join("none" if value is None else f"{value:.0f}" for value in arm[key].values()) + " ms"
        for key in ("first_ms", "gap_ms")
    )
    estimated = "" if arm["estimated_speedup"] is None else f"{arm['estimated_speedup']:.2f} x"
    return (clients, name, speed, first, gap, f"{arm['same_text']:.0%}", estimated)
