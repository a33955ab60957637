"""`redraft bench round`: what a steady round takes, by kind of round, and what of that are its model calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from service.core import BadRequest, Reasoning, RedraftError, Source
from service.engine import device
from service.engine.acceptance import Acceptance
from service.engine.adapters import Draft, served
from service.engine.costs import Costs, Load
from service.engine.decoder import Decoder
from service.engine.planner import Choice, Match, Planner
from service.engine.request import Request
from service.engine.rounds import RoundReport
from service.engine.strategy import CPU, CUDA, METAL, Strategy, current, using
from service.evaluation.bench.model_calls import ModelCalls, queued
from service.evaluation.bench.report import Report
from service.evaluation.bench.round_modes import LONG_LIST, Mode, prompts_of
from service.evaluation.progress import OnProgress, silent
from service.evaluation.prompts import PromptLine, encode_prompts
from service.models.pair import Pair, load_pair
from service.models.text import TextEncoder

ROUNDS = 50
"""Rounds that are timed, and as many whose calls are queued."""
WARM = 4
"""Rounds before those that are timed: they compile kernels, and fill the pipeline where there is one."""
TRIES = 4
"""Rounds that are run at most, for each that is timed, to find those in which enough was looked up."""

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "own": current,
    "device": lambda: METAL if current() == CPU else current(),
    "cpu": lambda: CPU,
    "metal": lambda: METAL,
    "cuda": lambda: CUDA,
}


def strategy_named(name: str) -> Strategy:
    """A strategy of the engine by name. own: of this device; device: of an accelerator, Metal's on a CPU. Raises BadRequest."""
    if name not in STRATEGIES:
        raise BadRequest(f"no strategy {name!r}: choose among {', '.join(STRATEGIES)}", field="strategy")
    return STRATEGIES[name]()


class AlwaysLookUp(Planner):
    """Proposes what prompt look-up finds, whatever rounds cost."""

    def __init__(self, most: int) -> None:
        super().__init__(0, most, Costs({(1, 1): 1.0}, {1: 0.0}, {1: 0.0}, 0.0, 0.0))
        self._most = most

    def choose(
        self,
        load: Load,
        matches: Sequence[Match | None],
        own: Sequence[Acceptance] | None = None,
        *,
        drafts: bool = True,
    ) -> Choice:
        """See Planner; nothing is drafted."""
        return Choice(0, tuple(min(self._most, match.available) if match else 0 for match in matches))


@dataclass(slots=True)
class Timed:
    """Steady rounds: seconds, host syncs, and launches (handovers) of each."""

    seconds: list[float]
    waits: list[int]
    handovers: list[int]


def measure(
    pair: Pair, draft: Draft | None, mode: Mode, texts: Sequence[Sequence[int]], *, k: int, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Times of rounds of this kind and of their calls, in ms; see run_round for the keys.

    texts: tokens of which the rows' prompts are made, one for each row. k: proposed tokens. Raises RedraftError where no row
    finds anything to look up.
    """
    drafts = mode.mode == "drafted"
    proposed = 0 if mode.mode == "plain" else k
    used = draft if drafts else None
    decoder = _decoder(pair, used, mode, texts, k)
    timed = Timed([], [], [])
    calls_seconds, held = list[float](), list[list[int]]()
    for until in (rounds // 2, rounds):
        _rounds(decoder, timed, until, mode, k)
        # A round that was launched ahead must not count as the calls' time.
        mx.synchronize()
        held = [list(row.tokens) for row in decoder.rows]
        with ModelCalls(pair, used, held) as calls:
            calls_seconds.append(queued(partial(calls.round, proposed if drafts else 0, proposed), rounds))
    low, middle, high = (1000 * float(x) for x in np.quantile(timed.seconds, (0.25, 0.5, 0.75)))
    return {
        "rows": mode.rows,
        "mode": mode.mode,
        "sampling": mode.sampling,
        "recording": mode.recording,
        "ragged": len(set(map(len, held))) > 1,
        "constrained": mode.constrained,
        "wall_ms": middle,
        "wall_ms_quartiles": [low, high],
        "calls_ms": 1000 * min(calls_seconds),
        "waits": sum(timed.waits) / len(timed.waits),
        "handovers": sum(timed.handovers) / len(timed.handovers),
    }


def _decoder(pair: Pair, draft: Draft | None, mode: Mode, texts: Sequence[Sequence[int]], k: int) -> Decoder:
    """A decoder with all rows of the mode, which never end."""
    lookup = mode.mode == "lookup"
    decoder = Decoder(
        pair.target.model,
        draft,
        vocabulary=pair.vocabulary,
        k=k if mode.mode == "drafted" else 0,
        collect=mode.recording,
        adaptive=lookup,
        lookup=k if lookup else 0,
    )
    if lookup:
        decoder.planner = AlwaysLookUp(k)
    prompts = prompts_of(mode, texts)
    if mode.constrained:
        encoder = TextEncoder(pair.target.tokenizer, pair.vocabulary, pair.eos)
        prompts[0] = replace(prompts[0], constraint=encoder.constraint(LONG_LIST, Reasoning.CLOSED))
    for prompt in prompts:
        # Without an end token.
        decoder.admit(Request("", prompt, frozenset(), None))
    return decoder


def _rounds(decoder: Decoder, timed: Timed, count: int, mode: Mode, k: int) -> None:
    """Run rounds until `timed` has `count` of those that proposed `k` tokens. Raises RedraftError when it gets none."""
    for _ in range(WARM):
        decoder.round()
    for _ in range(TRIES * count):
        if len(timed.seconds) >= count:
            return
        with device.counting() as counts:
            started = time.perf_counter()
            report = decoder.round()
            seconds = time.perf_counter() - started
        if _steady(report, mode, k):
            timed.seconds.append(seconds)
            timed.waits.append(counts.waits)
            timed.handovers.append(counts.launches)
    if not timed.seconds:
        raise RedraftError(f"no round of {mode.rows} rows ({mode}) proposed {k} tokens")


def _steady(report: RoundReport, mode: Mode, k: int) -> bool:
    """Whether some row was proposed `k` tokens from the mode's source; always in plain mode."""
    if mode.mode == "plain":
        return True
    source = Source.LOOKUP if mode.mode == "lookup" else Source.DRAFT
    return any(each.drafted == k and each.source is source for each in report.rounds)


def run_round(
    models: tuple[Path, Path | None],
    lines: Sequence[PromptLine],
    chosen: Sequence[Mode],
    *,
    k: int,
    title: str,
    command: str,
    shape: str,
    strategy: str = "own",
    rounds: int = ROUNDS,
    on_progress: OnProgress = silent,
) -> Report:
    """Measure each of the modes.

    models: folders of target and draft. lines: texts for the rows, in turn. chosen: see round_modes.modes. k: tokens that are
    drafted or looked up. shape: name of the models in the report. strategy: see strategy_named. rounds: timed ones of each
    mode.

    JSON: modes[{shape, rows, mode, sampling, recording, ragged, constrained, wall_ms, wall_ms_quartiles, calls_ms, waits,
    handovers}], settings. wall_ms: median time of a steady round of the Decoder. calls_ms: of the same target call and draft
    steps over as many rows and positions, queued with one wait at the end; the lesser of two times. waits, handovers: host
    syncs and launches, mean of a round.

    Raises BadRequest, ModelError, RedraftError.
    """
    way = strategy_named(strategy)
    on_progress("loading the pair", 0, 1)
    pair = load_pair(*models)
    if pair.draft is None and any(mode.mode == "drafted" for mode in chosen):
        raise BadRequest("the mode drafted needs a draft", field="draft")
    draft = served(pair.draft) if pair.draft is not None else None
    texts = encode_prompts(pair, lines)
    found: list[dict[str, Any]] = []
    with using(way):
        for done, mode in enumerate(chosen):
            on_progress("timing rounds", done, len(chosen))
            by_row = [texts[i % len(texts)] for i in range(mode.rows)]
            found.append({"shape": shape, **measure(pair, draft, mode, by_row, k=k, rounds=rounds)})
    settings = {"k": k, "strategy": strategy, **asdict(way), "rounds": rounds}
    labels = [f"{mode.rows} x {mode}" for mode in chosen]
    bars = {
        "ms a round": {label: float(one["wall_ms"]) for label, one in zip(labels, found, strict=True)},
        "ms of calls in it": {label: float(one["calls_ms"]) for label, one in zip(labels, found, strict=True)},
    }
    columns = ("rows", "round", "ms, median (quartiles)", "calls, ms", "beyond the calls, ms", "waits", "handovers")
    rows = tuple(_cells(mode, one) for mode, one in zip(chosen, found, strict=True))
    return Report("round", title, command, columns, rows, {"modes": found, "settings": settings}, bars)


def _cells(mode: Mode, one: Mapping[str, Any]) -> tuple[object, ...]:
    low, high = one["wall_ms_quartiles"]
    return (
        mode.rows,
        str(mode),
        f"{one['wall_ms']:.2f} ({low:.2f} to {high:.2f})",
        f"{one['calls_ms']:.2f}",
        f"{one['wall_ms'] - one['calls_ms']:.2f}",
        f"{one['waits']:.3g}",
        f"{one['handovers']:.3g}",
    )
