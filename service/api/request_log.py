"""Logs one line per request at its end: figures, but no text of a prompt or an answer.

A request ends when its response was sent or its client is gone, and the engine has ended all of its answers.
"""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from service.api.request_id import id_of
from service.core import Caller, FinishReason, Timings
from service.logs import FIELDS

log = logging.getLogger(__name__)

PROBED = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/events", "/history", "/cases"})
"""Routes of probes, scrapers and open pages, which are called every few seconds and logged at level DEBUG."""
DIGITS = 4
"""Decimals of seconds."""


class RequestEntry:
    """The log entry of a request. Used only on the event loop. id: the request's id, as clients see it. per_prompt:
    answers per prompt. error: code of the error."""

    def __init__(self, id: str, method: str) -> None:
        self.id = id
        self.method = method
        self.per_prompt = 1
        self.error: str | None = None
        self._arrived = time.monotonic()
        self._pending = 0
        self._reasons: list[FinishReason] = []
        self._timings: list[Timings] = []
        self._response: tuple[str | None, int | None, str | None, float] | None = None

    def answer_started(self) -> None:
        """The engine has a request for an answer; `answer_ended` must follow."""
        self._pending += 1

    def answer_ended(self, finish: FinishReason | None, timings: Timings | None) -> None:
        """The engine has ended an answer. finish: None where it failed. timings: None where there are none."""
        self._pending -= 1
        if finish is not None:
            self._reasons.append(finish)
        if timings is not None:
            self._timings.append(timings)
        self._write_at_the_end()

    def response_ended(self, route: str | None, status: int | None, key: str | None = None) -> None:
        """The response was sent, or its client is gone. route: None: no such route. status: None: none was sent. key:
        name of the API key it was sent with."""
        self._response = route, status, key, time.monotonic() - self._arrived
        self._write_at_the_end()

    def _write_at_the_end(self) -> None:
        if self._response is None or self._pending:
            return
        route, status, key, seconds = self._response
        # The route rather than the path, which a client may have made up.
        line: dict[str, object] = {"request_id": self.id, "method": self.method, "route": route, "status": status}
        if key is not None:
            line["api_key"] = key
        if self.error is not None:
            line["error"] = self.error
        if self._reasons:
            line["finish_reason"] = ",".join(dict.fromkeys(self._reasons))
        if self._timings:
            line |= self._figures()
        line["total_seconds"] = round(seconds, DIGITS)
        log.log(logging.DEBUG if route in PROBED else logging.INFO, "request", extra={FIELDS: line})

    def _figures(self) -> dict[str, object]:
        """For several answers, tokens are summed, as in the response, and times are the longest."""
        spent = Timings.combined(self._timings, self.per_prompt)
        return {
            "prompt_tokens": spent.prompt_n,
            "cached_tokens": spent.cache_n,
            "completion_tokens": spent.predicted_n,
            "drafted_tokens": spent.draft_n,
            "accepted_tokens": spent.draft_n_accepted,
            "adapters": list(spent.adapters),
            "queue_seconds": round(max(each.queue_seconds for each in self._timings), DIGITS),
            "prefill_seconds": round(max(each.prefill_seconds for each in self._timings), DIGITS),
            "decode_seconds": round(max(each.decode_seconds for each in self._timings), DIGITS),
        }


_CURRENT: ContextVar[RequestEntry | None] = ContextVar("request_entry", default=None)


def current_entry() -> RequestEntry | None:
    """The entry of the request that is being answered."""
    return _CURRENT.get()


def note_error(code: str) -> None:
    """Records that the current request, if any, is answered with this error."""
    if (entry := _CURRENT.get()) is not None:
        entry.error = code


class RequestLog:
    """ASGI middleware that opens an entry for every request and adds its `request_id` to every log line in the meantime."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        entry, status = RequestEntry(id_of(scope), scope["method"]), None

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        token = _CURRENT.set(entry)
        try:
            with bound_contextvars(request_id=entry.id):
                await self._app(scope, receive, watched)
        finally:
            _CURRENT.reset(token)
            caller: Caller | None = scope.get("state", {}).get("caller")
            key = None if caller is None else caller.key
            entry.response_ended(getattr(scope.get("route"), "path", None), status, key)
