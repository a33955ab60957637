"""`redraft bench round`: where the time of a steady round goes, by kind of round."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from service.core import BadRequest, Grammar, GrammarKind, Prompt, RedraftError, Sampling, Source
from service.engine import device
from service.engine.acceptance import Acceptance
from service.engine.adapters import Draft, served
from service.engine.costs import Costs, Load
from service.engine.decoder import Decoder
from service.engine.planner import Choice, Match, Planner
from service.engine.request import Request
from service.engine.rounds import RoundReport
from service.engine.strategy import CPU, CUDA, METAL, Strategy, current, using
from service.evaluation.bench.model_calls import Calls, queued
from service.evaluation.bench.report import Report
from service.evaluation.prompts import PromptLine
from service.evaluation.training_run import Step
from service.models.pair import Pair, load_pair
from service.models.text import TextEncoder

PROPOSING, DRAWING = ("plain", "drafted", "lookup"), ("greedy", "seeded", "sampled")
"""What a mode's `mode` and `sampling` may be."""

ROUNDS = 50
"""Rounds that are timed, and rounds whose calls are queued."""
WARM = 4
"""Rounds before any that is timed: they compile kernels, and fill the pipeline where there is one."""
SEARCHED = 4
"""Times as many rounds are run at most, to find those in which something was looked up."""
HELD = 128
"""Positions of a row before the first round; ragged rows hold half to one and a half times as many."""
PHRASE = 16
"""Tokens that the text of a row repeats where look-ups are to be found."""
TEMPERATURE = 0.7
"""Of seeded and sampled rows."""
LONG_LIST = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "array",
            "minItems": 200,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 60}, "count": {"type": "integer"}},
                "required": ["name", "count"],
                "additionalProperties": False,
            },
        }
    ),
    "constrained",
)
"""No row comes to its end."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A kind of round over so many rows. mode: one of PROPOSING. sampling: one of DRAWING. recording: with evidence for the
    log. ragged: rows of unlike lengths. constrained: the first row follows a grammar."""

    rows: int
    mode: str
    sampling: str = "greedy"
    recording: bool = True
    ragged: bool = True
    constrained: bool = False

    def __str__(self) -> str:
        words = [self.mode, self.sampling]
        words += [] if self.recording else ["not recorded"]
        words += [] if self.ragged or self.rows == 1 else ["equal lengths"]
        words += ["one within a grammar"] if self.constrained else []
        return ", ".join(words)


KINDS = (
    Mode(1, "plain"),
    Mode(1, "drafted"),
    Mode(1, "lookup"),
    Mode(4, "drafted", recording=False, ragged=False),
    Mode(4, "drafted", "seeded"),
    Mode(4, "drafted", "sampled"),
)
"""What is measured where nothing else is asked for."""


def modes(
    rows: Sequence[int] | None = None,
    proposing: Sequence[str] | None = None,
    drawing: Sequence[str] | None = None,
    *,
    recording: bool | None = None,
    ragged: bool | None = None,
    constrained: bool = False,
) -> list[Mode]:
    """KINDS where nothing is asked for; with `rows` alone each of them over so many rows; else all combinations, where what was
    not given is plain, drafted and lookup; greedy; recording; ragged; 1 row. constrained: each of these also with a row that
    follows a grammar. Raises BadRequest."""
    if constrained:
        free = modes(rows, proposing, drawing, recording=recording, ragged=ragged)
        return [each for mode in free for each in (mode, replace(mode, constrained=True))]
    if proposing is None and drawing is None and recording is None and ragged is None:
        return list(dict.fromkeys(replace(mode, rows=n) for n in rows for mode in KINDS)) if rows else list(KINDS)
    proposing, drawing = proposing or PROPOSING, drawing or ["greedy"]
    for field, names, known in (("modes", proposing, PROPOSING), ("sampling", drawing, DRAWING)):
        for name in names:
            if name not in known:
                raise BadRequest(f"--{field} takes {', '.join(known)}, not {name!r}", field=field)
    return [
        Mode(n, way, draw, recording is not False, ragged is not False)
        for n, way, draw in product(rows or [1], proposing, drawing)
    ]


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "own": current,
    "device": lambda: METAL if current() == CPU else current(),
    "cpu": lambda: CPU,
    "metal": lambda: METAL,
    "cuda": lambda: CUDA,
}


def strategy_named(name: str) -> Strategy:
    """own: that of the device at hand; device: that of an accelerator, Metal's on a CPU. Raises BadRequest."""
    if name not in STRATEGIES:
        raise BadRequest(f"no strategy {name!r}: choose among {', '.join(STRATEGIES)}", field="strategy")
    return STRATEGIES[name]()


class AlwaysLookUp(Planner):
    """Proposes what was looked up for every row that has something, whatever rounds cost."""

    def __init__(self, most: int) -> None:
        super().__init__(0, most, Costs({(1, 1): 1.0}, {1: 0.0}, {1: 0.0}, 0.0, 0.0))
        self._longest = most

    def choose(
        self,
        load: Load,
        matches: Sequence[Match | None],
        own: Sequence[Acceptance] | None = None,
        *,
        drafts: bool = True,
    ) -> Choice:
        """See Planner; nothing is drafted."""
        return Choice(0, tuple(min(self._longest, match.available) if match else 0 for match in matches))


@dataclass(slots=True)
class Timed:
    """Steady rounds: seconds, and how often Python waited for the device or handed work over in each."""

    seconds: list[float]
    waits: list[int]
    handovers: list[int]


def measure(
    pair: Pair, draft: Draft | None, mode: Mode, texts: Sequence[Sequence[int]], *, k: int, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Times of rounds of this kind, and of their calls, in ms; see run_round. texts: tokens that the rows' prompts are made of,
    one for each row. k: tokens that are proposed. Raises RedraftError where no row finds anything to look up."""
    drafts = mode.mode == "drafted"
    proposed = 0 if mode.mode == "plain" else k
    used = draft if drafts else None
    decoder = Decoder(
        pair.target.model,
        used,
        vocabulary=pair.vocabulary,
        k=k if drafts else 0,
        collect=mode.recording,
        adaptive=mode.mode == "lookup",
        lookup=k if mode.mode == "lookup" else 0,
    )
    if mode.mode == "lookup":
        decoder.planner = AlwaysLookUp(k)
    prompts = _prompts(mode, texts)
    if mode.constrained:
        encoder = TextEncoder(pair.target.tokenizer, pair.vocabulary, pair.eos)
        prompts[0] = replace(prompts[0], constraint=encoder.constraint(LONG_LIST, None))
    for prompt in prompts:
        # No end token: every row stays.
        decoder.admit(Request("", prompt, frozenset(), None))
    timed = Timed([], [], [])
    calls_seconds, held = list[float](), list[list[int]]()
    for until in (rounds // 2, rounds):
        _rounds(decoder, timed, until, mode, k)
        # A round that was launched ahead is no part of the calls' time.
        mx.synchronize()
        held = [list(row.tokens) for row in decoder.rows]
        with Calls(pair, used, held) as calls:
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


def _prompts(mode: Mode, texts: Sequence[Sequence[int]]) -> list[Prompt]:
    """A prompt for each row: its text over and over. Rows of equal lengths have the same text, and so accept as many tokens."""
    made: list[Prompt] = []
    for i in range(mode.rows):
        text, length = texts[i if mode.ragged else 0], HELD
        if mode.mode == "lookup":
            text = text[-PHRASE:]
        if mode.ragged and mode.rows > 1:
            length = HELD // 2 + HELD * i // (mode.rows - 1)
        sampling = Sampling(
            temperature=0.0 if mode.sampling == "greedy" else TEMPERATURE,
            seed=(i if mode.ragged else 0) if mode.sampling == "seeded" else None,
            max_tokens=1 << 20,
        )
        made.append(Prompt((*text,) * (length // len(text)) + (*text[: length % len(text)],), sampling))
    return made


def _rounds(decoder: Decoder, timed: Timed, count: int, mode: Mode, k: int) -> None:
    """Run rounds until `timed` has `count` of those that propose what they should."""
    for _ in range(WARM):
        decoder.round()
    for _ in range(SEARCHED * count):
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
    """Whether the target call was over as many tokens as it should."""
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
    on_step: Step = lambda stage, done, of: None,
) -> Report:
    """models: folders of target and draft. lines: texts for the rows, taken in turn. k: tokens proposed by the draft or looked
    up. shape: what the report calls the models. strategy: see strategy_named.

    JSON: modes[{shape, rows, mode, sampling, recording, ragged, constrained, wall_ms, wall_ms_quartiles, calls_ms, waits,
    handovers}], settings. wall_ms: median time of a steady round of the Decoder. calls_ms: of the same target call and draft
    steps over as many rows that hold as many positions, queued with one wait at the end; the lesser of two times. waits,
    handovers: for each round.

    Raises BadRequest, ModelError, RedraftError.
    """
    way = strategy_named(strategy)
    on_step("loading the pair", 0, 1)
    pair = load_pair(*models)
    if pair.draft is None and any(mode.mode == "drafted" for mode in chosen):
        raise BadRequest("the mode drafted needs a draft", field="draft")
    draft = served(pair.draft) if pair.draft is not None else None
    texts = encoded(pair, lines)
    found: list[dict[str, Any]] = []
    with using(way):
        for done, mode in enumerate(chosen):
            on_step("timing rounds", done, len(chosen))
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


def encoded(pair: Pair, lines: Sequence[PromptLine]) -> list[tuple[int, ...]]:
    """Each line as a chat of one user turn."""
    encoder = TextEncoder(pair.target.tokenizer)
    return [encoder.encode_chat([{"role": "user", "content": line.prompt}]) for line in lines]


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
