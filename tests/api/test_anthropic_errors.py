"""Errors of Anthropic's routes have Anthropic's shape, whatever raises them, and those of other routes have OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from service.api.asking import Limits
from service.core import EncodedChat
from tests.support.echo_engine import LIMITS, Codepoints, EchoEngine, EchoServer, FailingEncoder

MESSAGES, COUNT, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"
USER = [{"role": "user", "content": "a"}]
BODY: dict[str, Any] = {"messages": USER, "max_tokens": 5}


def shaped(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    """The error of a response in Anthropic's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert body["error"]["type"] == kind and body["error"]["message"]
    return body["error"]


class FailingChats(FailingEncoder):
    """Fails at every chat."""

    def encode_chat(self, *args: Any, **more: Any) -> EncodedChat:
        raise ValueError("cannot encode")


RAISED: dict[str, tuple[Callable[[], EchoServer], Callable[[httpx.Client], httpx.Response], int, str]] = {
    "validation": (EchoServer, lambda http: http.post(MESSAGES, json={"messages": []}), 400, "invalid_request_error"),
    "count": (EchoServer, lambda http: http.post(COUNT, json={}), 400, "invalid_request_error"),
    "not JSON": (
        EchoServer,
        lambda http: http.post(MESSAGES, content=b"{", headers={"content-type": "application/json"}),
        400,
        "invalid_request_error",
    ),
    "media type": (EchoServer, lambda http: http.post(MESSAGES, content=b"{}"), 415, "invalid_request_error"),
    "method": (EchoServer, lambda http: http.get(MESSAGES), 405, "invalid_request_error"),
    "path": (EchoServer, lambda http: http.get(f"{MESSAGES}/batches"), 404, "not_found_error"),
    "body size": (
        EchoServer,
        lambda http: http.post(MESSAGES, json={**BODY, "system": "x" * LIMITS.max_body_bytes}),
        413,
        "request_too_large",
    ),
    "host": (
        EchoServer,
        lambda http: http.post(MESSAGES, json=BODY, headers={"host": "other.example"}),
        403,
        "permission_error",
    ),
    "origin": (
        EchoServer,
        lambda http: http.post(COUNT, json=BODY, headers={"origin": "https://other.example"}),
        403,
        "permission_error",
    ),
    "full queue": (
        lambda: EchoServer(engine=EchoEngine(full=True)),
        lambda http: http.post(MESSAGES, json=BODY),
        503,
        "overloaded_error",
    ),
    "rate": (
        lambda: EchoServer(rate_limit="1/minute"),
        lambda http: [http.post(MESSAGES, json=BODY) for _ in range(2)][1],
        429,
        "rate_limit_error",
    ),
    "failure": (
        lambda: EchoServer(encoder=FailingChats()),
        lambda http: http.post(MESSAGES, json=BODY),
        500,
        "api_error",
    ),
    "time": (
        lambda: EchoServer(engine=EchoEngine(pause=0.5), limits=replace(LIMITS, request_timeout=0.2)),
        lambda http: http.post(MESSAGES, json=BODY),
        504,
        "timeout_error",
    ),
}


@pytest.mark.parametrize("name", RAISED)
def test_every_error_has_the_shape(name: str) -> None:
    make, ask, status, kind = RAISED[name]
    with make().served() as address, httpx.Client(base_url=address, timeout=30) as http:
        shaped(ask(http), status, kind)


def test_an_error_amid_a_stream_has_the_shape() -> None:
    with EchoServer(engine=EchoEngine(break_after=1)).served() as address:
        body = {**BODY, "messages": [{"role": "user", "content": "abc"}], "stream": True}
        response = httpx.post(address + MESSAGES, json=body, headers={"x-request-id": "mine"})
    event, data = response.text.strip().split("\n\n")[-1].split("\n")
    assert event == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "the engine stopped", "param": None, "code": "unavailable"},
        "request_id": "mine",
    }


def test_answers_have_the_header_and_other_routes_their_own_shape(http: httpx.Client) -> None:
    for path in (MESSAGES, COUNT):
        answer = http.post(path, json=BODY)
        assert answer.status_code == 200 and answer.headers["request-id"] == answer.headers["x-request-id"]
    for path in (CHAT, "/v1/messages2", "/v1"):
        refused = http.post(path, json={})
        assert refused.json().keys() == {"error"} and "request-id" not in refused.headers


@pytest.mark.parametrize(
    ("limits", "said", "expected"),
    [
        (LIMITS, 4_998, "prompt is too long: 5000 tokens > 4000 maximum"),
        (LIMITS, 3_998, "prompt is too long: 4000 tokens > 3999 maximum"),
        # Not encoded: a token has four bytes at most, so that there are at least so many.
        (replace(LIMITS, max_prompt_bytes=16_000), 18_001, "prompt is too long: 4501 tokens > 4000 maximum"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_claude_code_reads_by_how_much_a_prompt_is_too_long(
    limits: Limits, said: int, expected: str, stream: bool
) -> None:
    body = {"messages": [{"role": "user", "content": "x" * said}], "max_tokens": 32_000, "stream": stream}
    with EchoServer(encoder=Codepoints(), limits=limits).served() as address:
        error = shaped(httpx.post(f"{address}{MESSAGES}?beta=true", json=body), 400, "invalid_request_error")
        assert error["message"] == expected
        openai = httpx.post(address + CHAT, json={"messages": body["messages"]}).json()["error"]
    assert openai["code"] == "context_length_exceeded" and openai["message"].startswith("messages is too long")
