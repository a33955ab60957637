"""Special tokens are left out of every route's text, unless a request says otherwise."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from service.core import NOTHING_HIDDEN
from tests.support.echo_engine import EchoServer

TURNS = [{"role": "user", "content": "abc"}]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CHAT = "/v1/chat/completions", {"messages": TURNS}
COMPLETIONS = "/v1/completions", {"prompt": "abc"}
GENERATE = "/generate", {"prompt": "abc"}


@pytest.mark.parametrize(
    ("route", "more", "expected"),
    [
        (CHAT, {}, (True, False, ())),
        (CHAT, {"stop": "x"}, (True, False, ("x",))),
        (CHAT, {"tools": [TOOL]}, (True, True, ())),
        (CHAT, {"tools": [TOOL], "tool_choice": "none"}, (True, False, ())),
        (COMPLETIONS, {"stop": ["x", "y"]}, (False, False, ("x", "y"))),
        (GENERATE, {}, (False, False, ())),
        (GENERATE, {"chat_template": False}, (False, False, ())),
        (("/v1/responses", {"input": "abc"}), {}, (True, False, ())),
        (("/v1/messages", {"messages": TURNS, "max_tokens": 5}), {"stop_sequences": ["x"]}, (True, False, ("x",))),
    ],
)
def test_special_tokens_are_hidden(
    server: EchoServer,
    http: httpx.Client,
    route: tuple[str, dict[str, Any]],
    more: dict[str, Any],
    expected: tuple[bool, bool, tuple[str, ...]],
) -> None:
    path, body = route
    assert http.post(path, json=body | more).status_code == 200
    assert server.encoder.hidden[-1] == expected
    assert server.engine.tickets[-1].prompt.hidden.ids == {server.encoder.MARK}


@pytest.mark.parametrize(("path", "body"), [CHAT, COMPLETIONS, GENERATE])
def test_special_tokens_are_shown_where_that_is_asked(
    server: EchoServer, http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    assert http.post(path, json=body | {"skip_special_tokens": False}).status_code == 200
    assert server.engine.tickets[-1].prompt.hidden == NOTHING_HIDDEN
    for value in (True, None):
        assert http.post(path, json=body | {"skip_special_tokens": value}).status_code == 200
        assert server.engine.tickets[-1].prompt.hidden.ids, value
