"""How long requests may take: a first token, the next one, whole answers, and bodies on their way."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest

from service.core import Delta, Event
from tests.support.echo_engine import LIMITS, EchoEngine, EchoServer, EchoTicket
from tests.support.http_answers import assert_refused, events


@pytest.mark.promise(26)
def test_a_request_without_a_token_is_out_of_time_in_either_mode() -> None:
    server = EchoServer(engine=EchoEngine(pause=30), limits=replace(LIMITS, request_timeout=0.4, keepalive_seconds=0.1))
    with server.served() as address:
        response = httpx.post(f"{address}/generate", json={"prompt": "x" * 100})
        assert_refused(response, 504, "timeout", None)
        streamed = events(httpx.post(f"{address}/generate", json={"prompt": "x" * 100, "stream": True}).text)
        assert streamed[-1][0] == "error"
        assert json.loads(streamed[-1][1])["error"]["code"] == "timeout"
        assert len(streamed) > 2
    assert all(ticket.cancelled.is_set() for ticket in server.engine.tickets)
    assert server.value('redraft:requests_failed_total{code="timeout"}') == 2


CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "x" * 100}], "model": "echo"}


@pytest.mark.promise(26)
@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/generate", {"prompt": "x" * 100, "chat_template": False}, ("finish_reason",)),
        ("/v1/completions", {"prompt": "x" * 100}, ("choices", 0, "finish_reason")),
        ("/v1/chat/completions", CHAT, ("choices", 0, "finish_reason")),
        ("/v1/chat/completions", CHAT | {"n": 2}, ("choices", 1, "finish_reason")),
        ("/v1/chat/completions", CHAT | {"parallel_tool_calls": False}, ("choices", 0, "finish_reason")),
        ("/v1/responses", {"input": "x" * 100}, ("incomplete_details", "reason")),
        ("/v1/messages", CHAT | {"max_tokens": 900}, ("stop_reason",)),
    ],
)
def test_a_long_answer_ends_in_time_with_what_there_is(
    path: str, body: dict[str, object], reason: tuple[str | int, ...]
) -> None:
    server = EchoServer(engine=EchoEngine(pause=0.05), limits=replace(LIMITS, request_timeout=0.4))
    with server.served() as address:
        answer = httpx.post(f"{address}{path}", json=body)
    assert answer.status_code == 200, answer.text
    said: Any = answer.json()
    for name in reason:
        said = said[name]
    assert said in {"length", "max_tokens", "max_output_tokens"}
    assert "xxx" in answer.text and "x" * 100 not in answer.text
    assert all(ticket.cancelled.is_set() for ticket in server.engine.tickets)
    assert server.value('redraft:request_success_total{finished_reason="length"}') == len(server.engine.tickets)
    assert server.value('redraft:requests_failed_total{code="timeout"}') == 0


class Halting(EchoEngine):
    """Makes three tokens, then waits until the request is cancelled; with `dead`, for longer."""

    def _send(self, ticket: EchoTicket, event: Event) -> None:
        super()._send(ticket, event)
        if ticket.sent == 3 and isinstance(event, Delta):
            ticket.cancelled.wait(20)


def test_a_stream_may_take_as_long_as_its_tokens_come() -> None:
    server = EchoServer(engine=EchoEngine(pause=0.05), limits=replace(LIMITS, request_timeout=0.4))
    with server.served() as address:
        asked = {"prompt": "x" * 20, "stream": True, "chat_template": False}
        streamed = events(httpx.post(f"{address}/generate", json=asked).text)
    assert [json.loads(data).get("text") for kind, data in streamed[:-2] if kind == "message"] == ["x"] * 20
    assert json.loads(streamed[-2][1])["finish_reason"] == "stop"


def test_a_stream_that_falls_silent_ends_with_what_there_is() -> None:
    server = EchoServer(engine=Halting(), limits=replace(LIMITS, request_timeout=0.4, keepalive_seconds=0.1))
    with server.served() as address:
        asked = {"prompt": "x" * 20, "stream": True, "chat_template": False}
        streamed = events(httpx.post(f"{address}/generate", json=asked).text)
    kinds = [kind for kind, _ in streamed]
    assert kinds.count(":") >= 2 and kinds.count("message") == 5 and "error" not in kinds
    last = json.loads(streamed[-2][1])
    assert (last["finish_reason"], last["usage"]["completion_tokens"]) == ("length", 3)


def test_an_engine_that_does_not_end_an_answer_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.api.exchange.ENDING_SECONDS", 0.2)

    class Deaf(Halting):
        def _send(self, ticket: EchoTicket, event: Event) -> None:
            super()._send(ticket, event)
            if ticket.sent == 3:
                time.sleep(1)

    server = EchoServer(engine=Deaf(), limits=replace(LIMITS, request_timeout=0.3))
    with server.served() as address:
        assert_refused(httpx.post(f"{address}/generate", json={"prompt": "x" * 20}), 504, "timeout", None)
