"""Keywords of schemas that are not enforced are named in the response, and refused where the server is strict."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from service.core import Grammar, Reasoning
from tests.support.echo_engine import Codepoints, EchoServer, NamedGrammar

TURNS = [{"role": "user", "content": "abc"}]
SCHEMA = {"type": "array", "uniqueItems": True}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
IN_CHAT = "response_format.json_schema.schema"
ASKED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": TURNS, "response_format": FORMAT}, f"{IN_CHAT}.uniqueItems"),
    (
        "/v1/chat/completions",
        {"messages": TURNS, "response_format": FORMAT, "stream": True},
        f"{IN_CHAT}.uniqueItems",
    ),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": SCHEMA}}, "structured_outputs.json.uniqueItems"),
    (
        "/v1/responses",
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        "text.format.schema.uniqueItems",
    ),
    (
        "/v1/messages",
        {"messages": TURNS, "max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "output_config.format.schema.uniqueItems",
    ),
]


@pytest.mark.parametrize(("path", "body", "name"), ASKED)
def test_what_is_not_enforced_is_named(http: httpx.Client, path: str, body: dict[str, Any], name: str) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-redraft-ignored"] == name
    plain = {field: body[field] for field in ("messages", "prompt", "input", "max_tokens") if field in body}
    assert "x-redraft-ignored" not in http.post(path, json=plain).headers


def test_a_strict_server_refuses_what_it_does_not_enforce() -> None:
    with EchoServer(strict=True).served() as address:
        for path, body, name in ASKED:
            response = httpx.post(address + path, json=body)
            assert response.status_code == 400, response.text
            assert f"this server is strict and cannot enforce {name}" in response.text


class Endless(Codepoints):
    """An encoder whose grammars compile until `going` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.going = threading.Event()

    def constraint(self, grammar: Grammar, reasoning: Reasoning) -> NamedGrammar:
        self.going.wait(60)
        return super().constraint(grammar, reasoning)


def test_grammars_that_compile_hold_nobody_else_up() -> None:
    """More of them than the threads that all routes share."""
    server = EchoServer()
    server.encoder = encoder = Endless()
    count = 60
    with server.served() as address, ThreadPoolExecutor(count) as clients:
        path, body, _ = ASKED[0]
        asked = [clients.submit(httpx.post, address + path, json=body, timeout=60) for _ in range(count)]
        try:
            plain = httpx.post(address + path, json={"messages": TURNS}, timeout=20)
            assert plain.status_code == 200
            assert httpx.get(address + "/metrics", timeout=20).status_code == 200
            assert not any(each.done() for each in asked)
        finally:
            encoder.going.set()
        assert [each.result().status_code for each in asked] == [200] * count
