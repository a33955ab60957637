"""One HTTP request and the events of its answers, which come from the engine's thread and are awaited on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from service.api.errors import TimedOut
from service.api.mailbox import Mailbox
from service.api.request_log import current_entry
from service.core import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationService,
    Overloaded,
    Place,
    Prompt,
    RedraftError,
    Ticket,
)
from service.metrics import Metrics

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
ENDING_SECONDS = 30.0
"""Time allowed to the engine for ending timed-out answers: a round, and a prefill chunk of another request."""
RETRY_SECONDS = 0.05
"""Time after which a request with many prompts that has no queue slot tries again."""


@dataclass(slots=True)
class _Answer:
    """One answer of the request: its state in the engine, and undelivered events. arrived_at: when the engine could
    start it (monotonic). enough: ended by the API. timed_out: ended because its time was up. given_up: cancelled
    because its client is gone. failed: an error was counted. over: its last event has arrived."""

    prompt_tokens: int
    unsent: list[Event]
    arrived_at: float
    ticket: Ticket | None = None
    last_delta_at: float | None = None
    enough: bool = False
    timed_out: bool = False
    given_up: bool = False
    failed: bool = False
    over: bool = False


class Exchange:
    """A request from its arrival to its end, on one event loop, with one or several answers. Callers of submit() must
    also call close().

    seconds: time limit of the request, see `events`. live: its events are delivered as they arrive, otherwise only at
    an answer's end. per_prompt: answers to each prompt.
    """

    def __init__(self, metrics: Metrics, mailbox: Mailbox, seconds: float, *, live: bool, per_prompt: int = 1) -> None:
        mailbox.bind()
        self._metrics = metrics
        self._mailbox = mailbox
        self._live = live
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._arrived = time.monotonic()
        self._seconds = seconds
        self._answers: list[_Answer] = []
        self.draft_counts = True
        """Whether its answers contain the numbers of drafted and accepted tokens."""
        self.ignored: list[str] = []
        """Names of fields and schema locations that its answers do not follow, for the header; known once the prompts
        are encoded."""
        self._queued: deque[tuple[int, Prompt]] = deque()
        """Answers not yet submitted to the engine, by number, and their prompts."""
        self._at_once = 0
        """Maximum number of its answers in the engine at a time."""
        self._under_way = 0
        self._start: Callable[[int, Prompt, Place | None], None] | None = None
        self._entry = current_entry()
        if self._entry is not None:
            self._entry.per_prompt = per_prompt

    def submit(
        self, service: GenerationService, prompts: Sequence[Prompt], places: Sequence[Place], *, route: str
    ) -> None:
        """Submits a request to the engine for each answer with a queue slot, and the others one by one as answers end.
        route: the request's. Raises the errors of GenerationService.submit."""
        self._answers = [_Answer(len(prompt.tokens), [], self._arrived) for prompt in prompts]
        self._queued.extend(enumerate(prompts))
        self._at_once = len(places)
        self._start = partial(self._submit_one, service, route)
        for place in places:
            self._start(*self._queued[0], place)

    def _submit_one(
        self, service: GenerationService, route: str, index: int, prompt: Prompt, place: Place | None
    ) -> None:
        answer = self._answers[index]
        answer.ticket = service.submit(prompt, lambda event: self._receive(index, answer, event), place, route=route)
        self._queued.popleft()
        self._under_way += 1
        self._metrics.request_started()
        if self._entry is not None:
            self._entry.answer_started()

    def _submit_more(self) -> None:
        """Submits waiting answers up to the allowed number. On the event loop."""
        while self._start is not None and self._queued and self._under_way < self._at_once:
            index, prompt = self._queued[0]
            self._answers[index].arrived_at = time.monotonic()
            try:
                self._start(index, prompt, None)
            except Overloaded:
                # Others have taken the slot. The end of the next answer triggers another attempt.
                if self._under_way == 0:
                    asyncio.get_running_loop().call_later(RETRY_SECONDS, self._submit_more)
                return
            except RedraftError as error:
                self._queued.clear()
                self._count_failure(self._answers[index], error)
                self._queue.put_nowait((index, Failed(error)))

    @property
    def id(self) -> str:
        """The id of the first answer's request."""
        ticket = self._answers[0].ticket
        assert ticket is not None
        return ticket.id

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the first answer's prompt."""
        return self._answers[0].prompt_tokens

    def prompt_tokens_of(self, index: int) -> int:
        """Tokens of an answer's prompt."""
        return self._answers[index].prompt_tokens

    async def events(self, patience: float | None) -> AsyncIterator[tuple[int, Delta | Finished] | None]:
        """The engine's events with the number of their answer; each answer's last one is Finished. patience: for
        streams, None is yielded after this many seconds without an event; None: the answers are sent as a whole.

        The time limit covers the time from arrival to the end of complete answers, or to a stream's first event and
        then between events; while some of many prompts have unstarted answers, it covers the time between the ends of
        answers. After that the answers end with what they have, as at max_tokens. Raises TimedOut if some have not
        started or none has a token by then, and the engine's error when an answer failed.
        """
        unfinished = len(self._answers)
        deadline, ending = self._arrived + self._seconds, False
        while unfinished:
            left = deadline - time.monotonic()
            if left <= 0:
                if ending or self._queued or all(answer.last_delta_at is None for answer in self._answers):
                    self._fail(TimedOut(f"no token was generated within {self._seconds:g} s"))
                self._end_in_time()
                deadline, ending = time.monotonic() + ENDING_SECONDS, True
                continue
            try:
                async with asyncio.timeout(left if patience is None else min(patience, left)):
                    index, event = await self._queue.get()
            except TimeoutError:
                if patience is not None and patience < left:
                    yield None
                continue
            if (patience is not None or self._queued) and not ending:
                deadline = time.monotonic() + self._seconds
            match event:
                case Delta():
                    yield index, event
                case Finished():
                    unfinished -= 1
                    yield index, event
                case Failed():
                    self._fail(event.error)

    def end(self, index: int) -> None:
        """Ends one answer early. Its Finished event still arrives and counts as the model's own end."""
        self._answers[index].enough = True
        self._cancel(self._answers[index])

    def _end_in_time(self) -> None:
        """Ends the unfinished answers because their time is up. Their Finished events still arrive."""
        for answer in self._answers:
            if not answer.over:
                answer.timed_out = True
                self._cancel(answer)

    def close(self) -> None:
        """Cancels everything unfinished in the engine. Idempotent."""
        self._queued.clear()
        for answer in self._answers:
            if not answer.over:
                answer.given_up = True
                self._cancel(answer)

    @staticmethod
    def _cancel(answer: _Answer) -> None:
        if answer.ticket is not None:
            answer.ticket.cancel()

    def _receive(self, index: int, answer: _Answer, event: Event) -> None:
        # On the engine's thread, one event at a time.
        answer.unsent.append(event)
        if isinstance(event, Delta) and event.tokens:
            self._observe_latency(answer)
        if self._live or not isinstance(event, Delta):
            self._mailbox.put(self._deliver, index, answer.unsent)
            answer.unsent = []

    def _deliver(self, index: int, event: Event) -> None:
        """Runs on the event loop, also after the client has stopped waiting."""
        own = self._answers[index]
        if own.timed_out and isinstance(event, Finished) and event.finish is FinishReason.CANCELLED:
            event = replace(event, finish=FinishReason.LENGTH)
        if not isinstance(event, Delta):
            self._ended(own, event)
        self._queue.put_nowait((index, event))

    def _observe_latency(self, answer: _Answer) -> None:
        now = time.monotonic()
        if answer.last_delta_at is None:
            self._metrics.first_token(now - answer.arrived_at)
        else:
            self._metrics.next_tokens(now - answer.last_delta_at)
        answer.last_delta_at = now

    def _ended(self, own: _Answer, event: Finished | Failed) -> None:
        """Counts and logs an answer that the engine has ended; another one may take its slot."""
        own.over = True
        self._under_way -= 1
        finish, timings = FinishReason.CANCELLED, None
        if isinstance(event, Finished):
            finish, timings = FinishReason.STOP if own.enough else event.finish, event.timings
        else:
            # The whole request fails.
            self._queued.clear()
            if not own.given_up:
                self._count_failure(own, event.error)
        if not own.failed:
            self._metrics.request_finished(finish, time.monotonic() - self._arrived, timings)
        if self._entry is not None:
            self._entry.answer_ended(None if own.failed else finish, timings)
        self._submit_more()

    def _count_failure(self, answer: _Answer, error: RedraftError) -> None:
        if not answer.failed:
            answer.failed = True
            self._metrics.request_failed(error.code)
            if self._entry is not None:
                self._entry.error = error.code

    def _fail(self, error: RedraftError) -> NoReturn:
        for answer in self._answers:
            if answer.ticket is not None and not answer.over:
                self._count_failure(answer, error)
        raise error


class EventStream(StreamingResponse):
    """A request's answers as server-sent events written by `frames`. The request is cancelled as soon as the client
    disconnects, even before the first event."""

    def __init__(self, exchange: Exchange, frames: AsyncIterator[bytes]) -> None:
        super().__init__(
            frames,
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exchange.close()
