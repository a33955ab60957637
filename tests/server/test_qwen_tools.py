"""Tool calls over HTTP of models whose tokenizer files have Qwen's layout, in every way that a client can ask for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from service.evaluation.server_process import LocalServer
from tests.support.qwen import (
    ASKING,
    CALL,
    GREETING,
    NOW,
    ORDER,
    ORDERED,
    ORDERING,
    QUESTION,
    REPLY,
    STRICT,
    WEATHER,
    Format,
    Layout,
    write_pair,
)
from tests.support.tiny_server import InProcessServer, in_process_server

CHAT: dict[str, dict[str, Any]] = {
    "auto": {"tools": [WEATHER]},
    "strict auto": {"tools": [STRICT]},
    "required": {"tools": [WEATHER], "tool_choice": "required"},
    "required, strict": {"tools": [STRICT], "tool_choice": "required"},
    "named": {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    "strict auto, one call": {"tools": [STRICT], "parallel_tool_calls": False},
}
MESSAGES_TOOL = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
MESSAGES: dict[str, dict[str, Any]] = {
    "auto": {"tools": [MESSAGES_TOOL]},
    "any": {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "any"}},
    "any, strict": {"tools": [MESSAGES_TOOL | {"strict": True}], "tool_choice": {"type": "any"}},
    "tool": {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "tool", "name": "weather"}},
    "strict auto": {"tools": [MESSAGES_TOOL | {"strict": True}]},
}
RESPONSES_TOOL = {"type": "function", **WEATHER["function"]}
RESPONSES: dict[str, dict[str, Any]] = {
    "required": {"tools": [RESPONSES_TOOL], "tool_choice": "required"},
    "named": {"tools": [RESPONSES_TOOL], "tool_choice": {"type": "function", "name": "weather"}},
    "strict auto": {"tools": [RESPONSES_TOOL | {"strict": True}]},
}


@pytest.fixture(scope="module", params=[Format.JSON, pytest.param(Format.XML, marks=pytest.mark.nightly)])
def format(request: pytest.FixtureRequest) -> Format:
    return request.param


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Format], tuple[Path, Path]]:
    return cache(lambda format: write_pair(tmp_path_factory.mktemp("qwen"), format=format))


@pytest.fixture(scope="module")
def pair(pairs: Callable[[Format], tuple[Path, Path]], format: Format) -> tuple[Path, Path]:
    return pairs(format)


def serving(root: Path, pair: tuple[Path, Path], draft: str) -> InProcessServer:
    training = {"enabled": False}
    server = in_process_server(root, pair, training=training, models={"target": str(pair[0]), "draft": draft})
    server.start()
    return server


@pytest.fixture(scope="module", params=["with a draft", "without"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pair: tuple[Path, Path]
) -> Iterator[LocalServer]:
    draft = str(pair[1]) if request.param == "with a draft" else "none"
    made = serving(tmp_path_factory.mktemp("server"), pair, draft)
    yield made
    assert made.stop() == 0


def chat(server: LocalServer, question: str, stream: bool, **body: Any) -> tuple[str, list[tuple[str, Any]], str]:
    """Text, calls and finish reason of the chat route."""
    asked = {"messages": [{"role": "user", "content": question}], "max_tokens": 250, "temperature": 0, **body}
    if not stream:
        answer = server.request("POST", "/v1/chat/completions", asked)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        message, finish = choice["message"], choice["finish_reason"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        return message["content"] or "", [(call["name"], json.loads(call["arguments"])) for call in calls], finish
    answer = server.request("POST", "/v1/chat/completions", asked | {"stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    calls = [call["function"] for choice in choices for call in choice["delta"].get("tool_calls") or []]
    return (
        "".join(choice["delta"].get("content") or "" for choice in choices),
        [(call["name"], json.loads(call["arguments"])) for call in calls],
        next(choice["finish_reason"] for choice in choices if choice["finish_reason"]),
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", CHAT)
def test_chat_answers_are_calls(server: LocalServer, way: str, stream: bool) -> None:
    assert chat(server, QUESTION, stream, **CHAT[way]) == ("", [CALL], "tool_calls")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", ["auto", "strict auto"])
def test_answers_that_call_nothing_are_text(server: LocalServer, way: str, stream: bool) -> None:
    assert chat(server, GREETING, stream, **CHAT[way]) == (REPLY, [], "stop")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_parameters_of_every_type(server: LocalServer, format: Format, choice: str, stream: bool) -> None:
    if format is Format.JSON:
        pytest.skip("json_tools leaves types to JSON; its model has not learnt this call")
    assert chat(server, ORDERING, stream, tools=[ORDER], tool_choice=choice) == ("", [ORDERED], "tool_calls")
    assert chat(server, ASKING, stream, tools=[NOW], tool_choice=choice) == ("", [("now", {})], "tool_calls")


@pytest.mark.parametrize("seed", range(4))
def test_arguments_are_valid_where_the_model_would_write_others(server: LocalServer, seed: int) -> None:
    """A schema that the model has never seen, and tokens drawn at a high temperature."""
    level = {"type": "integer", "minimum": 3, "maximum": 5}
    kind = {"enum": ["a", 1, None]}
    schema = {"type": "object", "properties": {"level": level, "kind": kind}, "required": ["level", "kind"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        sampling = {"temperature": 1.5, "seed": seed}
        text, calls, _ = chat(server, QUESTION, False, tools=[tool], tool_choice=choice, **sampling)
        assert (text, [name for name, _ in calls]) == ("", ["weather"] * len(calls))
        assert calls
        for _, arguments in calls:
            assert arguments["level"] in (3, 4, 5)
            assert arguments["kind"] in ("a", 1, None)


@pytest.mark.parametrize("sampling", [{"temperature": 0.5}, {"temperature": 0.5, "seed": 3}], ids=["drawn", "seeded"])
@pytest.mark.parametrize("way", ["strict auto", "required"])
def test_sampled_answers_are_calls(server: LocalServer, way: str, sampling: dict[str, Any]) -> None:
    assert chat(server, QUESTION, False, **CHAT[way], **sampling) == ("", [CALL], "tool_calls")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", MESSAGES)
def test_anthropic_answers_are_calls(server: LocalServer, way: str, stream: bool) -> None:
    asked = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60, "temperature": 0}
    answer = server.request("POST", "/v1/messages", asked | MESSAGES[way] | {"stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        found = answer.json()
        assert [(b["type"], b.get("name"), b.get("input")) for b in found["content"]] == [("tool_use", *CALL)]
        assert found["stop_reason"] == "tool_use"
        return
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [(block["type"], block["name"]) for block in blocks] == [("tool_use", CALL[0])]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == CALL[1]
    assert [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"] == ["tool_use"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", RESPONSES)
def test_responses_are_calls(server: LocalServer, way: str, stream: bool) -> None:
    asked = {"input": QUESTION, "max_output_tokens": 60, "temperature": 0, "stream": stream}
    answer = server.request("POST", "/v1/responses", asked | RESPONSES[way])
    assert answer.status_code == 200, answer.text
    found = answer.json() if not stream else None
    for line in answer.text.splitlines() if stream else ():
        if line.startswith("data: {") and (event := json.loads(line[6:]))["type"] == "response.completed":
            found = event["response"]
    assert found is not None
    assert found["status"] == "completed"
    calls = [(item["name"], json.loads(item["arguments"])) for item in found["output"]]
    assert calls == [CALL]


def test_a_marker_in_an_enum_is_text(server: LocalServer) -> None:
    """Its letters come as ordinary tokens: the marker's own token begins a call."""
    enum = {"enum": ["<tool_call>", "<|im_end|>"]}
    asked = {"prompt": "x", "max_tokens": 40, "temperature": 0, "structured_outputs": {"json": enum}}
    answer = server.request("POST", "/v1/completions", asked)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert json.loads(choice["text"]) in enum["enum"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [Layout.SPECIAL, Layout.TEXT])
def test_other_layouts_of_the_markers(tmp_path: Path, layout: Layout) -> None:
    pair = write_pair(tmp_path, layout)
    server = serving(tmp_path, pair, str(pair[1]))
    try:
        for way, body in CHAT.items():
            assert chat(server, QUESTION, False, **body) == ("", [CALL], "tool_calls"), way
        assert chat(server, GREETING, False, **CHAT["strict auto"]) == (REPLY, [], "stop")
        # Without tools the call is text, and special tokens are no part of a text.
        text = Format.JSON.call(*CALL)
        if layout is Layout.SPECIAL:
            text = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
        assert chat(server, QUESTION, False)[0] == text
    finally:
        assert server.stop() == 0
