"""One request and its events: they come from the engine's thread and are awaited on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import NoReturn

from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from service.api.errors import TimedOut, describe
from service.api.mailbox import Mailbox
from service.api.schemas import DeltaAnswer, Summary, TimingsAnswer, Usage
from service.core import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationService,
    Place,
    Prompt,
    RedraftError,
    Ticket,
    Timings,
)
from service.metrics import Metrics

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class Exchange:
    """A request from its arrival to its end, on one event loop. Whoever calls submit() must call close() as well.

    seconds: how long the request may take in all, from now on. stream: its events are wanted as they come; otherwise all of
    them come at its end.
    """

    def __init__(self, metrics: Metrics, mailbox: Mailbox, seconds: float, *, stream: bool) -> None:
        mailbox.bind()
        self._metrics = metrics
        self._mailbox = mailbox
        self._stream = stream
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._unsent: list[Event] = []
        self._last_delta_at: float | None = None
        self._arrived = time.monotonic()
        self._seconds = seconds
        self._prompt_tokens = 0
        self._ticket: Ticket | None = None
        self._counted = False

    def submit(self, service: GenerationService, prompt: Prompt, place: Place) -> None:
        """Queue the request in its place. Raises the errors of GenerationService.submit."""
        self._prompt_tokens = len(prompt.tokens)
        self._ticket = service.submit(prompt, self._receive, place)
        self._metrics.request_started()

    async def events(self, patience: float) -> AsyncIterator[Delta | Finished | None]:
        """The engine's events, the last one Finished; None after every `patience` seconds without an event.

        Raises the engine's error when the request failed, TimedOut when it took too long.
        """
        while True:
            left = self._arrived + self._seconds - time.monotonic()
            if left <= 0:
                self._fail(TimedOut(f"the request took longer than {self._seconds:g} s"))
            try:
                async with asyncio.timeout(min(patience, left)):
                    event = await self._queue.get()
            except TimeoutError:
                if patience < left:
                    yield None
                continue
            match event:
                case Delta():
                    yield event
                case Finished():
                    self._finish(event.finish)
                    yield event
                    return
                case Failed():
                    self._fail(event.error)

    def close(self) -> None:
        """Cancel the request in the engine, unless it is over. Idempotent."""
        if self._ticket is not None:
            self._ticket.cancel()
            self._finish(FinishReason.CANCELLED)

    def _receive(self, event: Event) -> None:
        # On the engine's thread, one event at a time.
        self._unsent.append(event)
        if isinstance(event, Delta) and event.tokens:
            self._observe_latency()
        if self._stream or not isinstance(event, Delta):
            self._mailbox.put(self._queue, self._unsent)
            self._unsent = []

    def _observe_latency(self) -> None:
        now = time.monotonic()
        if self._last_delta_at is None:
            self._metrics.first_token(now - self._arrived)
        else:
            self._metrics.next_tokens(now - self._last_delta_at)
        self._last_delta_at = now

    def _finish(self, finish: FinishReason) -> None:
        if not self._counted:
            self._counted = True
            self._metrics.request_finished(finish, self._prompt_tokens, time.monotonic() - self._arrived)

    def _fail(self, error: RedraftError) -> NoReturn:
        self._counted = True
        self._metrics.request_failed(error.code)
        raise error


class EventStream(StreamingResponse):
    """A request's answer as server-sent events. The request is cancelled as soon as the client disconnects, even before the
    first event."""

    def __init__(self, exchange: Exchange, model: str, keepalive_seconds: float, with_tokens: bool) -> None:
        super().__init__(
            _server_sent(exchange, model, keepalive_seconds, with_tokens),
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


async def _server_sent(exchange: Exchange, model: str, patience: float, with_tokens: bool) -> AsyncIterator[bytes]:
    try:
        async for event in exchange.events(patience):
            match event:
                case None:
                    yield KEEP_ALIVE
                case Delta() if with_tokens:
                    yield _data(DeltaAnswer(text=event.text, tokens=list(event.tokens), drafted=list(event.drafted)))
                case Delta() if event.text:
                    yield _data(DeltaAnswer(text=event.text))
                case Finished():
                    yield _data(summary(event, model, with_tokens))
                    yield DONE
                case _:
                    pass
    except RedraftError as error:
        yield b"event: error\n" + _data(describe(error), exclude_none=False)
    finally:
        exchange.close()


def summary(finished: Finished, model: str, with_tokens: bool) -> Summary:
    """How a request ended, as clients see it."""
    spent = finished.timings
    return Summary(
        id=finished.id,
        model=model,
        finish_reason=finished.finish,
        usage=Usage(
            prompt_tokens=spent.prompt_n,
            completion_tokens=spent.predicted_n,
            total_tokens=spent.prompt_n + spent.predicted_n,
        ),
        timings=_timings(spent),
        tokens=list(finished.output) if with_tokens else None,
    )


def _timings(spent: Timings) -> TimingsAnswer:
    return TimingsAnswer(
        prompt_n=spent.prompt_n,
        cache_n=spent.cache_n,
        prompt_ms=spent.prompt_seconds * 1000,
        predicted_n=spent.predicted_n,
        predicted_ms=spent.predicted_seconds * 1000,
        predicted_per_second=spent.predicted_per_second,
        draft_n=spent.draft_n,
        draft_n_accepted=spent.draft_n_accepted,
        rounds=spent.rounds,
        adapters=list(spent.adapters),
    )


def _data(answer: BaseModel, *, exclude_none: bool = True) -> bytes:
    return f"data: {answer.model_dump_json(exclude_none=exclude_none)}\n\n".encode()
