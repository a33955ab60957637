"""Requests that are large or many: long conversations, large bodies, bursts, and answers longer than the context."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

import service.api.strict
from service.core import ChatEnd, EncodedChat
from service.settings import load_settings
from tests.support.echo_engine import LIMITS, Codepoints, EchoServer
from tests.support.http_answers import assert_refused

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT, GENERATE = "/v1/messages", "/v1/messages/count_tokens", "/generate"
ROOM = replace(LIMITS, max_body_bytes=2**20, max_context=8_000, max_tokens=8_000)


@pytest.fixture(scope="module")
def server() -> EchoServer:
    return EchoServer(limits=ROOM)


@pytest.fixture(scope="module")
def http(server: EchoServer) -> Iterator[httpx.Client]:
    with server.served() as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


def turns(count: int, content: object = "x") -> list[dict[str, object]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": content} for i in range(count)]


def asking(path: str, entries: Sequence[object]) -> dict[str, object]:
    """A body with these turns."""
    if path == RESPONSES:
        return {"model": "echo", "input": entries, "max_output_tokens": 2}
    return {"model": "echo", "messages": entries, "max_tokens": 2}


# ------------------------------------------------------------------------------------------------------ conversations


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, COUNT, GENERATE])
def test_messages_are_as_many_as_the_context_holds(http: httpx.Client, path: str) -> None:
    for count in (1_025, 2_601):
        answer = http.post(path, json=asking(path, turns(count)))
        assert answer.status_code == 200, answer.text
    refused = http.post(path, json=asking(path, turns(8_001)))
    if path in (MESSAGES, COUNT):
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
        assert refused.json()["error"]["message"] == "prompt is too long: 8001 tokens > 8000 maximum"
        return
    assert_refused(refused, 400, "context_length_exceeded", "input" if path == RESPONSES else "messages")
    assert "8001 entries cannot fit in a context of 8000 tokens" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, COUNT])
def test_parts_of_a_message_are_as_many_as_the_context_holds(http: httpx.Client, path: str) -> None:
    kind = "input_text" if path == RESPONSES else "text"
    for count, status in ((3_000, 200), (8_001, 400)):
        parts = [{"type": kind, "text": "x"}] * count
        answer = http.post(path, json=asking(path, turns(1, parts)))
        assert answer.status_code == status, answer.text


@pytest.mark.parametrize("prompt", [[65] * 8_001, [[65], [65] * 8_001]])
def test_token_ids_are_as_many_as_the_context_holds(http: httpx.Client, prompt: object) -> None:
    assert_refused(http.post(COMPLETIONS, json={"prompt": prompt}), 400, "context_length_exceeded", "prompt")


# -------------------------------------------------------------------------------------------------------- large bodies


def test_bodies_may_have_32_mebibytes() -> None:
    assert load_settings().server.max_body_bytes == 32 * 2**20


@pytest.mark.parametrize("escaped", [False, True])
def test_a_large_body_holds_up_nobody(server: EchoServer, escaped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text has twice the bytes where a client escapes it. It is parsed on a thread."""
    parsing, go = threading.Event(), threading.Event()
    parse = service.api.strict.parse_json

    def held(raw: bytes) -> object:
        if len(raw) > 100_000:
            parsing.set()
            assert go.wait(20)
        return parse(raw)

    monkeypatch.setattr(service.api.strict, "parse_json", held)
    text = "".join(chr(0x4E00 + i % 5_000) for i in range(60_000))
    asked = json.dumps({"model": "echo", "messages": turns(1, text)}, ensure_ascii=escaped).encode()
    body: dict[str, Any] = {"content": asked, "headers": {"content-type": "application/json"}}
    big = EchoServer(limits=replace(ROOM, max_context=100_000))
    with big.served() as address, ThreadPoolExecutor(1) as other:
        counted = other.submit(httpx.post, f"{address}{COUNT}", **body)
        assert parsing.wait(20)
        assert httpx.get(f"{address}/health").status_code == 200
        assert httpx.post(f"{address}{GENERATE}", json={"prompt": "ab"}).json()["text"] == "ab"
        go.set()
        assert counted.result(20).json() == {"input_tokens": 60_002}


# -------------------------------------------------------------------------------------------------------------- bursts


class HeldEncoder(Codepoints):
    """Encodes no chat until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        options: Mapping[str, object] | None = None,
        end: ChatEnd = ChatEnd.NEW_TURN,
    ) -> EncodedChat:
        assert self.go.wait(30)
        return super().encode_chat(messages, tools, options, end)


@pytest.mark.parametrize("path", [COUNT, CHAT])
def test_a_burst_of_prompts_takes_no_thread_from_others(path: str) -> None:
    """AnyIO has 40 threads for everything; `/metrics` used to wait behind 120 prompts. Counting takes none from answering."""
    encoder = HeldEncoder()
    server = EchoServer(encoder=encoder)
    with server.served() as address, ThreadPoolExecutor(60) as clients:
        asked = [
            clients.submit(httpx.post, f"{address}{path}", json=asking(path, turns(1)), timeout=60) for _ in range(60)
        ]
        try:
            for other in ("/metrics", "/health", "/health/ready", "/v1/models"):
                assert httpx.get(f"{address}{other}", timeout=10).status_code == 200
            if path == COUNT:
                completed = httpx.post(f"{address}{COMPLETIONS}", json={"prompt": "ab"}, timeout=10)
                assert completed.json()["choices"][0]["text"] == "ab"
            assert not any(each.done() for each in asked)
        finally:
            encoder.go.set()
        assert {each.result(60).status_code for each in asked} == {200}


# ---------------------------------------------------------------------------------------------------------- max_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("most", [8_001, 2**31, 10**12])
@pytest.mark.parametrize(
    ("path", "field", "asked"),
    [
        (CHAT, "max_tokens", {"messages": turns(1, "abc")}),
        (CHAT, "max_completion_tokens", {"messages": turns(1, "abc")}),
        (COMPLETIONS, "max_tokens", {"prompt": "abc"}),
        (COMPLETIONS, "max_tokens", {"prompt": ["abc", "abc"]}),
        (RESPONSES, "max_output_tokens", {"input": "abc"}),
        (MESSAGES, "max_tokens", {"messages": turns(1, "abc")}),
        (GENERATE, "max_tokens", {"prompt": "abc"}),
    ],
)
def test_max_tokens_beyond_the_room_is_lowered_and_named(
    server: EchoServer, http: httpx.Client, path: str, field: str, asked: dict[str, object], most: int, stream: bool
) -> None:
    answer = http.post(path, json={**asked, field: most, "stream": stream, "seen": "never"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-redraft-ignored"] == f"seen, {field}"
    prompt = server.engine.tickets[-1].prompt
    assert prompt.sampling.max_tokens == ROOM.max_context - len(prompt.tokens)
    room = prompt.sampling.max_tokens
    assert "x-redraft-ignored" not in http.post(path, json={**asked, field: room, "stream": stream}).headers


def test_a_strict_server_refuses_max_tokens_beyond_the_room() -> None:
    with EchoServer(limits=ROOM, strict=True).served() as address, httpx.Client(base_url=address) as http:
        for most, code in ((8_001, "bad_request"), (7_999, "context_length_exceeded")):
            refused = http.post(CHAT, json={"model": "echo", "messages": turns(1, "abc"), "max_tokens": most})
            assert_refused(refused, 400, code, "max_tokens")
        # Anthropic's clients have to send one, and do not know the context.
        answer = http.post(MESSAGES, json={"model": "echo", "messages": turns(1, "abc"), "max_tokens": 32_000})
        assert (answer.status_code, answer.headers["x-redraft-ignored"]) == (200, "max_tokens")
