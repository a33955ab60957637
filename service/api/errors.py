"""All errors with their statuses, and how they are answered (bodies: error_shapes).

Messages are written here or by the packages that raise them. None quotes what a client sent, except the name of the
wrong field.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.error_shapes import ErrorAnswer, ErrorDetail, anthropic_error, error_detail, is_anthropic
from service.api.printing import printable
from service.api.problems import invalid
from service.api.request_id import id_of
from service.api.request_log import note_error
from service.core import (
    AdapterRefused,
    BadRequest,
    Conflict,
    IllegalMove,
    NonFiniteLogits,
    NotFound,
    Overloaded,
    RedraftError,
    Unavailable,
    panics_as_errors,
)
from service.logs import FIELDS
from service.metrics import Metrics

log = logging.getLogger(__name__)

GENERATING = frozenset({"/generate", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""The routes that generate; `redraft:requests_refused` counts their refusals."""


class TimedOut(RedraftError):
    """No token was generated within the time that the server allows."""

    code = "timeout"


class Unauthorized(RedraftError):
    """The request has no valid key."""

    code = "invalid_api_key"
    field = "Authorization"


class RateLimited(RedraftError):
    """This key has reached its request rate; try again after `retry_after` seconds."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Forbidden(RedraftError):
    """The request is addressed to another server, comes from another site's page, or its key does not open the route.
    `field` is the header that says so."""

    code = "forbidden"

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class ContextExceeded(BadRequest):
    """The prompt or the requested answer exceeds the context. prompt_tokens: minimum length of a prompt that is too
    long by itself. limit: maximum tokens of a prompt."""

    code = "context_length_exceeded"

    def __init__(
        self, message: str, field: str | None = None, *, prompt_tokens: int | None = None, limit: int = 0
    ) -> None:
        super().__init__(message, field)
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class ModelNotFound(NotFound):
    """The requested model is not served here."""

    code = "model_not_found"
    field = "model"


class ToolNotFound(NotFound):
    """The tool to be called is not among the request's tools."""

    code = "tool_not_found"
    field = "tool_choice"


class ResponseNotFound(NotFound):
    """The response that a request continues is not stored here."""

    code = "previous_response_not_found"
    field = "previous_response_id"


class ItemNotFound(NotFound):
    """The item that a request refers to is not stored here."""

    code = "item_not_found"
    field = "input"


class ThreadNotFound(NotFound):
    """The message whose thread a request continues is not stored here. Anthropic's clients then send the whole conversation."""

    code = "thread_not_found"
    field = "thread"


STATUS: Mapping[type[RedraftError], int] = {
    BadRequest: 400,
    ContextExceeded: 400,
    Unauthorized: 401,
    Forbidden: 403,
    NotFound: 404,
    ModelNotFound: 404,
    ToolNotFound: 404,
    ResponseNotFound: 404,
    ItemNotFound: 404,
    ThreadNotFound: 404,
    Conflict: 409,
    AdapterRefused: 409,
    IllegalMove: 409,
    RateLimited: 429,
    Overloaded: 503,
    Unavailable: 503,
    NonFiniteLogits: 500,
    TimedOut: 504,
}
"""Status by class. Other classes are internal errors: 500, with a generic message."""

HTTP_CODES: Mapping[int, str] = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "body_too_large",
    415: "unsupported_media_type",
}


def status_of(error: RedraftError) -> int:
    """The HTTP status of an error."""
    return STATUS.get(type(error), 500)


def describe(error: RedraftError) -> ErrorAnswer:
    """The error in the form shown to clients."""
    return ErrorAnswer(error=_detail(error))


def describe_to_anthropic(error: RedraftError, request_id: str) -> dict[str, Any]:
    """The same for Anthropic's clients. If a prompt is too long, Claude Code reads both numbers from the message and
    compacts the conversation; if a thread is not found, the SDKs send the whole conversation."""
    message = None
    if isinstance(error, ContextExceeded) and error.prompt_tokens is not None:
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
    error_code = error.code if isinstance(error, ThreadNotFound) else None
    return anthropic_error(_detail(error), request_id, message=message, error_code=error_code)


def _detail(error: RedraftError) -> ErrorDetail:
    message = str(error) if type(error) in STATUS else "the server could not do this; its log says why"
    return error_detail(status_of(error), message, error.code, error.field)


def answer(error: RedraftError, scope: Scope) -> JSONResponse:
    """The error as a response in the shape of the request's route, with Retry-After if a retry may help."""
    note_error(error.code)
    status = status_of(error)
    if status == 500:
        log.error("answered %s: %s", error.code, type(error).__name__)
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    if isinstance(error, Overloaded | Unavailable | RateLimited) and error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if is_anthropic(scope["path"]):
        return JSONResponse(describe_to_anthropic(error, id_of(scope)), status, headers)
    return JSONResponse(describe(error).model_dump(), status, headers)


def install(app: FastAPI, metrics: Metrics, methods: Callable[[str], Sequence[str]] = lambda path: ()) -> None:
    """Converts everything raised inside the application into its route's error shape, and counts refusals on routes
    that generate. methods: those that routes have for a path; without it, `Allow` only names those of the first
    route."""

    def refuse(request: Request, response: JSONResponse, code: str) -> JSONResponse:
        if request.url.path in GENERATING and request.method == "POST":
            metrics.request_refused(code)
        return response

    def on_own(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RedraftError)
        return refuse(request, answer(error, request.scope), error.code)

    def on_invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return on_own(request, invalid(error))

    def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = HTTP_CODES.get(error.status_code, "bad_request" if error.status_code < 500 else "internal_error")
        note_error(code)
        detail = error_detail(error.status_code, error.detail, code)
        body = ErrorAnswer(error=detail).model_dump()
        if is_anthropic(request.url.path):
            body = anthropic_error(detail, id_of(request.scope))
        headers = dict(error.headers or {})
        if error.status_code == 405 and (allowed := methods(request.url.path)):
            headers["Allow"] = ", ".join(allowed)
        return refuse(request, JSONResponse(body, error.status_code, headers), code)

    app.add_exception_handler(RedraftError, on_own)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)


class ErrorBoundary:
    """Outermost ASGI middleware: an unexpected exception becomes a 500 in its route's shape.

    Its class and location are logged, its message is not: libraries quote their input in messages, and that may be a prompt.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            with panics_as_errors():
                await self._app(scope, receive, watched)
        except ClientDisconnect:
            return
        except Exception as error:
            if scope["type"] != "http":
                raise
            places = "".join(traceback.format_tb(error.__traceback__))
            fields = {FIELDS: {"exception": places}}
            log.error("%s %s failed: %s", scope["method"], printable(scope["path"]), type(error).__name__, extra=fields)
            note_error(RedraftError.code)
            if started:
                return
            if scope["path"] in GENERATING:
                self._metrics.request_refused(RedraftError.code)
            await answer(RedraftError(), scope)(scope, receive, send)
