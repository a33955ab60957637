"""`redraft demo`: a real server under real traffic improves its draft, and every answer is checked against the target alone."""

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
from typing import Any, Protocol

from service.core import Prompt, RedraftError, RunState, Sampling
from service.engine.adapters import Draft, load, served
from service.evaluation.agreement import measure, paired_low90
from service.evaluation.bench.arms import EngineArm, take_turns
from service.evaluation.oracle import forced_mismatches, naive_greedy, naive_greedy_batch
from service.evaluation.target_outputs import greedy_generations
from service.evaluation.prompts import PromptLine
from service.evaluation.server_process import LocalServer
from service.evaluation.sql_prompts import held_out, traffic
from service.evaluation.ties import Text, exact, measure_ties
from service.evaluation.clients import Answer, Traffic, longest_gap_ms
from service.models.pair import Pair, load_pair
from service.models.text import TextEncoder
from service.settings import EngineSettings, Settings, sqlite_url
from service.store.adapters import Adapters
from service.store.database import Database
from service.store.generations import Generations


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is shown.

    clients: streams at a time. rest: seconds that each of them waits before its next question while a run is under way, which
    shares the processor with them. max_tokens: of one answer. min_tokens: recorded output tokens that start a training run.
    epochs, replay: of that run. after: answers still served by the new adapter. held_out: prompts that the gain is measured
    on. checked: answers that the target also decodes token by token, beyond the teacher-forced pass that each of them gets.
    timed: prompts of the timing of one stream. judged: texts that the gate scores at most, held-out ones and golden ones
    each. limit_seconds: for a promotion.
    """

    clients: int
    rest: float
    max_tokens: int
    min_tokens: int
    epochs: int
    replay: float
    after: int
    held_out: int
    checked: int
    timed: int
    judged: int
    limit_seconds: float


FULL = Scale(8, 0.0, 64, 2_500, 3, 0.3, 24, 60, 20, 12, 200, 1200.0)
QUICK = Scale(4, 4.0, 32, 1_000, 3, 0.2, 4, 20, 6, 2, 24, 900.0)
SWAP_MARGIN = 1.0
"""Seconds around a change of the active adapter that count as the swap: loading comes before it, settling after it."""
POLL_SECONDS = 0.25
TIE = 1e-3
"""Gap of two log-probabilities below which passes of different shapes may disagree in float32."""


class OnProgress(Protocol):
    """Where the demo is."""

    def __call__(self, stage: str, done: int, of: int, note: str = "") -> None:
        """The stage, how much of it is done (of: 0 where nobody knows), and a note. What happens at once (a verdict, a swap) is
        a stage with neither."""
        ...


def _silent(stage: str, done: int, of: int, note: str = "") -> None:
    pass


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What was measured.

    failures: what the failed requests were answered, each once. agreement and tokens_per_call: on held-out prompts. low90:
    lower end of the two-sided 90 % interval of the gain in agreement. tokens_per_second: of one stream, the three in turn.
    """

    failed_requests: int
    failures: list[str]
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
        """As JSON takes it."""
        return asdict(self)

    def problems(self) -> list[str]:
        """What must never happen and did, a sentence each."""
        found: list[str] = []
        if self.failed_requests:
            found.append(f"{self.failed_requests} of {self.requests} requests failed: {'; '.join(self.failures[:3])}")
        if self.greedy_mismatches:
            found.append(f"{self.greedy_mismatches} answers differ from what the target alone says")
        return found


@dataclass(frozen=True, slots=True)
class Story:
    """What happened while traffic went on. swaps: spans of time.monotonic() around each."""

    answers: list[Answer]
    swaps: list[tuple[float, float]]


def run_demo(
    settings: Settings,
    models: tuple[Path, Path],
    *,
    scale: Scale,
    prompts: Sequence[PromptLine] | None = None,
    on_progress: OnProgress = _silent,
    keep: Path | None = None,
) -> DemoReport:
    """Serve, learn, swap, then check and measure.

    models: folders of target and draft. prompts: traffic of the user's own, one in five of which is held out. keep: folder for
    the server's log, database and adapters, else a temporary one. Raises RedraftError when no adapter was promoted, or when
    there is nothing to check or measure.
    """
    started = time.monotonic()
    asked, measured = _lines(prompts, scale)
    folder = keep or Path(tempfile.mkdtemp(prefix="redraft-demo-"))
    try:
        story = _serve(settings, folder, asked, scale, on_progress)
        on_progress("loading the pair to check the answers", 0, 1)
        pair = load_pair(*models)
        assert pair.draft is not None
        adapted = _active(folder, pair)
        mismatches, ties = _check(pair, story.answers, scale, on_progress)
        generations = greedy_generations(
            pair,
            measured,
            settings.home,
            max_tokens=scale.max_tokens,
            on_step=lambda done, of: on_progress("held-out prompts", done, of),
        )
        on_progress("measuring the gain", 0, 1)
        static = served(pair.draft)
        before, scores_before = measure(static.model, generations, pair.vocabulary)
        after, scores_after = measure(adapted.model, generations, pair.vocabulary)
        on_progress("timing one stream", 0, 1)
        timed = [
            Prompt(generation.prompt.tokens, Sampling(max_tokens=scale.max_tokens))
            for generation in generations[: scale.timed]
        ]
        contenders = {"plain": None, "before": static, "after": adapted}
        engine = settings.engine
        arms = {
            name: EngineArm(pair, draft, k=engine.num_draft_tokens, adaptive=engine.adaptive)
            for name, draft in contenders.items()
        }
        decoded = take_turns(arms, timed)
        speeds = {name: median(one.rate for one in told) for name, told in decoded.items()}
        outputs = {name: [one.tokens for one in told] for name, told in decoded.items()}
        if exact(pair.target.model):
            mismatches += sum(outputs[name] != outputs["plain"] for name in ("before", "after"))
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    failures = [answer.error for answer in story.answers if answer.error is not None]
    return DemoReport(
        failed_requests=len(failures),
        failures=list(dict.fromkeys(failures)),
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
        seconds=time.monotonic() - started,
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


def _serve(
    settings: Settings, folder: Path, lines: Iterator[PromptLine], scale: Scale, on_progress: OnProgress
) -> Story:
    """Serve traffic until an adapter was promoted and has answered some. Raises RedraftError when none is within the limit."""
    on_progress("starting the server: loading the models, timing their calls", 0, 0)
    server = LocalServer(
        folder,
        {
            "models": settings.models.model_dump(exclude_none=True),
            # Calls are timed for every batch size up to max_rows: more rows than clients would be timed for nothing.
            "engine": settings.engine.model_dump() | {"max_rows": min(settings.engine.max_rows, scale.clients)},
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
            "gate": settings.gate.model_dump()
            | {"watch_generations": 10**6, "min_prompts": 10, "min_tokens": 200, "max_prompts": scale.judged},
        },
        settings.home,
    )
    server.start()
    try:
        clients = Traffic(server.url, lines, clients=scale.clients, max_tokens=scale.max_tokens)
        try:
            swaps = _follow(server, clients, scale, on_progress)
        finally:
            clients.stop()
    finally:
        server.stop()
    return Story(clients.answers, swaps)


def _follow(server: LocalServer, clients: Traffic, scale: Scale, on_progress: OnProgress) -> list[tuple[float, float]]:
    """Watch the server until the new adapter has given its answers: spans of the swaps. Raises RedraftError when there is none
    within the limit."""
    database = Database(sqlite_url(server.folder / "redraft.db"), read_only=True)
    recorded = Generations(database)
    end = time.monotonic() + scale.limit_seconds
    swaps: list[tuple[float, float]] = []
    verdicts: list[str] = []
    active, until = 0, None
    try:
        while until is None or len(clients.answers) < until:
            time.sleep(POLL_SECONDS)
            now, serving = time.monotonic(), server.get("/adapters")["active"]
            # Asked for after the adapters: a run is over before its adapter serves, so the verdict is told before the swap.
            run = server.find(f"/train/{len(verdicts) + 1}")
            if run is not None and (verdict := _verdict(run)) is not None:
                verdicts.append(verdict)
                on_progress(verdict, 0, 0)
            if serving != active:
                active = serving
                swaps.append((now - SWAP_MARGIN, now + SWAP_MARGIN))
                until = until or len(clients.answers) + scale.after
                on_progress(f"swap: adapter {active} drafts now, in the middle of the traffic", 0, 0)
            failed = sum(answer.error is not None for answer in clients.answers)
            clients.rest = 0.0 if run is None or RunState(run["state"]).over else scale.rest
            stage, note = _stage(run, active)
            counts = f"{recorded.stats().cases} failure cases recorded, {failed} requests failed{note}"
            on_progress(stage, len(clients.answers), until or 0, counts)
            if until is None and now > end:
                why = "; ".join(verdicts) or f"{stage}, {len(clients.answers)} requests, {counts}"
                raise RedraftError(f"no adapter was promoted in {scale.limit_seconds:.0f} s of traffic: {why}")
    finally:
        database.close()
    return swaps


def _verdict(run: dict[str, Any]) -> str | None:
    """One sentence about a run that is over."""
    if not RunState(run["state"]).over:
        return None
    why = run["error"] or (run["verdict"] or {}).get("reason") or "no reason given"
    return f"verdict: run {run['id']} {run['state']}, {why}"


def _stage(run: dict[str, Any] | None, active: int) -> tuple[str, str]:
    """What is going on, and what to add to it."""
    if active:
        return "serving with the new adapter", ""
    if run is None or RunState(run["state"]).over:
        return "serving, gathering failure cases", ""
    if run["state"] in {RunState.SCORING, RunState.STAGING}:
        return "serving, the gate compares candidate and parent", ""
    progress = run["progress"]
    loss = "" if progress["loss"] is None else f", loss {progress['loss']:.3f}"
    return "serving, training the adapter", f"; step {progress['step']} of {progress['steps'] or '?'}{loss}"


def _active(folder: Path, pair: Pair) -> Draft:
    """The adapter that served last."""
    assert pair.draft is not None
    database = Database(sqlite_url(folder / "redraft.db"))
    try:
        ref = Adapters(database, folder / "adapters").active(pair.provenance.draft)
    finally:
        database.close()
    static = served(pair.draft)
    return static if ref is None else load(static.model, ref, pair.provenance.draft)


def _check(pair: Pair, answers: Sequence[Answer], scale: Scale, on_progress: OnProgress) -> tuple[int, int]:
    """Answers that differ from the target alone, and positions too close to call in a pass of another shape.

    Every answer is checked in teacher-forced passes; some (`checked`), and every one with a near-tie, also token by token.
    Where precision leaves ties (see evaluation/ties.py), the counts are of tokens that rounding does not explain, and of ties.
    """
    encoder = TextEncoder(pair.target.tokenizer)
    good = [answer for answer in answers if answer.error is None and _complete(answer, pair, scale)]
    wrong = sum(answer.error is None for answer in answers) - len(good)
    if not good:
        return wrong, 0
    prompts = [encoder.encode_chat([{"role": "user", "content": answer.line.prompt}]) for answer in good]
    positions = sum(len(answer.tokens) for answer in good)
    if not exact(pair.target.model):
        texts = [Text(prompt, answer.tokens, Sampling()) for prompt, answer in zip(prompts, good, strict=True)]
        report = measure_ties(
            pair.target.model,
            texts,
            k=EngineSettings().num_draft_tokens,
            vocabulary=pair.vocabulary,
            on_step=lambda done: on_progress(
                "checking every answer against the target alone", done, positions, "tokens"
            ),
        )
        return wrong + report.differences, report.ties
    forced = forced_mismatches(
        pair.target.model,
        [(prompt, answer.tokens) for prompt, answer in zip(prompts, good, strict=True)],
        pair.vocabulary,
        tie=TIE,
        on_step=lambda done: on_progress("checking every answer against the target alone", done, positions, "tokens"),
    )
    differs = [missed > near for missed, near in forced]
    doubtful = {i for i, (_, near) in enumerate(forced) if near}
    groups = _alike(prompts, scale.checked)
    count = sum(map(len, groups))
    for done, group in enumerate(groups):
        on_progress(f"decoding {count} of them with the target alone, token by token", done, len(groups), "groups")
        tokens = [good[i].tokens for i in group]
        lengths = [len(each) for each in tokens]
        expected = naive_greedy_batch(pair.target.model, [prompts[i] for i in group], lengths, pair.eos)
        # Several rows at a time are again a pass of another shape: one row alone decides.
        doubtful |= {i for i, served, alone in zip(group, tokens, expected, strict=True) if served != alone}
    for done, i in enumerate(sorted(doubtful)):
        on_progress("decoding the near-ties with the target alone", done, len(doubtful))
        tokens = good[i].tokens
        differs[i] |= naive_greedy(pair.target.model, prompts[i], len(tokens), pair.eos) != tokens
    return wrong + sum(differs), sum(near for _, near in forced)


def _complete(answer: Answer, pair: Pair, scale: Scale) -> bool:
    """Whether it goes on until the target ends it or the limit is reached: a beginning of the right text is not enough."""
    return bool(answer.tokens) and (answer.tokens[-1] in pair.eos or len(answer.tokens) == scale.max_tokens)


def _alike(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Random groups of prompts of equal length, `count` in all where there are so many: indices."""
    by_length: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(i)
    groups = list(by_length.values())
    random.Random(0).shuffle(groups)
    chosen: list[list[int]] = []
    for group in groups:
        if (left := count - sum(map(len, chosen))) > 0:
            chosen.append(group[:left])
    return chosen
