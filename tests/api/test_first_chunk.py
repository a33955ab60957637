"""The first chunk of a streamed answer: it comes with the first token, and comments keep the stream alive until then."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.support.echo_engine import LIMITS, EchoEngine, EchoServer
from tests.support.http_answers import events

QUIET = replace(LIMITS, keepalive_seconds=0.05)
CHAT, COMPLETIONS, MESSAGES, GENERATE = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/generate"


def streamed(path: str, pause: float, text: str = "ab", **more: Any) -> list[tuple[str, Any]]:
    """Kinds and JSON of the events of an answer whose engine takes so many seconds for a token."""
    asked: dict[str, Any] = (
        {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    )
    asked |= {"stream": True, "max_tokens": 60, "model": "echo", **more}
    with EchoServer(engine=EchoEngine(pause=pause), limits=QUIET).served() as address:
        answer = httpx.post(f"{address}{path}", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    return [(kind, json.loads(data) if data.startswith("{") else data) for kind, data in events(answer.text)]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, GENERATE])
def test_nothing_but_comments_comes_before_the_first_token(path: str) -> None:
    kinds = [kind for kind, _ in streamed(path, 0.3)]
    first = next(i for i, kind in enumerate(kinds) if kind != ":")
    assert first >= 3, "several comments while the first token is made"
    # Between the first token and the second it is quiet as long.
    rest = kinds[first:]
    assert rest.count("ping" if path == MESSAGES else ":") >= 3
    assert not (path == MESSAGES and ":" in rest) and not (path != MESSAGES and "ping" in kinds)


def test_the_role_comes_first_and_once() -> None:
    deltas = [data["choices"][0]["delta"] for kind, data in streamed(CHAT, 0) if kind != ":" and data != "[DONE]"]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}, {}]


def test_each_of_several_answers_begins_with_its_role() -> None:
    chunks = [data["choices"][0] for kind, data in streamed(CHAT, 0.01, n=3) if kind != ":" and data != "[DONE]"]
    for index in range(3):
        own = [chunk["delta"] for chunk in chunks if chunk["index"] == index]
        assert own[0] == {"role": "assistant", "content": ""} and [each.get("content") for each in own[1:3]] == [
            "a",
            "b",
        ]


def test_the_role_comes_with_a_token_whose_text_is_withheld() -> None:
    """A call is sent when it is whole; that the model has begun is known before."""
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    found = streamed(CHAT, 0.02, call, tools=[tool])
    kinds = [":" if kind == ":" else next(iter(data["choices"][0]["delta"]), "end") for kind, data in found[:-1]]
    first = kinds.index("role")
    assert kinds[first + 1 :].count(":") >= 3 and kinds[-2:] == ["tool_calls", "end"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_an_answer_without_a_token_begins_too(path: str) -> None:
    stop: dict[str, Any] = {"stop_sequences": ["a"]} if path == MESSAGES else {"stop": ["a"]}
    found = [(kind, data) for kind, data in streamed(path, 0, **stop) if kind != ":" and data != "[DONE]"]
    if path == CHAT:
        assert [data["choices"][0]["delta"] for _, data in found] == [{"role": "assistant", "content": ""}, {}]
    else:
        assert [kind for kind, _ in found] == ["message_start", "message_delta", "message_stop"]
