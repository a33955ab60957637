"""Error bodies: OpenAI's shape, and Anthropic's on the routes that Anthropic's clients call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

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
"""`type` by status, in OpenAI's and Anthropic's terms. Others: invalid_request_error below 500, api_error from 500."""

ANTHROPIC = "/v1/messages"
"""Anthropic's clients call this path and paths below it."""


class ErrorDetail(BaseModel):
    """An error. `message` is one sentence, `type` its kind, `param` the wrong field of the request, `code` is stable."""

    message: str
    type: str
    param: str | None = None
    code: str


class ErrorAnswer(BaseModel):
    """The body of every error, except on Anthropic's routes."""

    error: ErrorDetail


class CodeDetails(BaseModel):
    """What went wrong, by Anthropic's name for it."""

    error_code: str


class AnthropicErrorDetail(ErrorDetail):
    """An error. details: only if Anthropic's clients act on the code."""

    details: CodeDetails | None = Field(default=None, exclude_if=lambda value: value is None)


class AnthropicErrorAnswer(BaseModel):
    """The body of every error on Anthropic's routes. request_id: also in the header `request-id`."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
    request_id: str | None = None


def is_anthropic(path: str) -> bool:
    """Whether requests to this path come from Anthropic's clients."""
    return path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/")


def error_detail(status: int, message: str, code: str, param: str | None = None) -> ErrorDetail:
    """An error of this status."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return ErrorDetail(message=message, type=kind, param=param, code=code)


def anthropic_error(
    detail: ErrorDetail, request_id: str | None, *, message: str | None = None, error_code: str | None = None
) -> dict[str, Any]:
    """An error in Anthropic's shape. message: in Anthropic's words, where its clients parse them. error_code: see
    AnthropicErrorDetail."""
    error = AnthropicErrorDetail(
        **{**detail.model_dump(), "message": message or detail.message},
        details=None if error_code is None else CodeDetails(error_code=error_code),
    )
    return AnthropicErrorAnswer(error=error, request_id=request_id).model_dump()
