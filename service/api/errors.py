"""One shape for everything that goes wrong, OpenAI's: {"error": {"message", "type", "param", "code"}}.

Messages are written here or by the rooms; none quotes what a client sent, beyond the name of the field that is wrong.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.printing import printable
from service.api.problems import invalid
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
"""The routes that generate, whose refusals `redraft:requests_refused` counts."""


class TimedOut(RedraftError):
    """No token came within the time that the server allows."""

    code = "timeout"


class Unauthorized(RedraftError):
    """The request carries no key that opens anything here."""

    code = "invalid_api_key"
    field = "Authorization"


class RateLimited(RedraftError):
    """This key has sent as many requests as it may; try again after `retry_after` seconds."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Forbidden(RedraftError):
    """The request is not addressed to this server, comes from another site's page, or its key does not open the route; `field`
    is the header that says so."""

    code = "forbidden"

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class ContextExceeded(BadRequest):
    """The prompt, or the answer that is asked for, is longer than the context."""

    code = "context_length_exceeded"


class ModelNotFound(NotFound):
    """The model that a request names is not served here."""

    code = "model_not_found"
    field = "model"


class ToolNotFound(NotFound):
    """The tool that is to be called is not among the request's tools."""

    code = "tool_not_found"
    field = "tool_choice"


STATUS: Mapping[type[RedraftError], int] = {
    BadRequest: 400,
    ContextExceeded: 400,
    Unauthorized: 401,
    Forbidden: 403,
    NotFound: 404,
    ModelNotFound: 404,
    ToolNotFound: 404,
    Conflict: 409,
    AdapterRefused: 409,
    IllegalMove: 409,
    RateLimited: 429,
    Overloaded: 503,
    Unavailable: 503,
    NonFiniteLogits: 500,
    TimedOut: 504,
}
"""Status by class. Classes not listed are the server's own trouble: 500, with a message that does not go into it."""

TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""`type` by status, in the words of OpenAI and Anthropic. Others: invalid_request_error below 500, api_error from there on."""

HTTP_CODES: Mapping[int, str] = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "body_too_large",
    415: "unsupported_media_type",
}


class ErrorDetail(BaseModel):
    """An error. `message` is one sentence, `type` its kind, `param` the name of what is wrong in the request, `code` stable."""

    message: str
    type: str
    param: str | None = None
    code: str


class ErrorAnswer(BaseModel):
    """The body of every error."""

    error: ErrorDetail


def status_of(error: RedraftError) -> int:
    """The HTTP status of an error."""
    return STATUS.get(type(error), 500)


def describe(error: RedraftError) -> ErrorAnswer:
    """The error as a client may see it."""
    message = str(error) if type(error) in STATUS else "the server could not do this; its log says why"
    return _described(status_of(error), message, error.code, error.field)


def _described(status: int, message: str, code: str, param: str | None = None) -> ErrorAnswer:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return ErrorAnswer(error=ErrorDetail(message=message, type=kind, param=param, code=code))


def answer(error: RedraftError) -> JSONResponse:
    """The error as a response with its status, and Retry-After where trying again helps."""
    note_error(error.code)
    status = status_of(error)
    if status == 500:
        log.error("answered %s: %s", error.code, type(error).__name__)
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    if isinstance(error, Overloaded | Unavailable | RateLimited) and error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return JSONResponse(describe(error).model_dump(), status, headers)


def install(app: FastAPI, metrics: Metrics, methods: Callable[[str], Sequence[str]] = lambda path: ()) -> None:
    """Bring everything raised inside the application into the one shape, and count refusals of routes that generate. methods:
    those that routes have for a path; without, `Allow` names those of the first route alone."""

    def refuse(request: Request, response: JSONResponse, code: str) -> JSONResponse:
        if request.url.path in GENERATING and request.method == "POST":
            metrics.request_refused(code)
        return response

    def on_own(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RedraftError)
        return refuse(request, answer(error), error.code)

    def on_invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return on_own(request, invalid(error))

    def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = HTTP_CODES.get(error.status_code, "bad_request" if error.status_code < 500 else "internal_error")
        note_error(code)
        described = _described(error.status_code, error.detail, code)
        headers = dict(error.headers or {})
        if error.status_code == 405 and (allowed := methods(request.url.path)):
            headers["Allow"] = ", ".join(allowed)
        return refuse(request, JSONResponse(described.model_dump(), error.status_code, headers), code)

    app.add_exception_handler(RedraftError, on_own)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)


class ErrorBoundary:
    """Outermost ASGI middleware: an unexpected exception becomes a 500 in the one shape.

    Its class and where it came from are logged, its message is not: libraries quote their input in messages, and that
    may be a prompt.
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
            await answer(RedraftError())(scope, receive, send)
