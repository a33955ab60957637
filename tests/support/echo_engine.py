"""A small engine, encoder and operator behind core's protocols, and the real API around them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from service import core
from service.api import Doors, Feed, Limits, ModelNames, Replies, build_api
from service.connections import web_config
from service.core import (
    LOCAL,
    OWNER,
    AdapterRef,
    AdapterState,
    AnswerGrammar,
    Caller,
    ChatEnd,
    Conflict,
    Delta,
    Disagreement,
    Doorkeeper,
    EncodedChat,
    EngineStatus,
    Erased,
    Event,
    Failed,
    Finished,
    FinishReason,
    GainsState,
    Grammar,
    GrammarKind,
    HiddenTokens,
    History,
    LearningState,
    MeasuredGain,
    NotFound,
    Overloaded,
    PracticeState,
    Progress,
    Prompt,
    Reasoning,
    RequestState,
    RequestStatus,
    RunState,
    Sampling,
    Selection,
    Sink,
    Timings,
    TokenLogprobs,
    TrainingRun,
    Trigger,
    Unavailable,
)
from service.engine.ticket import Place
from service.metrics import Metrics
from service.models.answer import AnswerReader
from service.models.call_syntax import CallSyntax, json_calls
from tests.support.scraped import scraped
from tests.support.waiting import until


def character(token: int) -> str:
    """What a token stands for; a question mark where there is no such character."""
    return chr(token) if token < 0xD800 or 0xE000 <= token < 0x110000 else "?"


class Codepoints:
    """core.Encoder: one token per character, and a template of one marker token per turn."""

    MARK: int = 0x110000
    vocabulary = 2**31
    binds_calls = True

    def __init__(self) -> None:
        self.chats: list[
            tuple[Sequence[Mapping[str, object]], Sequence[Mapping[str, object]], Mapping[str, object]]
        ] = []
        """Messages, tools and options of every chat."""
        self.hidden: list[tuple[bool, bool, tuple[str, ...]]] = []
        """Arguments of `hidden_tokens`, of every request."""
        self.ends: list[ChatEnd] = []
        """How the prompt of every chat ends."""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        options: Mapping[str, object] | None = None,
        end: ChatEnd = ChatEnd.NEW_TURN,
    ) -> EncodedChat:
        self.ends.append(end)
        self.chats.append((messages, tools, options or {}))
        tokens: list[int] = []
        for message in messages:
            tokens += [self.MARK, *self.encode_text(str(message["content"]))]
        return EncodedChat((*tokens, self.MARK) if end is ChatEnd.NEW_TURN else tuple(tokens))

    def token_bytes(self, token: int) -> bytes:
        return character(token).encode()

    def answer_reader(self, tools: Sequence[Mapping[str, object]], reasoning: Reasoning) -> AnswerReader:
        reasoning_marks = {"reasoning": [("</think>", "normal")]}
        opening = ("<think>", "reasoning")
        if not tools:
            return AnswerReader({"normal": [opening], **reasoning_marks}, "normal")
        states = {"normal": [opening, ("<tool_call>", "tool")], **reasoning_marks}
        return AnswerReader(states, "normal", SYNTAX, tools)

    def hidden_tokens(self, *, split: bool, tools: bool, stop: Sequence[str]) -> HiddenTokens:
        self.hidden.append((split, tools, tuple(stop)))
        return HiddenTokens(frozenset({self.MARK}))

    def constraint(self, grammar: Grammar, reasoning: Reasoning) -> NamedGrammar:
        names = ("uniqueItems",) if "uniqueItems" in grammar.source else ()
        return NamedGrammar(f"{grammar.kind}: {grammar.source}", unenforced=names)

    def call_grammar(
        self, tools: Sequence[Mapping[str, object]], *, several: bool, otherwise: Grammar | None = None
    ) -> Grammar:
        free = f", or {otherwise.source}" if otherwise is not None else ""
        return Grammar(GrammarKind.LARK, f"{len(tools)} tools, several: {several}{free}", "tools")

    def free_call_grammar(self, tools: Sequence[Mapping[str, object]], strict: Collection[str]) -> Grammar:
        return Grammar(GrammarKind.LARK, f"{len(tools)} tools, strict: {', '.join(sorted(strict))}", "tools")

    def encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(ord(character) for character in text)

    def encode_word(self, text: str) -> tuple[tuple[int, ...], ...]:
        word = text.lstrip()
        return tuple(tuple(map(ord, spaced)) for spaced in (word, f" {word}") if spaced)

    def encode_answer(self, text: str) -> tuple[int, ...]:
        return self.encode_text(text)


SYNTAX = CallSyntax("json_tools", "<tool_call>", "</tool_call>", json_calls)


@dataclass
class NamedGrammar:
    """core.Constraint of an engine that masks nothing."""

    text: str
    failed: bool = False
    unenforced: tuple[str, ...] = ()

    @property
    def grammar(self) -> AnswerGrammar:
        return AnswerGrammar(self.text)

    def copy(self) -> NamedGrammar:
        return replace(self)

    def masks(self, proposed: Sequence[int]) -> list[bytes]:
        return []

    def advance(self, tokens: Sequence[int]) -> None:
        pass

    def forced(self, most: int) -> list[int]:
        return []


class FailingEncoder(Codepoints):
    """An encoder whose error message quotes its input."""

    def encode_text(self, text: str) -> tuple[int, ...]:
        raise ValueError(f"cannot encode {text!r}")


@dataclass
class EchoTicket:
    id: str
    prompt: Prompt
    sink: Sink
    route: str = ""
    sent: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)
    cancelled_at: float | None = None

    def cancel(self) -> None:
        if not self.cancelled.is_set():
            self.cancelled_at = time.monotonic()
            self.cancelled.set()


class EchoEngine:
    """core.GenerationService whose output is the prompt, one token per round, each request on its own thread.

    pause: seconds per token. break_after: tokens after which a request fails. full: the queue is full.
    """

    def __init__(self, *, pause: float = 0.0, break_after: int | None = None, full: bool = False) -> None:
        self.pause = pause
        self.break_after = break_after
        self.full = full
        self.dead = ""
        self.reserved = 0
        self.tickets: list[EchoTicket] = []
        self.ended: dict[str, FinishReason] = {}
        self.flushes: list[Callable[[], None]] = []

    def reserve(self) -> Place:
        if self.full:
            raise Overloaded("the queue is full", retry_after=7)
        if self.dead:
            raise Unavailable(self.dead)
        self.reserved += 1
        return Place(self._release)

    def _release(self) -> None:
        self.reserved -= 1

    def submit(self, prompt: Prompt, sink: Sink, place: core.Place | None = None, *, route: str = "") -> EchoTicket:
        (place or self.reserve()).release()
        ticket = EchoTicket(f"echo-{len(self.tickets)}", prompt, sink, route)
        self.tickets.append(ticket)
        threading.Thread(target=self._generate, args=(ticket,), daemon=True).start()
        return ticket

    def requests(self) -> list[RequestStatus]:
        return [
            RequestStatus(
                ticket.id, RequestState.RUNNING, ticket.route, len(ticket.prompt.tokens), ticket.sent, 0.5, 1.5, 3
            )
            for ticket in self.tickets
            if ticket.id not in self.ended
        ]

    def cancel(self, request_id: str) -> RequestStatus:
        found = [status for status in self.requests() if status.id == request_id]
        if not found:
            raise NotFound("no such request is under way")
        next(ticket for ticket in self.tickets if ticket.id == request_id).cancel()
        return found[0]

    def on_delivered(self, flush: Callable[[], None]) -> None:
        self.flushes.append(flush)

    def status(self) -> EngineStatus:
        running = sum(ticket.id not in self.ended for ticket in self.tickets)
        return EngineStatus(not self.dead, self.dead or "serving", running, 0, 0.0, 3, 0)

    def _send(self, ticket: EchoTicket, event: Event) -> None:
        ticket.sink(event)
        for flush in self.flushes:
            flush()

    def _generate(self, ticket: EchoTicket) -> None:
        began = time.monotonic()
        first = 0.0
        output: list[int] = []
        finish = FinishReason.STOP
        tokens = [token for token in ticket.prompt.tokens if token != Codepoints.MARK]
        text = "".join(map(character, tokens))
        found = [(at, stop) for stop in ticket.prompt.sampling.stop if (at := text.find(stop)) >= 0]
        end, stopped_by = min(found, default=(len(tokens), None))
        for token in tokens[:end]:
            ticket.cancelled.wait(self.pause)
            if ticket.cancelled.is_set():
                finish, stopped_by = FinishReason.CANCELLED, None
                break
            if len(output) == ticket.prompt.sampling.max_tokens:
                finish, stopped_by = FinishReason.LENGTH, None
                break
            if len(output) == self.break_after:
                self.ended[ticket.id] = FinishReason.CANCELLED
                self._send(ticket, Failed(Unavailable("the engine stopped")))
                return
            output.append(token)
            first = first or time.monotonic() - began
            likely = tuple((token + i, -0.5 - i) for i in range(ticket.prompt.logprobs or 0))
            logprobs = () if ticket.prompt.logprobs is None else (TokenLogprobs(token, -0.5, likely),)
            ticket.sent += 1
            self._send(ticket, Delta(character(token), (token,), (len(output) % 2 == 0,), logprobs))
        self.ended[ticket.id] = finish
        prompt = len(ticket.prompt.tokens)
        timings = Timings(
            prompt,
            0.5,
            len(output),
            time.monotonic() - began,
            len(output),
            len(output) // 2,
            len(output),
            len(output),
            (0, 3),
            prompt // 2,
            queue_seconds=0.25,
            first_token_seconds=first and 0.5 + first,
            accepted_rounds=(len(output) - len(output) // 2, len(output) // 2),
        )
        self._send(ticket, Finished(ticket.id, finish, tuple(output), timings, stopped_by))


def make_run(number: int, state: RunState = RunState.TRAINING, progress: Progress | None = None) -> TrainingRun:
    now = datetime.now(UTC)
    seen = progress or Progress()
    return TrainingRun(number, state, Trigger.MANUAL, 1, 3, 10, 5, seen, None, None, None, now, None)


def make_adapter(number: int, state: AdapterState) -> AdapterRef:
    now = datetime.now(UTC)
    return AdapterRef(number, Path("nowhere"), "ab" * 32, 16, 2.0, ("q_proj",), "cd" * 32, 0, None, state, now)


class InMemoryOperator:
    """core.Operator on two lists."""

    def __init__(self) -> None:
        self.known_runs: list[TrainingRun] = []
        self.keys: dict[str, int] = {}
        self.erased: list[tuple[Selection, bool]] = []
        self.practice_state = PracticeState(False)
        self.learning_state = LearningState(
            waits="12 of 400 failure cases",
            refused=1,
            level=0.0068,
            level_after_promotion=0.025,
            held_out=12,
            held_out_needed=38,
            minutes=3.0,
            minutes_per_day=120.0,
            expected_gain=0.01,
            against_base={"golden set": (-0.004, -0.012, 0.005), "sql": (0.06, 0.03, 0.09)},
        )
        gain = MeasuredGain(
            214, 21_000, 2.44, 2.59, 0.061, 0.04, 0.08, 61.0, 64.7, (0.06, 0.03, 0.08), realised=2.58, predicted=2.6
        )
        self.gains_state = GainsState(3, gain, datetime.now(UTC), None)
        self.known = [make_adapter(3, AdapterState.ACTIVE), make_adapter(2, AdapterState.RETIRED)]

    def request_training(self, idempotency_key: str | None, practice_minutes: float | None = None) -> TrainingRun:
        if idempotency_key in self.keys:
            return self.run(self.keys[idempotency_key])
        if any(not run.state.over for run in self.known_runs):
            raise Conflict("a training run is under way")
        run = make_run(len(self.known_runs) + 1)
        self.known_runs.append(run if practice_minutes is None else replace(run, trigger=Trigger.PRACTICE))
        if idempotency_key is not None:
            self.keys[idempotency_key] = len(self.known_runs)
        return self.known_runs[-1]

    def runs(self, limit: int, before: int | None = None) -> list[TrainingRun]:
        found = [run for run in reversed(self.known_runs) if before is None or run.id < before]
        return found[:limit]

    def end_run(self, run_id: int) -> TrainingRun:
        run = self.run(run_id)
        if run.state.over:
            raise Conflict(f"run {run_id} is over ({run.state})")
        self.known_runs[run_id - 1] = replace(run, state=RunState.ENDED, error="ended by an operator")
        return self.known_runs[run_id - 1]

    def run(self, run_id: int) -> TrainingRun:
        if not 0 < run_id <= len(self.known_runs):
            raise NotFound(f"there is no training run {run_id}")
        return self.known_runs[run_id - 1]

    def learning(self) -> LearningState:
        return self.learning_state

    def gains(self) -> GainsState:
        return self.gains_state

    def practice(self) -> PracticeState:
        return self.practice_state

    def choose_practice(self, on: bool) -> PracticeState:
        if self.practice_state.fixed is not None:
            raise Conflict(self.practice_state.fixed)
        self.practice_state = PracticeState(on)
        return self.practice_state

    def adapters(self) -> list[AdapterRef]:
        return self.known

    def activate(self, adapter_id: int) -> AdapterRef | None:
        if adapter_id == 0:
            return None
        for ref in self.known:
            if ref.id == adapter_id:
                return replace(ref, state=AdapterState.ACTIVE)
        raise NotFound(f"there is no adapter {adapter_id}")

    def remove_adapter(self, adapter_id: int) -> AdapterRef:
        for ref in self.known:
            if ref.id == adapter_id:
                if ref.state is AdapterState.ACTIVE:
                    raise Conflict(f"adapter {adapter_id} is active")
                return replace(ref, state=AdapterState.REMOVED)
        raise NotFound(f"there is no adapter {adapter_id}")

    def rollback(self, expected: int | None = None) -> AdapterRef | None:
        if not self.known or expected not in {None, self.known[0].id}:
            raise Conflict("the bare draft serves already")
        self.known.clear()
        return None

    def erase(self, selection: Selection, *, retire_adapters: bool = False) -> Erased:
        self.erased.append((selection, retire_adapters))
        return Erased(2, (3,), (3,) if retire_adapters else ())


TOKEN = "rd-the-token-of-the-home-folder"
OWNED = {"authorization": f"Bearer {TOKEN}"}
"""Headers of the user who owns the home folder."""


class OpenHouse:
    """No key was ever made; TOKEN is that of the home folder."""

    without_key = LOCAL
    several = False

    def by_key(self, secret: str) -> Caller | None:
        return OWNER if secret == TOKEN else None

    def by_session(self, secret: str) -> Caller | None:
        return None

    def log_in(self, key: str) -> str | None:
        return None

    def log_out(self, session: str) -> None:
        pass


class InMemoryOverview:
    """core.Overview of what a test puts into it."""

    def __init__(self) -> None:
        now = datetime.now(UTC)
        self.known = History(now, now, (), (), ())
        self.cases: list[Disagreement] = []
        self.run: TrainingRun | None = None

    def history(self, hours: int) -> History:
        return self.known

    def disagreements(self, limit: int) -> list[Disagreement]:
        return self.cases[:limit]

    def newest_cases(self, limit: int, before: int | None = None) -> list[Disagreement]:
        return [each for each in self.cases[::-1] if before is None or each.case < before][:limit]

    def newest_run(self) -> TrainingRun | None:
        return self.run


LIMITS = Limits(
    max_body_bytes=20_000,
    request_timeout=20.0,
    keepalive_seconds=5.0,
    max_tokens=1_000,
    max_context=4_000,
    max_answers=12,
)


@dataclass
class EchoServer:
    """The API over an echo engine and an in-memory operator, in this process or on a real port."""

    engine: EchoEngine = field(default_factory=EchoEngine)
    operator: InMemoryOperator = field(default_factory=InMemoryOperator)
    overview: InMemoryOverview = field(default_factory=InMemoryOverview)
    encoder: Codepoints = field(default_factory=Codepoints)
    metrics: Metrics = field(default_factory=lambda: Metrics(3, "echo"))
    limits: Limits = LIMITS
    allowed_hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "::1")
    keeper: Doorkeeper = field(default_factory=OpenHouse)
    cors_origins: Sequence[str] = ()
    rate_limit: str | None = None
    draft_counts: bool = False
    defaults: Sampling | None = None
    strict: bool = False
    replies: Replies = field(default_factory=lambda: Replies(2**20))
    idle_seconds: int = 75
    feed: Feed = field(init=False)
    """Of the application that was made last."""

    def __post_init__(self) -> None:
        self.feed = self._new_feed()

    def _new_feed(self) -> Feed:
        return Feed("echo", self.engine.status, self.metrics, self.overview.newest_run, self.operator.practice)

    @property
    def app(self) -> FastAPI:
        self.feed = self._new_feed()
        return build_api(
            service=self.engine,
            encoder=self.encoder,
            operator=self.operator,
            metrics=self.metrics,
            limits=self.limits,
            models=ModelNames("echo", ["gpt-4o"]),
            doors=Doors(
                self.keeper, self.allowed_hosts, self.cors_origins, self.rate_limit, draft_counts=self.draft_counts
            ),
            overview=self.overview,
            feed=self.feed,
            defaults=self.defaults,
            strict=self.strict,
            replies=self.replies,
        )

    @contextmanager
    def served(self) -> Generator[str]:
        """A real uvicorn on a free port; yields its address."""
        # As the server's own: only where it reads TCP does asyncio switch Nagle's algorithm off, which costs 40 ms a piece.
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            config = web_config(self.app, idle_seconds=self.idle_seconds, arrival_seconds=self.limits.arrival_seconds)
            config.timeout_graceful_shutdown = 2
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
            thread.start()
            until(lambda: server.started)
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                self.feed.end()
                server.should_exit = True
                thread.join(10)

    def value(self, sample: str) -> float:
        """The value of one line of /metrics, by its name and its labels but for the model's name."""
        return self.values()[sample]

    def values(self) -> dict[str, float]:
        """Every line of /metrics, as `value` names them."""
        return scraped(self.metrics.exposition()[0].decode())
