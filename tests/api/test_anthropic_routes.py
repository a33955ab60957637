"""Anthropic's messages route over real HTTP."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from service.core import Sampling
from tests.support.echo_engine import LIMITS, EchoEngine, EchoServer

MESSAGES = "/v1/messages"
CALL = '<tool_call>{"name": "now", "arguments": {"zone": "é"}}</tool_call>'
TOOL_USE = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
TOOL = {"name": "now", "description": "The time.", "input_schema": {"type": "object"}}


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "echo", "max_tokens": 500, "messages": [{"role": "user", "content": text}], **more}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of every event, each of which is named by its type."""
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_message(server: EchoServer, http: httpx.Client) -> None:
    asked = body(
        "hé",
        system=[{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        stop_sequences=["zz"],
        metadata={"user_id": "me"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low"},
        store=False,
        num_draft_tokens=0,
    )
    answer = http.post(f"{MESSAGES}?beta=true", json=asked).json()
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "echo")
    assert answer["content"] == [{"type": "text", "text": "shé"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    usage = {"input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 3, "output_tokens": 3}
    assert answer["usage"] == usage
    prompt = server.engine.tickets[-1].prompt
    assert prompt.sampling == Sampling(temperature=0.5, top_p=0.9, top_k=4, stop=("zz",), max_tokens=500)
    assert (prompt.client, prompt.store, prompt.num_draft_tokens) == ("me", False, 0)
    messages, _, options = server.encoder.chats[-1]
    assert messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "hé"}]
    assert options == {"enable_thinking": True, "reasoning_effort": "low"}


def test_turns_of_every_kind(server: EchoServer, http: httpx.Client) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "x"},
                {"type": "redacted_thinking", "data": "y"},
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "c1", "name": "now", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "12"}]},
                {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
                {"type": "text", "text": "d"},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c3", "content": "13"}]},
    ]
    assert http.post(MESSAGES, json={"max_tokens": 9, "messages": turns, "tools": [TOOL]}).status_code == 200
    messages, tools, _ = server.encoder.chats[-1]
    assert messages == [
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "c",
            "reasoning_content": "t",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "tool", "tool_call_id": "c3", "content": "13"},
        {"role": "user", "content": "d"},
    ]
    function = {"name": "now", "parameters": {"type": "object"}, "description": "The time."}
    assert tools == [{"type": "function", "function": function}]


@pytest.mark.parametrize("more", [{}, {"input_schema": None}])
def test_a_tool_without_a_schema(server: EchoServer, http: httpx.Client, more: dict[str, object]) -> None:
    assert http.post(MESSAGES, json=body("a", tools=[{"name": "now", **more}])).status_code == 200
    assert server.encoder.chats[-1][1] == [{"type": "function", "function": {"name": "now"}}]


def test_neighbouring_messages_of_one_role_are_one(server: EchoServer, http: httpx.Client) -> None:
    call = {"type": "tool_use", "id": "c1", "name": "now", "input": {}}
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": "e"},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "f"}]},
        {"role": "user", "content": ""},
        {"role": "user", "content": "g"},
    ]
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        more = {"max_tokens": 9} if path == MESSAGES else {}
        assert http.post(path, json={"messages": messages, "tools": [TOOL], **more}).status_code == 200
        function = {"name": "now", "arguments": {}}
        assert server.encoder.chats[-1][0] == [
            {"role": "user", "content": "a\n\nbc"},
            {
                "role": "assistant",
                "content": "d",
                "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "f"},
            {"role": "user", "content": "e\n\ng"},
        ]


def test_a_stream_carries_the_same_as_the_json_answer(http: httpx.Client) -> None:
    asked = body(f"<think>why</think>so{CALL}{CALL}end", tools=[TOOL])
    whole = http.post(MESSAGES, json=asked).json()
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert whole["content"][2]["input"] == {"zone": "é"}
    assert whole["stop_reason"] == "tool_use"
    start, *middle, delta, stop = events(http.post(MESSAGES, json={**asked, "stream": True}))
    assert (start["type"], start["message"]["content"], start["message"]["stop_reason"]) == ("message_start", [], None)
    assert stop == {"type": "message_stop"}
    assert (delta["delta"], delta["usage"]) == ({"stop_reason": "tool_use", "stop_sequence": None}, whole["usage"])
    blocks: list[dict[str, Any]] = []
    for event in middle:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
                assert blocks[-1].pop("input", {}) == {}
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                kind, text = event["delta"].values()
                name = kind.removesuffix("_delta")
                blocks[-1][name] = blocks[-1].get(name, "") + text
            case _:
                assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
    for block, wanted in zip(blocks, whole["content"], strict=True):
        if wanted["type"] == "tool_use":
            assert (block["name"], json.loads(block["input_json"])) == (wanted["name"], wanted["input"])
        else:
            assert block == wanted


def test_one_call_at_a_time() -> None:
    server = EchoServer(engine=EchoEngine(pause=0.001))
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    with server.served() as address:
        asked = body(f"{CALL}{CALL}" + "x" * 900, tools=[TOOL], tool_choice=choice)
        answer = httpx.post(address + MESSAGES, json=asked, timeout=60).json()
    assert [block["type"] for block in answer["content"]] == ["tool_use"]
    assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("more", "grammar"),
    [
        ({"output_config": {"format": {"type": "json_schema", "schema": {"a": 1}}}}, 'json_schema: {"a": 1}'),
        ({"output_format": {"type": "json_schema", "schema": {"a": 1}}}, 'json_schema: {"a": 1}'),
        ({"tools": [{**TOOL, "strict": True}]}, "lark: 1 tools, strict: now"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "lark: 1 tools, several: True"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "now"}}, "lark: 1 tools, several: False"),
    ],
)
def test_what_an_answer_must_be(server: EchoServer, http: httpx.Client, more: dict[str, Any], grammar: str) -> None:
    assert http.post(MESSAGES, json=body("a", **more)).status_code == 200
    constraint = server.engine.tickets[-1].prompt.constraint
    assert constraint is not None and constraint.grammar.text == grammar


def test_max_tokens_is_lowered_to_what_the_context_holds(server: EchoServer, http: httpx.Client) -> None:
    answer = http.post(MESSAGES, json=body("x" * 3_100, max_tokens=32_000)).json()
    assert server.engine.tickets[-1].prompt.sampling.max_tokens == LIMITS.max_context - 3_102
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert http.post(MESSAGES, json=body("abc", max_tokens=2)).json()["stop_reason"] == "max_tokens"


def test_tokens_are_counted_without_generating(server: EchoServer, http: httpx.Client) -> None:
    before = len(server.engine.tickets)
    asked = {"messages": [{"role": "user", "content": "abc"}], "system": "d", "model": "gpt-4o"}
    assert http.post(f"{MESSAGES}/count_tokens", json=asked).json() == {"input_tokens": 7}
    assert len(server.engine.tickets) == before


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [TOOL_USE]}]}, "messages.0.content"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"container": "c"}, "container"),
        ({"messages": [{"role": "user", "content": "x" * 4_000}]}, "messages"),
    ],
)
def test_what_a_message_cannot_have_is_refused_by_name(http: httpx.Client, more: dict[str, Any], param: str) -> None:
    response = http.post(MESSAGES, json=body("a", **more))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["type"] == "invalid_request_error" and error["param"].startswith(param), error


def test_errors_are_events_of_a_stream() -> None:
    server = EchoServer(engine=EchoEngine(break_after=2))
    with server.served() as address:
        last = events(httpx.post(address + MESSAGES, json=body("abcdef", stream=True)))[-1]
    assert last["type"] == "error"
    assert last["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "other"}])
def test_a_tool_that_is_not_there_cannot_be_forced(http: httpx.Client, choice: dict[str, Any]) -> None:
    response = http.post(MESSAGES, json=body("a", tool_choice=choice))
    assert (response.status_code, response.json()["error"]["param"]) == (404, "tool_choice")
