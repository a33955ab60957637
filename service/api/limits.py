"""Limits on the cost of one request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.errors import GENERATING, answer
from service.core import GenerationService, RedraftError
from service.metrics import Metrics

LENGTH_DIGITS = 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request. Times in seconds; arrival_seconds limits a pause within a body. max_tokens limits an
    answer, max_context prompt and answer together.

    max_prompt_bytes: a prompt of more bytes (UTF-8) has more than max_context tokens, whatever it says, and is refused
    before it is tokenised; None: unknown. max_answers: a request for more answers than rows and queue hold can never be
    served; None: unknown.
    """

    max_body_bytes: int
    request_timeout: float
    keepalive_seconds: float
    max_tokens: int
    max_context: int
    max_prompt_bytes: int | None = None
    max_answers: int | None = None
    arrival_seconds: float = 30.0


class QueueLimit:
    """ASGI middleware that refuses requests to routes that generate while the queue is full or the engine is not
    serving: before the body is read and parsed, so that refusing many clients at once is cheap.

    No slot is held while the body arrives, because slow clients could take them all; the route reserves one afterwards.
    """

    def __init__(self, app: ASGIApp, service: GenerationService, metrics: Metrics) -> None:
        self._app = app
        self._service = service
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and scope["path"] in GENERATING and scope["method"] == "POST":
            try:
                self._service.reserve().release()
            except RedraftError as error:
                self._metrics.request_refused(error.code)
                await answer(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """ASGI middleware that counts the bytes of a request's body, declared or chunked, as the application reads them.

    Too many bytes raise an HTTPException of status 413 from `receive`; a body that pauses for longer than
    `arrival_seconds` or is not complete within the request timeout raises one of status 408. Both reach the client in
    the standard error shape. At most the limit is held in memory.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.request_timeout
        declared = _declared_length(scope)
        received = 0
        complete = False

        async def counted() -> Message:
            nonlocal received, complete
            if complete:
                return await receive()
            if declared > self._limits.max_body_bytes:
                raise self._too_large()
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + self._limits.arrival_seconds)):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the request's body did not arrive in time") from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > self._limits.max_body_bytes:
                raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body is larger than {self._limits.max_body_bytes} bytes")


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value[:LENGTH_DIGITS])
    return 0
