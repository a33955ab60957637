"""`redraft demo`: a real server under real traffic improves its draft, and every answer is checked against the target alone."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from service.core import Generation, Prompt, RedraftError, RunState, Sampling
from service.engine.adapters import Draft, load, served
from service.evaluation.agreement import Agreement, measure, paired_low90
from service.evaluation.answer_check import CheckedAnswers, check_answers
from service.evaluation.bench.arms import Arm, Decoded, EngineArm, rotated
from service.evaluation.clients import Answer, Clients, longest_gap_ms
from service.evaluation.demo_plan import DemoPlan, Goal, Scale, duration, plan_demo
from service.evaluation.machine_speed import measure_speed
from service.evaluation.paired_speed import SpeedRatio, speed_ratio
from service.evaluation.progress import OnProgress, silent
from service.evaluation.prompts import PromptLine
from service.evaluation.server_process import LocalServer, engine_settings, require_unused
from service.evaluation.sql_prompts import held_out_prompts, traffic_prompts
from service.evaluation.target_outputs import greedy_generations
from service.evaluation.ties import exact
from service.models.pair import Pair, load_pair
from service.settings import EngineSettings, Settings, sqlite_url
from service.store.database import Database
from service.store.log.generations import Generations
from service.store.registry.adapters import Adapters

MOST_TURNS = 60
"""Turns of the timing of one stream, however much time is left."""
SWAP_MARGIN = 1.0
"""Seconds before and after a change of the active adapter that count as the swap: loading, and settling."""
POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What was measured.

    failures: different errors of failed requests. greedy_mismatches: answers that differ from the target's. agreement,
    tokens_per_call (the acceptance length): on held-out prompts, before and after. low90: lower end of the two-sided 90 %
    interval of the gain in agreement. tokens_per_second: of one stream without a draft, before and after, the medians of turns.
    speed_ratios: "after/before" and so on, of the same turns. announced_seconds: what the demo was to take; seconds: what it
    took.
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
    speed_ratios: dict[str, SpeedRatio]
    longest_gap_ms: dict[str, float]
    announced_seconds: float
    seconds: float

    def plain(self) -> dict[str, Any]:
        """All fields by name, JSON-ready."""
        return asdict(self)

    @property
    def noisy(self) -> bool:
        """Whether the machine was too noisy to tell the speeds of one stream apart."""
        return any(ratio.noisy for ratio in self.speed_ratios.values())

    def problems(self) -> list[str]:
        """What must never happen and did, a sentence each."""
        found: list[str] = []
        if self.failed_requests:
            found.append(f"{self.failed_requests} of {self.requests} requests failed: {'; '.join(self.failures[:3])}")
        if self.greedy_mismatches:
            found.append(f"{self.greedy_mismatches} answers differ from what the target alone says")
        return found


@dataclass(frozen=True, slots=True)
class ServedTraffic:
    """All answers, and the spans of time.monotonic() around each swap."""

    answers: list[Answer]
    swaps: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Gain:
    """Figures before and after on held-out prompts; low90: of the gain in agreement."""

    before: Agreement
    after: Agreement
    low90: float


@dataclass(frozen=True, slots=True)
class StreamSpeeds:
    """Tokens per second of one stream by way of decoding ("plain", "before", "after"), one value a turn. differ: turns of a
    draft whose output was not the target's, where precision leaves no ties."""

    rates: dict[str, list[float]]
    differ: int

    def ratios(self) -> dict[str, SpeedRatio]:
        """The ratio of each two of them."""
        pairs = (("before", "plain"), ("after", "plain"), ("after", "before"))
        return {f"{one}/{other}": speed_ratio(self.rates[one], self.rates[other]) for one, other in pairs}


def run_demo(
    settings: Settings,
    models: tuple[Path, Path],
    *,
    goal: Goal,
    prompts: Sequence[PromptLine] | None = None,
    on_progress: OnProgress = silent,
    keep: Path | None = None,
) -> DemoReport:
    """Measure the machine, announce how long the demo takes, serve traffic until an adapter is promoted, check the answers and
    measure the gain.

    models: folders of target and draft. prompts: traffic of the user's own, one in five of which is held out. keep: folder for
    the server's log, database and adapters; else a temporary one. Raises RedraftError when no adapter is promoted within the
    limit, and for fewer than 50 prompts.
    """
    started = time.monotonic()
    _prompts(prompts, goal.floor)
    if keep is not None:
        require_unused(keep)
    plan = _measured_plan(settings, models, goal, prompts, on_progress)
    announced = time.monotonic() - started + plan.seconds
    on_progress(f"the demo takes about {duration(announced)} on this machine", 0, 0)
    scale, on_progress = plan.scale, with_time_left(on_progress, started + announced)
    lines, held_out = _prompts(prompts, scale)
    folder = keep or Path(tempfile.mkdtemp(prefix="redraft-demo-"))
    try:
        traffic = _serve(settings, folder, lines, scale, on_progress)
        on_progress("loading the pair to check the answers", 0, 1)
        pair = load_pair(*models)
        assert pair.draft is not None
        static, adapted = served(pair.draft), _active_draft(folder, pair)
        checked = check_answers(
            pair,
            traffic.answers,
            max_tokens=scale.max_tokens,
            stepwise=scale.stepwise,
            on_progress=on_progress,
        )
        generations = greedy_generations(
            pair,
            held_out,
            settings.home,
            max_tokens=scale.max_tokens,
            on_step=lambda done, of: on_progress("held-out prompts", done, of),
        )
        on_progress("measuring the gain", 0, 1)
        gain = _gain(pair, static, adapted, generations)
        drafts = {"plain": None, "before": static, "after": adapted}
        arms = _arms(pair, drafts, settings.engine)
        texts = [Prompt(each.prompt.tokens, Sampling(max_tokens=scale.max_tokens)) for each in generations]
        decoded = _take_turns(arms, texts, scale.turns, started + announced, on_progress)
        speeds = _stream_speeds(decoded, exact(pair.target.model))
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    checked = CheckedAnswers(checked.wrong + speeds.differ, checked.near_ties)
    return _report(traffic, checked, gain, speeds, announced, time.monotonic() - started)


def with_time_left(on_progress: OnProgress, end: float) -> OnProgress:
    """Adds to the notes of stages how long the demo still takes. end: of time.monotonic()."""

    def report(stage: str, done: int, of: int, note: str = "") -> None:
        left = end - time.monotonic()
        if (done or of) and left > 0:
            note = ", ".join(part for part in (note, f"about {duration(left)} left") if part)
        on_progress(stage, done, of, note)

    return report


def _measured_plan(
    settings: Settings,
    models: tuple[Path, Path],
    goal: Goal,
    prompts: Sequence[PromptLine] | None,
    on_progress: OnProgress,
) -> DemoPlan:
    count = goal.floor.clients
    lines = traffic_prompts(count) if prompts is None else prompts[:count]
    speed = measure_speed(
        models, lines, max_tokens=goal.floor.max_tokens, training=settings.training, on_progress=on_progress
    )
    return plan_demo(speed, goal, settings.training.batch_size)


def _report(
    traffic: ServedTraffic,
    checked: CheckedAnswers,
    gain: Gain,
    speeds: StreamSpeeds,
    announced: float,
    seconds: float,
) -> DemoReport:
    failures = [answer.error for answer in traffic.answers if answer.error is not None]
    return DemoReport(
        failed_requests=len(failures),
        failures=list(dict.fromkeys(failures)),
        greedy_mismatches=checked.wrong,
        near_ties=checked.near_ties,
        promotions=len(traffic.swaps),
        requests=len(traffic.answers),
        agreement={"before": gain.before.agreement, "after": gain.after.agreement, "low90": gain.low90},
        tokens_per_call={"before": gain.before.acceptance_length, "after": gain.after.acceptance_length},
        tokens_per_second={name: median(rates) for name, rates in speeds.rates.items()},
        speed_ratios=speeds.ratios(),
        longest_gap_ms={
            "without_swap": longest_gap_ms(traffic.answers, traffic.swaps, outside=True),
            "with_swap": longest_gap_ms(traffic.answers, traffic.swaps, outside=False),
        },
        announced_seconds=announced,
        seconds=seconds,
    )


def _gain(pair: Pair, static: Draft, adapted: Draft, generations: Sequence[Generation]) -> Gain:
    before, scores_before = measure(static.model, generations, pair.vocabulary)
    after, scores_after = measure(adapted.model, generations, pair.vocabulary)
    return Gain(before, after, paired_low90(scores_before, scores_after))


def _arms(pair: Pair, drafts: Mapping[str, Draft | None], engine: EngineSettings) -> dict[str, Arm]:
    return {
        name: EngineArm(pair, draft, k=engine.num_draft_tokens, adaptive=engine.adaptive)
        for name, draft in drafts.items()
    }


def _take_turns(
    arms: Mapping[str, Arm], prompts: Sequence[Prompt], least: int, end: float, on_progress: OnProgress
) -> dict[str, list[Decoded]]:
    """Every arm's answers, one prompt a turn and a turn for every arm: `least` turns, and more while a turn as long as the
    longest ends before `end` (of time.monotonic()). The number of turns depends on the time alone, not on what was measured."""
    decoded: dict[str, list[Decoded]] = {name: [] for name in arms}
    turn, longest = 0, 0.0
    while turn < least or (turn < MOST_TURNS and time.monotonic() + longest < end):
        on_progress("timing one stream: plain, before, after, in turns", turn, max(least, turn + 1), "turns")
        started = time.monotonic()
        for name in rotated(list(arms), turn):
            decoded[name].append(arms[name].decode(prompts[turn % len(prompts)]))
        turn, longest = turn + 1, max(longest, time.monotonic() - started)
    return decoded


def _stream_speeds(decoded: Mapping[str, Sequence[Decoded]], lossless: bool) -> StreamSpeeds:
    """lossless: whether precision leaves no ties."""
    rates = {name: [one.rate for one in answers] for name, answers in decoded.items()}
    differ = sum(
        one.tokens != plain.tokens
        for name in ("before", "after")
        for one, plain in zip(decoded[name], decoded["plain"], strict=True)
    )
    return StreamSpeeds(rates, differ if lossless else 0)


def _prompts(prompts: Sequence[PromptLine] | None, scale: Scale) -> tuple[Iterator[PromptLine], list[PromptLine]]:
    """Endless traffic, and held-out prompts that it does not use."""
    if prompts is None:
        batches = (traffic_prompts(400, seed) for seed in itertools.count())
        return itertools.chain.from_iterable(batches), held_out_prompts(scale.held_out)
    held_out = list(prompts[::5][: scale.held_out])
    others = [line for line in prompts if line not in held_out]
    if len(held_out) < 10 or not others:
        raise RedraftError(f"a demo needs at least 50 prompts, got {len(prompts)}")
    return itertools.cycle(others), held_out


def _serve(
    settings: Settings, folder: Path, lines: Iterator[PromptLine], scale: Scale, on_progress: OnProgress
) -> ServedTraffic:
    """Serve traffic until an adapter is promoted and has drafted some answers. Raises RedraftError when none is within the
    limit."""
    on_progress("starting the server: loading the models, timing their calls", 0, 0)
    server = LocalServer(folder, _server_settings(settings, scale), settings.home)
    server.start()
    try:
        clients = Clients(server.url, lines, clients=scale.clients, max_tokens=scale.max_tokens)
        try:
            swaps = _Watcher(server, clients, scale, on_progress).watch()
        finally:
            clients.stop()
    finally:
        server.stop()
    return ServedTraffic(clients.answers, swaps)


def _server_settings(settings: Settings, scale: Scale) -> dict[str, Mapping[str, object]]:
    training: dict[str, object] = {
        "min_cases": 1,
        "min_tokens": scale.min_tokens,
        "epochs": scale.epochs,
        "replay": scale.replay,
        "tick_seconds": 0.5,
        "cooldown_seconds": 5.0,
        # Its clients never pause, and a demo that waits for the right moment shows nothing.
        "idle_seconds": 0.0,
        # A demo was asked for, on battery too.
        "pause_on_battery": False,
        "pause_when_hot": False,
        "pause_on_memory_pressure": False,
    }
    # So little traffic holds out few prompts; the reported interval says what they are worth.
    gate: dict[str, object] = {
        "watch_generations": 10**6,
        "min_prompts": 10,
        "min_tokens": 200,
        "max_prompts": scale.gate_texts,
    }
    return {
        "models": settings.models.model_dump(exclude_none=True),
        # Calls are timed for every batch size up to max_rows: more rows than clients would be timed for nothing.
        "engine": engine_settings(settings.engine) | {"max_rows": min(settings.engine.max_rows, scale.clients)},
        "training": settings.training.model_dump() | training,
        "gate": settings.gate.model_dump() | gate,
    }


class _Watcher:
    """Follows a server from outside: its runs, verdicts, swaps and recorded cases, while clients send requests."""

    def __init__(self, server: LocalServer, clients: Clients, scale: Scale, on_progress: OnProgress) -> None:
        self._server = server
        self._clients = clients
        self._scale = scale
        self._on_progress = on_progress
        self._swaps: list[tuple[float, float]] = []
        self._verdicts: list[str] = []
        self._active = 0
        self._until: int | None = None
        """Number of answers at which the demo ends; None before the first swap."""

    def watch(self) -> list[tuple[float, float]]:
        """Wait until the new adapter has drafted its answers; returns the spans of the swaps. Raises RedraftError when there is
        no swap within the limit."""
        database = Database(sqlite_url(self._server.folder / "redraft.db"), read_only=True)
        recorded = Generations(database)
        end = time.monotonic() + self._scale.limit_seconds
        try:
            while self._until is None or len(self._clients.answers) < self._until:
                time.sleep(POLL_SECONDS)
                self._poll(recorded, end)
        finally:
            database.close()
        return self._swaps

    def _poll(self, recorded: Generations, end: float) -> None:
        now, serving = time.monotonic(), self._server.get("/adapters")["active"]
        # Read after the adapters: a run is over before its adapter serves, so the verdict is reported before the swap.
        run = self._server.find(f"/train/{len(self._verdicts) + 1}")
        if run is not None and (verdict := _verdict(run)) is not None:
            self._verdicts.append(verdict)
            self._on_progress(verdict, 0, 0)
        if serving != self._active:
            self._note_swap(serving, now)
        answers = self._clients.answers
        failed = sum(answer.error is not None for answer in answers)
        self._clients.pause_seconds = 0.0 if run is None or RunState(run["state"]).over else self._scale.pause_seconds
        stage, note = _stage(run, self._active)
        counts = f"{recorded.stats().cases} failure cases recorded, {failed} requests failed{note}"
        self._on_progress(stage, len(answers), self._until or 0, counts)
        if self._until is None and now > end:
            why = "; ".join(self._verdicts) or f"{stage}, {len(answers)} requests, {counts}"
            raise RedraftError(f"no adapter was promoted in {self._scale.limit_seconds:.0f} s of traffic: {why}")

    def _note_swap(self, serving: int, now: float) -> None:
        self._active = serving
        self._swaps.append((now - SWAP_MARGIN, now + SWAP_MARGIN))
        self._until = self._until or len(self._clients.answers) + self._scale.answers_after
        self._on_progress(f"swap: adapter {serving} drafts now, in the middle of the traffic", 0, 0)


def _verdict(run: dict[str, Any]) -> str | None:
    """One sentence about a run that is over; None while it is not."""
    if not RunState(run["state"]).over:
        return None
    why = run["error"] or (run["verdict"] or {}).get("reason") or "no reason given"
    return f"verdict: run {run['id']} {run['state']}, {why}"


def _stage(run: dict[str, Any] | None, active: int) -> tuple[str, str]:
    """The stage, and a note to append to its counts."""
    if active:
        return "serving with the new adapter", ""
    if run is None or RunState(run["state"]).over:
        return "serving, gathering failure cases", ""
    if run["state"] in {RunState.SCORING, RunState.STAGING}:
        return "serving, the gate compares candidate and parent", ""
    progress = run["progress"]
    loss = "" if progress["loss"] is None else f", loss {progress['loss']:.3f}"
    return "serving, training the adapter", f"; step {progress['step']} of {progress['steps'] or '?'}{loss}"


def _active_draft(folder: Path, pair: Pair) -> Draft:
    """The draft with the adapter that served last."""
    assert pair.draft is not None
    database = Database(sqlite_url(folder / "redraft.db"))
    try:
        ref = Adapters(database, folder / "adapters").active(pair.provenance.target, pair.provenance.draft)
    finally:
        database.close()
    static = served(pair.draft)
    return static if ref is None else load(static.model, ref, pair.provenance.draft)
