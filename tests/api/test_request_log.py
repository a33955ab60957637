"""Each request has one line in the log, at its end, and no line holds a text."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any, Literal
from urllib.parse import quote, urlsplit

import httpx
import pytest

from service.core import Failed, RequestStatus, Unavailable
from tests.support.echo_engine import (
    LIMITS,
    OWNED,
    EchoEngine,
    EchoServer,
    EchoTicket,
    FailingEncoder,
)
from tests.support.log_lines import logged
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
CANARY = "xyzzy-canary"
FIGURES = {
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "drafted_tokens",
    "accepted_tokens",
    "adapters",
    "queue_seconds",
    "prefill_seconds",
    "decode_seconds",
}


def test_a_request_s_line_has_the_figures_of_its_answer() -> None:
    asked = {"messages": [{"role": "user", "content": "abcd"}], "n": 2}
    with logged("json") as lines, EchoServer().served() as address, httpx.Client(base_url=address) as http:
        answers = [
            http.post("/generate", json={"prompt": "abcd"}, headers={"x-request-id": "r-1"}),
            http.post(CHAT, json=asked),
        ]
        streamed = http.post("/generate", json={"prompt": "abcd", "max_tokens": 3, "stream": True})
        found = lines.requests(3)
    ends = [answer.json() for answer in answers]
    ends.append(next(json.loads(line[6:]) for line in streamed.text.splitlines() if "finish_reason" in line))
    for line, end in zip(found, ends, strict=True):
        spent = end["timings"]
        assert line["prompt_tokens"] == end["usage"]["prompt_tokens"] == spent["prompt_n"] + spent["cache_n"]
        assert line["cached_tokens"] == spent["cache_n"] > 0
        assert line["completion_tokens"] == spent["predicted_n"] > 0
        assert (line["drafted_tokens"], line["accepted_tokens"]) == (spent["draft_n"], spent["draft_n_accepted"])
        assert line["adapters"] == spent["adapters"]
        assert 0 < line["total_seconds"] < 20
    assert [line["request_id"] for line in found[:2]] == ["r-1", answers[1].headers["x-request-id"]]
    assert [line["route"] for line in found] == ["/generate", CHAT, "/generate"]
    assert [line["finish_reason"] for line in found] == ["stop", "stop", "length"]
    assert [line["completion_tokens"] for line in found] == [4, 8, 3]
    assert all(line["method"] == "POST" and line["status"] == 200 and "error" not in line for line in found)


def test_times_are_split_as_the_metrics_split_them() -> None:
    server = EchoServer(engine=EchoEngine(pause=0.05))
    with logged("json") as lines, server.served() as address:
        spent = httpx.post(f"{address}/generate", json={"prompt": "abcd"}).json()["timings"]
        (line,) = lines.requests(1)
    for name in ("queue", "prefill", "decode"):
        assert line[f"{name}_seconds"] > 0
        assert line[f"{name}_seconds"] == pytest.approx(
            server.value(f"redraft:request_{name}_time_seconds_sum"), abs=1e-4
        )
    engine = (spent["prompt_ms"] + spent["predicted_ms"]) / 1000
    assert sum(line[f"{name}_seconds"] for name in ("queue", "prefill", "decode")) == pytest.approx(engine, abs=2e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_the_line_of_a_client_that_left_has_what_the_engine_did(stream: bool) -> None:
    server = EchoServer(engine=EchoEngine(pause=0.02))
    with logged("json") as lines, server.served() as address:
        connection = HTTPConnection(urlsplit(address).netloc, timeout=60)
        body = json.dumps({"prompt": "x" * 2_000, "stream": stream, "max_tokens": 1_000})
        connection.request("POST", "/generate", body, {"content-type": "application/json"})
        until(lambda: server.value("redraft:time_to_first_token_seconds_count") == 1)
        connection.close()
        (line,) = lines.requests(1)
    assert (line["status"], line["finish_reason"]) == (200 if stream else 499, "cancelled")
    assert 0 < line["completion_tokens"] < 1_000 and set(line) >= FIGURES
    assert server.value('redraft:request_success_total{finished_reason="abort"}') == 1


class NeverStarting(EchoEngine):
    """Requests wait in the queue until they are cancelled."""

    def _generate(self, ticket: EchoTicket) -> None:
        assert ticket.cancelled.wait(20)
        self._send(ticket, Failed(Unavailable("cancelled before it started")))


def test_a_request_given_up_in_the_queue_is_no_failure() -> None:
    server = EchoServer(engine=NeverStarting())
    with logged("json") as lines, server.served() as address:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}/generate", json={"prompt": "ab"}, timeout=0.3)
        (line,) = lines.requests(1)
    assert (line["status"], line["finish_reason"]) == (499, "cancelled")
    assert "error" not in line and not FIGURES & set(line)
    assert server.value('redraft:request_success_total{finished_reason="abort"}') == 1
    assert server.value('redraft:requests_failed_total{code="unavailable"}') == 0
    assert server.value("redraft:request_queue_time_seconds_count") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_the_line_of_a_request_out_of_time_names_the_error(stream: bool) -> None:
    server = EchoServer(engine=EchoEngine(pause=30), limits=replace(LIMITS, request_timeout=0.4))
    with logged("json") as lines, server.served() as address:
        httpx.post(f"{address}/generate", json={"prompt": "x" * 100, "stream": stream})
        (line,) = lines.requests(1)
    assert (line["status"], line["error"]) == (200 if stream else 504, "timeout")
    assert "finish_reason" not in line and line["completion_tokens"] == 0
    assert server.value('redraft:requests_failed_total{code="timeout"}') == 1
    assert server.value("redraft:e2e_request_latency_seconds_count") == 0


def test_the_line_of_an_answer_that_ended_in_time_has_its_tokens() -> None:
    server = EchoServer(engine=EchoEngine(pause=0.05), limits=replace(LIMITS, request_timeout=0.4))
    with logged("json") as lines, server.served() as address:
        httpx.post(f"{address}/generate", json={"prompt": "x" * 100})
        (line,) = lines.requests(1)
    assert (line["status"], line["finish_reason"]) == (200, "length") and "error" not in line
    assert 0 < line["completion_tokens"] < 100


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_of_which_one_fails_are_one_line(stream: bool) -> None:
    asked = {"messages": [{"role": "user", "content": "abcdef"}], "n": 2, "stream": stream}
    server = EchoServer(engine=EchoEngine(break_after=2))
    with logged("json") as lines, server.served() as address:
        httpx.post(address + CHAT, json=asked)
        (line,) = lines.requests(1)
    assert (line["status"], line["error"]) == (200 if stream else 503, "unavailable")
    assert "stop" not in line.get("finish_reason", "")


def test_requests_that_the_engine_never_had_have_a_line_too() -> None:
    with logged("json") as lines, EchoServer().served() as address, httpx.Client(base_url=address) as http:
        http.post("/generate", json={"prompt": 5})
        http.post("/generate", json={"prompt": "a" * 5_000})
        http.get("/train/17")
        http.get(f"/nothing/{quote(CANARY)}?text={CANARY}")
        http.put("/generate")
        http.get("/v1/models", headers={"host": "evil.example"})
        http.get("/v1/models")
        found = lines.requests(7)
        assert CANARY not in "".join(json.dumps(line) for line in found)
    assert [(line["status"], line["route"], line.get("error")) for line in found] == [
        (400, "/generate", "bad_request"),
        (400, "/generate", "context_length_exceeded"),
        (404, "/train/{id}", "not_found"),
        (404, None, "not_found"),
        (405, "/generate", "method_not_allowed"),
        (403, None, "forbidden"),
        (200, "/v1/models", None),
    ]
    assert not any(FIGURES & set(line) for line in found)


def test_probes_and_scrapers_are_logged_at_level_debug() -> None:
    with EchoServer().served() as address, httpx.Client(base_url=address) as http:
        for level, count in ((logging.INFO, 1), (logging.DEBUG, 3)):
            with logged("json", level) as lines:
                for path in ("/health/live", "/metrics", "/v1/models"):
                    http.get(path)
                assert {line["route"] for line in lines.requests(count)} >= {"/v1/models"}


def chat(content: str, **more: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **more}


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.promise(30)
def test_no_line_holds_a_text_or_a_name_that_a_client_chose(form: Literal["text", "json"]) -> None:
    tool = {"type": "function", "function": {"name": CANARY, "description": CANARY, "parameters": {"title": CANARY}}}
    odd = {"x-request-id": f"a {CANARY}", "user-agent": CANARY, "cookie": CANARY, "authorization": CANARY}
    with logged(form, logging.DEBUG) as lines:
        for server in (EchoServer(), EchoServer(encoder=FailingEncoder()), EchoServer(engine=EchoEngine(full=True))):
            with server.served() as address, httpx.Client(base_url=address, headers=odd) as http:
                http.post(
                    "/generate", json={"prompt": CANARY, "stop": ["!" + CANARY], "domain": CANARY, "client": CANARY}
                )
                http.post("/generate", json={"prompt": CANARY, "stream": True})
                http.post("/generate", json={"prompt": CANARY, CANARY: CANARY})
                http.post(CHAT, json=chat(CANARY, tools=[tool], user=CANARY, metadata={"a": CANARY}))
                http.post(CHAT, json=chat(CANARY, model=CANARY))
                http.post("/v1/messages", json=chat(CANARY, max_tokens=9, system=CANARY, model="echo"))
                http.post("/v1/completions", content=CANARY, headers={"content-type": "application/json"})
                http.get(f"/{CANARY}?{CANARY}={CANARY}")
        until(lambda: lines.text.count("total_seconds") == 24)
    assert "ValueError" in lines.text, "the encoder's error was logged"
    assert CANARY not in lines.text
    if form == "json":
        assert all(line["event"] and line["timestamp"] and line["level"] for line in lines.objects)


class FailingEngine(EchoEngine):
    def cancel(self, request_id: str) -> RequestStatus:
        raise ValueError(CANARY)


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_client_can_write_a_line_of_its_own(form: Literal["text", "json"]) -> None:
    server = EchoServer(engine=FailingEngine())
    with logged(form) as lines, server.served() as address:
        odd = OWNED | {"x-request-id": "an id"}
        assert httpx.delete(f"{address}/requests/%0A17", headers=odd).status_code == 500
        until(lambda: lines.text.count("/requests/{id}") == 1)
    assert lines.text.count("failed: ValueError") == 1
    (error,) = (line for line in lines.text.splitlines() if "DELETE /requests/" in line)
    assert "\\n17 failed: ValueError" in error
    assert "an id" not in lines.text and CANARY not in lines.text


def test_what_is_logged_for_a_request_carries_its_id() -> None:
    server = EchoServer(encoder=FailingEncoder())
    with logged("json") as lines, server.served() as address:
        httpx.post(f"{address}/generate", json={"prompt": "a"}, headers={"x-request-id": "r-9"})
        (line,) = lines.requests(1)
        (error,) = (each for each in lines.objects if "ValueError" in each["event"])
    assert (line["status"], line["error"]) == (500, "internal_error")
    assert line["request_id"] == error["request_id"] == "r-9"
    assert all("request_id" not in each for each in lines.objects if each["logger"] == "uvicorn.error")
