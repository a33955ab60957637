"""`redraft demo`: the whole loop on a real server under real traffic, and proof of what it did."""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from service.core import Prompt, RedraftError, Sampling
from service.engine.draft import Draft, load, served
from service.evaluation.agreement import measure, paired_low90
from service.evaluation.bench.turns import EngineArm, take_turns
from service.evaluation.check import forced_mismatches, naive_greedy
from service.evaluation.outputs import greedy_generations
from service.evaluation.prompts import PromptLine
from service.evaluation.run import Step
from service.evaluation.server import LocalServer
from service.evaluation.templates import held_out, traffic
from service.evaluation.ties import Text, exact, measure_ties
from service.evaluation.traffic import Answer, Traffic, longest_gap_ms
from service.models.pair import Pair, load_pair
from service.models.text import TextEncoder
from service.settings import EngineSettings, Settings, sqlite_url
from service.store.adapters import Adapters
from service.store.database import Database


@dataclass(frozen=True, slots=True)
class Scale:
    """clients: streams at a time. min_tokens: recorded output tokens that set off a run. epochs, replay: of that run. after:
    answers still served by the new draft. held_out: prompts the gain is measured on. limit_seconds: for a promotion."""

    clients: int
    max_tokens: int
    min_tokens: int
    epochs: int
    replay: float
    after: int
    held_out: int
    checked: int
    timed: int
    limit_seconds: float


FULL = Scale(8, 64, 2_500, 3, 0.3, 24, 60, 20, 12, 1200.0)
QUICK = Scale(8, 48, 1_000, 2, 0.2, 8, 30, 20, 3, 900.0)
SWAP_MARGIN = 1.0
"""Seconds around a change of the active adapter that count as the swap: loading aside comes before, settling after."""


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What was measured. agreement and tokens_per_call: on held-out prompts. low90: lower end of the two-sided 90 %
    interval of the gain in agreement. tokens_per_second: one stream, the three in turn."""

    failed_requests: int
    greedy_mismatches: int
    near_ties: int
    promotions: int
    requests: int
    agreement: dict[str, float]
    tokens_per_call: dict[str, float]
    tokens_per_second: dict[str, float]
    longest_gap_ms: dict[str, float]
    seconds: float

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Story:
    """What happened while traffic went on. swaps: spans of time.monotonic() around each. outcomes: the gate's words."""

    answers: list[Answer]
    swaps: list[tuple[float, float]]
    outcomes: list[str]


def run_demo(
    settings: Settings,
    models: tuple[Path, Path],
    *,
    scale: Scale,
    prompts: Sequence[PromptLine] | None = None,
    on_step: Step = lambda stage, done, of: None,
    keep: Path | None = None,
) -> DemoReport:
    """models: folders of target and draft. prompts: traffic of the user's own, one in five of which is held out.

    keep: folder for the server's log, database and adapters, else a temporary one. Raises RedraftError.
    """
    begun = time.monotonic()
    asked, measured = _lines(prompts, scale)
    folder = keep or Path(tempfile.mkdtemp(prefix="redraft-demo-"))
    try:
        story = _serve(settings, folder, asked, scale, on_step)
        on_step("loading the pair to check the answers", 0, 1)
        pair = load_pair(*models)
        assert pair.draft is not None
        adapted = _active(folder, pair)
        mismatches, ties = _check(pair, story.answers, scale, on_step)
        generations = greedy_generations(
            pair,
            measured,
            settings.home,
            max_tokens=scale.max_tokens,
            on_step=lambda done, of: on_step("held-out prompts", done, of),
        )
        on_step("measuring the gain", 0, 1)
        static = served(pair.draft)
        before, scores_before = measure(static.model, generations, pair.vocabulary)
        after, scores_after = measure(adapted.model, generations, pair.vocabulary)
        on_step("timing one stream", 0, 1)
        timed = [
            Prompt(generation.prompt.tokens, Sampling(max_tokens=scale.max_tokens))
            for generation in generations[: scale.timed]
        ]
        contenders = {"plain": None, "before": static, "after": adapted}
        arms = {name: EngineArm(pair, draft, k=settings.engine.num_draft_tokens) for name, draft in contenders.items()}
        decoded = take_turns(arms, timed)
        speeds = {name: median(one.rate for one in told) for name, told in decoded.items()}
        outputs = {name: [one.tokens for one in told] for name, told in decoded.items()}
        mismatches += sum(outputs[name] != outputs["plain"] for name in ("before", "after"))
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return DemoReport(
        failed_requests=sum(answer.error is not None for answer in story.answers),
        greedy_mismatches=mismatches,
        near_ties=ties,
        promotions=len(story.swaps),
        requests=len(story.answers),
        agreement={
            "before": before.agreement,
            "after": after.agreement,
            "low90": paired_low90(scores_before, scores_after),
        },
        tokens_per_call={"before": before.tokens_per_call, "after": after.tokens_per_call},
        tokens_per_second=speeds,
        longest_gap_ms={
            "without_swap": longest_gap_ms(story.answers, story.swaps, outside=True),
            "with_swap": longest_gap_ms(story.answers, story.swaps, outside=False),
        },
        seconds=time.monotonic() - begun,
    )


def _lines(prompts: Sequence[PromptLine] | None, scale: Scale) -> tuple[Iterator[PromptLine], list[PromptLine]]:
    """Traffic without end, and the prompts it never uses."""
    if prompts is None:
        rounds = (traffic(400, seed) for seed in itertools.count())
        return itertools.chain.from_iterable(rounds), held_out(scale.held_out)
    measured = list(prompts[::5][: scale.held_out])
    rest = [line for line in prompts if line not in measured]
    if len(measured) < 10 or not rest:
        raise RedraftError(f"a demo needs at least 50 prompts, got {len(prompts)}")
    return itertools.cycle(rest), measured


def _serve(settings: Settings, folder: Path, lines: Iterator[PromptLine], scale: Scale, on_step: Step) -> Story:
    on_step("starting the server", 0, 1)
    server = LocalServer(
        folder,
        {
            "models": settings.models.model_dump(exclude_none=True),
            "engine": settings.engine.model_dump(),
            "training": settings.training.model_dump()
            | {
                "min_cases": 1,
                "min_tokens": scale.min_tokens,
                "epochs": scale.epochs,
                "replay": scale.replay,
                "tick_seconds": 0.5,
                "cooldown_seconds": 5.0,
                # Whoever asks for a demo wants to see it, on battery too.
                "pause_on_battery": False,
                "pause_when_hot": False,
                "pause_on_memory_pressure": False,
            },
            # So little traffic holds out few prompts; the interval says what they are worth.
            "gate": settings.gate.model_dump() | {"watch_generations": 10**6, "min_prompts": 10, "min_tokens": 200},
        },
        settings.home,
    )
    server.start()
    swaps: list[tuple[float, float]] = []
    outcomes: dict[int, str] = {}
    try:
        clients = Traffic(server.url, lines, clients=scale.clients, max_tokens=scale.max_tokens)
        begun, active, until = time.monotonic(), 0, None
        try:
            while until is None or len(clients.answers) < until:
                time.sleep(0.2)
                state = server.get("/adapters")
                now = time.monotonic()
                if state["active"] != active:
                    active = state["active"]
                    swaps.append((now - SWAP_MARGIN, now + SWAP_MARGIN))
                    until = until or len(clients.answers) + scale.after
                for adapter in state["adapters"]:
                    outcomes[adapter["id"]] = adapter["state"]
                on_step(_stage(server, active), len(clients.answers), 0)
                if until is None and now - begun > scale.limit_seconds:
                    break
        finally:
            clients.stop()
    finally:
        server.stop()
    if not swaps:
        raise RedraftError(
            f"no adapter was promoted within {scale.limit_seconds:.0f} s of traffic "
            f"(adapters: {outcomes or 'none'}); the server's last words: {server.tail()}"
        )
    return Story(clients.answers, swaps, list(outcomes.values()))


def _stage(server: LocalServer, active: int) -> str:
    if active:
        return f"adapter {active} serves"
    try:
        run = server.get("/train/1")
    except RedraftError:
        return "serving, collecting failure cases"
    return f"serving, run 1 {run['state']} step {run['progress']['step']}/{run['progress']['steps']}"


def _active(folder: Path, pair: Pair) -> Draft:
    """The adapter that served last."""
    assert pair.draft is not None
    database = Database(sqlite_url(folder / "redraft.db"))
    try:
        ref = Adapters(database).active(pair.provenance.draft)
    finally:
        database.close()
    static = served(pair.draft)
    return static if ref is None else load(static.model, ref, pair.provenance.draft)


def _check(pair: Pair, answers: Sequence[Answer], scale: Scale, on_step: Step) -> tuple[int, int]:
    """Answers that differ from the target alone, and positions too close to call in a pass of another shape.

    Every answer in teacher-forced passes; `checked` random ones, and every one with a near-tie, token by token. Where precision
    leaves ties (see evaluation/ties.py), tokens that rounding does not explain, and ties.
    """
    encoder = TextEncoder(pair.target.tokenizer)
    good = [answer for answer in answers if answer.error is None and answer.tokens]
    chosen = {id(answer) for answer in random.Random(0).sample(good, min(scale.checked, len(good)))}
    prompts = [encoder.encode_chat([{"role": "user", "content": answer.line.prompt}]) for answer in good]
    positions = sum(len(answer.tokens) for answer in good)
    if not exact(pair.target.model):
        texts = [Text(prompt, answer.tokens, Sampling()) for prompt, answer in zip(prompts, good, strict=True)]
        report = measure_ties(
            pair.target.model,
            texts,
            k=EngineSettings().num_draft_tokens,
            vocabulary=pair.vocabulary,
            on_step=lambda done: on_step("checking answers against the target alone", done, positions),
        )
        return report.differences, report.ties
    forced = forced_mismatches(
        pair.target.model,
        [(prompt, answer.tokens) for prompt, answer in zip(prompts, good, strict=True)],
        pair.vocabulary,
        tie=1e-3,
        on_step=lambda done: on_step("checking answers against the target alone", done, positions),
    )
    wrong = 0
    for done, (answer, prompt, (missed, near)) in enumerate(zip(good, prompts, forced, strict=True)):
        on_step("decoding some of them with the target alone", done, len(good))
        differs = missed > near
        if not differs and (near or id(answer) in chosen):
            differs = naive_greedy(pair.target.model, prompt, len(answer.tokens), pair.eos) != answer.tokens
        wrong += differs
    return wrong, sum(near for _, near in forced)
