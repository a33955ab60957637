"""OpenAI's routes over real HTTP: chat completions, completions, responses and models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import fastjsonschema
import httpx
import pytest

from service.core import BadRequest, ChatEnd, EncodedChat, Reasoning, Sampling
from service.models.answer import AnswerReader
from tests.support.echo_engine import LIMITS, Codepoints, EchoEngine, EchoServer

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
CALL = '<tool_call>{"name": "now", "arguments": {"zone": "é"}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {"name": "then", "strict": True}}
FLAT_TOOL = {"type": "function", "name": "now", "description": "The time.", "parameters": {"type": "object"}}


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def data_of(response: httpx.Response) -> list[Any]:
    """The JSON of every event; [DONE] as it is."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found: list[Any] = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        data = next(line for line in block.split("\n") if line.startswith("data: "))[6:]
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def answered(response: httpx.Response, *, stream: bool) -> tuple[str, list[dict[str, Any]], str]:
    """The one answer's text, its tool calls, and why it ended."""
    if stream:
        choices = [chunk["choices"][0] for chunk in data_of(response)[:-1]]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
        return "".join(each["delta"].get("content", "") for each in choices), calls, choices[-1]["finish_reason"]
    (choice,) = response.json()["choices"]
    return choice["message"]["content"], choice["message"].get("tool_calls", []), choice["finish_reason"]


def assert_refused(response: httpx.Response, param: str | None, status: int = 400) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["param"] == param, error


# ---------------------------------------------------------------------------------------------------- chat completions


def test_a_chat_answer(server: EchoServer, http: httpx.Client) -> None:
    asked = {
        "model": "gpt-4o",
        "messages": [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "é"}]},
        ],
        "max_completion_tokens": 50,
        "temperature": 0.5,
        "top_k": -1,
        "seed": 3,
        "stop": "zz",
        "user": "me",
        "metadata": {"domain": "maths", "other": "x"},
        "store": False,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "num_draft_tokens": 2,
        "n": None,
        "tools": None,
    }
    answer = http.post(CHAT, json=asked).json()
    assert (answer["object"], answer["model"]) == ("chat.completion", "gpt-4o")
    assert answer["id"].startswith("chatcmpl-") and answer["created"] > 1.7e9
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "daé", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 3,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert answer["timings"]["draft_n"] == 3
    assert answer["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 1 / 3,
        "draft_acceptance_rate": 1 / 3,
        "num_spec_steps": 3,
        "num_draft_tokens": 3,
        "num_accepted_draft_tokens": 1,
        "acceptance_histogram": [2, 1],
    }
    prompt = server.engine.tickets[-1].prompt
    assert prompt.sampling == Sampling(temperature=0.5, seed=3, stop=("zz",), max_tokens=50)
    assert (prompt.domain, prompt.client, prompt.store, prompt.first_user) == ("maths", "me", False, "aé")
    assert (prompt.num_draft_tokens, prompt.logprobs) == (2, None)
    assert server.encoder.chats[-1][0][0]["role"] == "system"


@pytest.mark.parametrize(("path", "asked"), [(CHAT, {"messages": user("a")}), (COMPLETIONS, {"prompt": "a"})])
def test_a_bias_reaches_the_engine_and_is_not_recorded(
    server: EchoServer, http: httpx.Client, path: str, asked: dict[str, Any]
) -> None:
    assert http.post(path, json={**asked, "logit_bias": {"97": -100, "5": 1.5}}).status_code == 200
    prompt = server.engine.tickets[-1].prompt
    assert prompt.sampling.logit_bias == ((97, -100.0), (5, 1.5)) and prompt.bent
    assert http.post(path, json={**asked, "logit_bias": {}}).status_code == 200
    prompt = server.engine.tickets[-1].prompt
    assert prompt.sampling.logit_bias == () and not prompt.bent


def test_a_bias_of_what_is_no_token_is_refused() -> None:
    server = EchoServer()
    last = server.encoder.MARK
    server.encoder.vocabulary = last + 1
    with server.served() as address:
        assert httpx.post(address + CHAT, json={"messages": user("a"), "logit_bias": {str(last): 1}}).status_code == 200
        beyond = {"messages": user("a"), "logit_bias": {str(last + 1): 1}}
        assert_refused(httpx.post(address + CHAT, json=beyond), "logit_bias")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"messages": user("aé")}, "messages"),
        ("/v1/completions", {"prompt": "aé"}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "é"]}, "prompt"),
        ("/v1/completions", {"prompt": [97, 233]}, "prompt"),
        ("/v1/responses", {"input": "é"}, "input"),
        ("/v1/messages", {"messages": user("é"), "max_tokens": 5}, "messages"),
        ("/generate", {"prompt": "é", "chat_template": False}, "prompt"),
    ],
)
def test_a_token_that_the_model_lacks_is_refused(path: str, body: dict[str, Any], field: str) -> None:
    """Some tokenizers have more tokens than their models have rows."""
    server = EchoServer()
    server.encoder.MARK, server.encoder.vocabulary = 1, 233
    with server.served() as address:
        response = httpx.post(address + path, json=body)
    error = response.json()["error"]
    assert response.status_code == 400 and "below 233" in error["message"], error
    assert error.get("param", field) == field
    if body.get("prompt") != [97, 233]:
        assert f"{field} has the token é (id 233), which the model does not have" in error["message"]


def test_neutral_fields_of_other_servers_are_taken(server: EchoServer, http: httpx.Client) -> None:
    neutral = {
        "spaces_between_special_tokens": True,
        "prompt_logprobs": None,
        "priority": 0,
    }
    neutral |= {"cache_prompt": True, "timings_per_token": False, "repeat_penalty": 1.0, "typical_p": 1, "mirostat": 0}
    neutral |= {"seed": -1, "max_tokens": -1}
    assert http.post(CHAT, json={"messages": user("a"), **neutral}).status_code == 200
    sampling = server.engine.tickets[-1].prompt.sampling
    assert sampling.seed is None and sampling.max_tokens == min(LIMITS.max_tokens, LIMITS.max_context - 3)
    wrong = {"repeat_penalty": 1.1, "spaces_between_special_tokens": False, "seed": 0.5, "max_tokens": -2}
    for name, value in wrong.items():
        assert_refused(http.post(CHAT, json={"messages": user("a"), name: value}), name)


@pytest.mark.parametrize("asked", [{}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}])
@pytest.mark.parametrize("stream", [False, True])
def test_without_tools_there_are_no_calls(http: httpx.Client, asked: dict[str, Any], stream: bool) -> None:
    response = http.post(CHAT, json={"messages": user(f"a{CALL}"), **asked, "stream": stream})
    assert answered(response, stream=stream) == (f"a{CALL}", [], "stop")


def test_past_turns_as_other_servers_write_them(server: EchoServer, http: httpx.Client) -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "now", "arguments": ""}}
    turns = [*user("a"), {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [call]}, *user("b")]
    assert http.post(CHAT, json={"messages": turns, "tools": [TOOL]}).status_code == 200
    past = server.encoder.chats[-1][0][1]
    function = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": {}}}
    assert past == {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [function]}


def test_without_max_tokens_the_answer_may_fill_the_context(server: EchoServer, http: httpx.Client) -> None:
    assert http.post(CHAT, json={"messages": user("a")}).status_code == 200
    assert server.engine.tickets[-1].prompt.sampling.max_tokens == min(LIMITS.max_tokens, LIMITS.max_context - 3)


def test_what_the_request_does_not_say_is_the_model_s_default() -> None:
    server = EchoServer(defaults=Sampling(temperature=0.7, top_p=0.9, top_k=20, min_p=0.1))
    with server.served() as address:
        for path, body in (
            (CHAT, {"messages": user("a")}),
            (COMPLETIONS, {"prompt": "a"}),
            (RESPONSES, {"input": "a"}),
        ):
            assert httpx.post(address + path, json=body).status_code == 200
            sampling = server.engine.tickets[-1].prompt.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 20, 0.1)
        httpx.post(address + CHAT, json={"messages": user("a"), "temperature": 0})
        assert server.engine.tickets[-1].prompt.sampling.greedy
        httpx.post(f"{address}/generate", json={"prompt": "a"})
        assert server.engine.tickets[-1].prompt.sampling.greedy


def test_a_chat_stream_carries_the_same_as_the_json_answer(http: httpx.Client) -> None:
    text = f"<think>why\n</think>so{CALL}and{CALL} < "
    asked: dict[str, Any] = {"messages": user(text), "tools": [TOOL], "n": 2, "logprobs": True, "top_logprobs": 2}
    whole = http.post(CHAT, json=asked).json()
    stream = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = data_of(http.post(CHAT, json=stream))
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    for index in range(2):
        message = whole["choices"][index]["message"]
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        deltas = [chunk["choices"][0]["delta"] for chunk in own]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == message["content"] == "soand < "
        assert (
            "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"] == "why\n"
        )
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [call.pop("index") for call in calls] == [0, 1]
        assert [call["function"] for call in calls] == [call["function"] for call in message["tool_calls"]]
        assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"zone": "é"}'}
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        logprobs = [
            each for chunk in own for each in (chunk["choices"][0].get("logprobs") or {"content": []})["content"]
        ]
        assert logprobs == whole["choices"][index]["logprobs"]["content"]
        assert "".join(each["token"] for each in logprobs) == text
        assert own[-1]["choices"][0]["finish_reason"] == whole["choices"][index]["finish_reason"] == "tool_calls"
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": user("ab")}), (COMPLETIONS, {"prompt": "ab"})])
def test_a_stream_says_once_what_it_has_used(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """Open WebUI adds up `usage` and `timings` of all chunks, which have the same counts."""
    stream = {**body, "n": 2, "stream": True}
    with_usage = data_of(http.post(path, json={**stream, "stream_options": {"include_usage": True}}))[:-1]
    (last,) = [chunk for chunk in with_usage if "timings" in chunk or "usage" in chunk]
    assert last["choices"] == [] and last["timings"]["predicted_n"] == last["usage"]["completion_tokens"] == 4
    without = [chunk for chunk in data_of(http.post(path, json=stream))[:-1] if "timings" in chunk]
    assert [chunk["choices"][0]["finish_reason"] for chunk in without] == ["stop"] * 2
    assert [chunk["timings"]["predicted_n"] for chunk in without] == [2] * 2


def test_log_probabilities_come_with_the_likeliest_tokens(http: httpx.Client) -> None:
    asked = {"messages": user("é"), "logprobs": True, "top_logprobs": 2}
    (token,) = http.post(CHAT, json=asked).json()["choices"][0]["logprobs"]["content"]
    assert token == {
        "token": "é",
        "bytes": [195, 169],
        "logprob": -0.5,
        "top_logprobs": [
            {"token": "é", "bytes": [195, 169], "logprob": -0.5},
            {"token": "ê", "bytes": [195, 170], "logprob": -1.5},
        ],
    }
    (token,) = http.post(CHAT, json={"messages": user("é"), "logprobs": True}).json()["choices"][0]["logprobs"][
        "content"
    ]
    assert token["top_logprobs"] == []


def test_several_answers_have_seeds_of_their_own(server: EchoServer, http: httpx.Client) -> None:
    answer = http.post(CHAT, json={"messages": user("ab"), "n": 3, "seed": 2**63 - 1, "temperature": 1}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [ticket.prompt.sampling.seed for ticket in server.engine.tickets[-3:]] == [2**63 - 1, 0, 1]
    assert answer["usage"]["completion_tokens"] == 6
    assert server.engine.reserved == 0


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_tool_calls_the_answer_ends_after_the_first(stream: bool) -> None:
    server = EchoServer(engine=EchoEngine(pause=0.001))
    asked = {
        "messages": user(f"a{CALL}b{CALL}" + "x" * 900),
        "tools": [TOOL],
        "parallel_tool_calls": False,
        "stream": stream,
    }
    with server.served() as address:
        response = httpx.post(address + CHAT, json=asked, timeout=60)
        assert server.value('redraft:request_success_total{finished_reason="stop"}') == 1, (
            "its client did not cancel it"
        )
    text, calls, reason = answered(response, stream=stream)
    assert (text, len(calls), reason) == ("a", 1, "tool_calls")
    assert server.engine.tickets[0].cancelled.is_set()


@pytest.mark.parametrize("more", [1, 8])
def test_a_whole_call_is_no_cut_one_where_the_limit_comes_just_behind_it(
    server: EchoServer, http: httpx.Client, more: int
) -> None:
    asked = {"messages": user(CALL + "x" * 90), "tools": [TOOL], "parallel_tool_calls": False}
    answer = http.post(CHAT, json={**asked, "max_tokens": len(CALL) + more}).json()
    (choice,) = answer["choices"]
    assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (1, "tool_calls")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, lambda text: {"messages": user(text)}),
        ("/v1/messages", lambda text: {"messages": user(text), "max_tokens": 99}),
        ("/v1/responses", lambda text: {"input": text}),
        ("/v1/completions", lambda text: {"prompt": text}),
        ("/generate", lambda text: {"prompt": text}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_text_cuts_a_frame(http: httpx.Client, path: str, asked: Callable[[str], dict[str, object]]) -> None:
    """Clients split lines as Python does, at more characters than end a line of server-sent events."""
    text = "a\u2028b\u2029c\x85d\x0be\x1cf"
    with http.stream("POST", path, json={**asked(text), "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.status_code == 200 and len(lines) > 3
    data = [line.removeprefix("data: ") for line in lines if not line.startswith("event: ")]
    frames = [json.loads(each) for each in data if each != "[DONE]"]
    assert all(isinstance(each, dict) for each in frames) and "\\u2028" in json.dumps(frames)


def test_a_tools_round_trip(server: EchoServer, http: httpx.Client) -> None:
    turns = [
        *user("when?"),
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]
    assert http.post(CHAT, json={"messages": turns, "tools": [TOOL], "tool_choice": "auto"}).status_code == 200
    messages, tools, _ = server.encoder.chats[-1]
    assert tools == [TOOL]
    assert messages[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}],
    }
    assert messages[2] == {"role": "tool", "content": "12:00", "tool_call_id": "c1"}
    assert http.post(CHAT, json={"messages": user("a"), "tools": [TOOL], "tool_choice": "none"}).status_code == 200
    assert server.encoder.chats[-1][1] == []


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"zone": "UTC"}, {"zone": "UTC"}),
        ('{"zone": "UTC"}', {"zone": "UTC"}),
        ('{"zone": "U', '{"zone": "U'),
        ("[1]", "[1]"),
        ("", {}),
        (None, {}),
        ([], {}),
    ],
    ids=str,
)
def test_arguments_of_past_calls(
    server: EchoServer, http: httpx.Client, path: str, given: object, read: object
) -> None:
    """Clients send them back as they parsed them, as text that was cut, and not at all."""
    call = {"type": "function", "id": "c1", "function": {"name": "now", "arguments": given}}
    block = {"type": "tool_use", "id": "c1", "name": "now", "input": given}
    item = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": given}
    asked: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [*user("when?"), {"role": "assistant", "tool_calls": [call]}, *user("a")]},
        RESPONSES: {"input": [*user("when?"), item, *user("a")]},
        MESSAGES: {
            "messages": [*user("when?"), {"role": "assistant", "content": [block]}, *user("a")],
            "max_tokens": 9,
        },
    }
    assert http.post(path, json=asked[path]).status_code == 200
    function = {"name": "now", "arguments": read}
    assert server.encoder.chats[-1][0][1]["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_arguments_that_nest_too_deeply_are_text(server: EchoServer, http: httpx.Client, path: str) -> None:
    """JSON's reader gives up on them otherwise than on what is no JSON."""
    deep = "[" * 19_000
    call = {"name": "now", "arguments": deep}
    turns: list[dict[str, Any]] = [
        *user("when?"),
        {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]
    items = [*user("when?"), {"type": "function_call", "call_id": "c1", **call}]
    asked = {"messages": turns} if path == CHAT else {"input": items}
    assert http.post(path, json=asked).status_code == 200
    past = server.encoder.chats[-1][0][1]["tool_calls"]
    assert past == [{"id": "c1", "type": "function", "function": call}]


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
GRAMMARS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"response_format": {"type": "json_object"}}, 'json_schema: {"type": "object"}'),
    (CHAT, {"response_format": {"type": "json_object", "schema": {"const": 1}}}, 'json_schema: {"const": 1}'),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "json_schema: {}"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
        f"json_schema: {json.dumps(SCHEMA)}",
    ),
    (CHAT, {"structured_outputs": {"json": SCHEMA}}, f"json_schema: {json.dumps(SCHEMA)}"),
    (COMPLETIONS, {"structured_outputs": {"regex": "a+"}}, "regex: a+"),
    (COMPLETIONS, {"structured_outputs": {"choice": ["a", "b"]}}, 'choice: ["a", "b"]'),
    (CHAT, {"structured_outputs": {"grammar": "start: /a/"}}, "lark: start: /a/"),
    (CHAT, {"structured_outputs": {"json_object": True}}, 'json_schema: {"type": "object"}'),
    (CHAT, {"tools": [TOOL, TOOL], "tool_choice": "required"}, "lark: 2 tools, several: True"),
    (
        CHAT,
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        "lark: 1 tools, several: False",
    ),
    (
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "now"}}},
        "lark: 1 tools, several: False",
    ),
    (
        CHAT,
        {"tools": [TOOL], "response_format": {"type": "json_object"}},
        'lark: 1 tools, several: True, or {"type": "object"}',
    ),
    (CHAT, {"tools": [TOOL, STRICT]}, "lark: 2 tools, strict: then"),
    (CHAT, {"tools": [TOOL, STRICT], "tool_choice": "required"}, "lark: 2 tools, several: True"),
    (
        CHAT,
        {"tools": [STRICT], "response_format": {"type": "json_object"}},
        'lark: 1 tools, several: True, or {"type": "object"}',
    ),
    (RESPONSES, {"tools": [FLAT_TOOL, {**FLAT_TOOL, "name": "then", "strict": True}]}, "lark: 2 tools, strict: then"),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, 'json_schema: {"type": "object"}'),
    (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        f"json_schema: {json.dumps(SCHEMA)}",
    ),
    (RESPONSES, {"tools": [FLAT_TOOL], "tool_choice": "required"}, "lark: 1 tools, several: True"),
    (
        RESPONSES,
        {"tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "now"}},
        "lark: 1 tools, several: False",
    ),
]


@pytest.mark.parametrize(("path", "more", "grammar"), GRAMMARS, ids=lambda value: str(value)[:40])
def test_what_an_answer_must_be(
    server: EchoServer, http: httpx.Client, path: str, more: dict[str, Any], grammar: str
) -> None:
    asked: dict[str, Any] = {
        CHAT: {"messages": user("a"), "n": 2},
        COMPLETIONS: {"prompt": "a"},
        RESPONSES: {"input": "a"},
    }
    response = http.post(path, json={**asked[path], **more})
    assert response.status_code == 200, response.text
    constraints = [ticket.prompt.constraint for ticket in server.engine.tickets[-2 if path == CHAT else -1 :]]
    assert [each.grammar.text for each in constraints if each is not None] == [grammar] * len(constraints)
    assert len({id(each) for each in constraints}) == len(constraints)


def test_a_long_name_of_a_client_is_stored_by_its_hash(server: EchoServer, http: httpx.Client) -> None:
    assert http.post(CHAT, json={"messages": user("a"), "user": "x" * 400}).status_code == 200
    assert len(server.engine.tickets[-1].prompt.client or "") == 64


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_a_stop_string_cuts_is_text(http: httpx.Client, stream: bool) -> None:
    asked = {"messages": user(f"a{CALL}"), "tools": [TOOL], "stop": "zone", "stream": stream}
    response = http.post(CHAT, json=asked)
    assert answered(response, stream=stream)[0] == "a" + CALL[: CALL.index("zone")]


def test_template_arguments(server: EchoServer, http: httpx.Client) -> None:
    asked = {"messages": user("a"), "reasoning_effort": "none", "chat_template_kwargs": {"custom": 1}}
    assert http.post(CHAT, json=asked).status_code == 200
    assert server.encoder.chats[-1][2] == {"custom": 1, "reasoning_effort": "none", "enable_thinking": False}


WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.tool_call_id"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content",
    ),
    ({"messages": user("x" * 4_000)}, "messages"),
    ({"messages": user("a"), "n": 13}, "n"),
    ({"messages": user("a"), "n": 0}, "n"),
    ({"messages": user("a"), "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": user("a"), "frequency_penalty": 2.1}, "frequency_penalty"),
    ({"messages": user("a"), "presence_penalty": -3}, "presence_penalty"),
    ({"messages": user("a"), "repetition_penalty": 0}, "repetition_penalty"),
    ({"messages": user("a"), "min_tokens": -1}, "min_tokens"),
    ({"messages": user("a"), "min_tokens": 21, "max_tokens": 20}, "min_tokens"),
    ({"messages": user("a"), "stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"messages": user("a"), "stop_token_ids": [2**31]}, "stop_token_ids.0"),
    ({"messages": user("a"), "bad_words": ["a", ""]}, "bad_words.1"),
    ({"messages": user("a"), "top_p": -0.1}, "top_p"),
    ({"messages": user("a"), "logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"messages": user("a"), "logit_bias": {"9999999999": 1}}, "logit_bias.9999999999"),
    ({"messages": user("a"), "logit_bias": {"a": 1}}, "logit_bias.a"),
    ({"messages": user("a"), "response_format": {"type": "xml"}}, "response_format"),
    ({"messages": user("a"), "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"messages": user("a"), "structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"messages": user("a"), "structured_outputs": {"choice": [1]}}, "structured_outputs.choice.0"),
    (
        {"messages": user("a"), "tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
        "tool_choice",
    ),
    ({"messages": user("a"), "functions": [{"name": "f"}]}, "functions"),
    ({"messages": user("a"), "modalities": ["audio"]}, "modalities.0"),
    ({"messages": user("a"), "num_draft_tokens": -1}, "num_draft_tokens"),
    ({"messages": user("a"), "metadata": {"domain": "a\nb"}}, "metadata.domain"),
    ({"messages": user("a"), "user": "x" * 513}, "user"),
]


@pytest.mark.parametrize(("asked", "param"), WRONG_CHATS, ids=lambda value: str(value)[:60])
def test_what_a_chat_cannot_have_is_refused_by_name(http: httpx.Client, asked: dict[str, Any], param: str) -> None:
    response = http.post(CHAT, json=asked)
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["param"].startswith(param)
    assert_refused(response, response.json()["error"]["param"])


def test_what_is_ignored_is_named_in_a_header(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"messages": user("a"), "service_tier": "auto", "prompt_cache_key": None, "verbosity": "low"}
    for stream in (False, True):
        response = http.post(f"{CHAT}?beta=true", json={**asked, "stream": stream})
        assert response.status_code == 200
        assert response.headers["x-redraft-ignored"] == "service_tier, verbosity, beta"
    assert "x-redraft-ignored" not in http.post(CHAT, json={"messages": user("a")}).headers
    assert "x-redraft-ignored" not in http.post(CHAT, json={"messages": user("a"), "tools": [STRICT]}).headers
    monkeypatch.setattr(Codepoints, "binds_calls", False)
    response = http.post(CHAT, json={"messages": user("a"), "tools": [STRICT]})
    assert response.headers["x-redraft-ignored"] == "tools.function.strict"


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"messages": user("a"), "tool_choice": "required"}),
        (
            CHAT,
            {"messages": user("a"), "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        ),
        (RESPONSES, {"input": "a", "tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "x"}}),
    ],
)
def test_a_tool_that_is_not_there_cannot_be_forced(http: httpx.Client, path: str, more: dict[str, Any]) -> None:
    response = http.post(path, json=more)
    assert_refused(response, "tool_choice", 404)
    assert response.json()["error"]["code"] == "tool_not_found"


def test_models(http: httpx.Client) -> None:
    answer = http.get("/v1/models").json()
    assert [model["id"] for model in answer["data"]] == ["echo", "gpt-4o"]
    assert http.get("/v1/models/gpt-4o").json() == answer["data"][1]
    assert answer["data"][0]["max_model_len"] == LIMITS.max_context
    assert_refused(http.get("/v1/models/a/b"), "model", 404)


def test_every_response_names_its_request(http: httpx.Client) -> None:
    for response in (
        http.get("/v1/models", headers={"x-request-id": "r-1"}),
        http.post(CHAT, json={}, headers={"x-request-id": "r-1"}),
        http.get("/nowhere", headers={"x-request-id": "r-1"}),
    ):
        assert response.headers["x-request-id"] == "r-1"
    made = [
        http.get("/v1/models", headers={"x-request-id": bad}).headers["x-request-id"] for bad in ("", "a b", "x" * 200)
    ]
    assert len(set(made)) == 3 and all(len(each) == 32 for each in made)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_stops_midway_is_an_error(path: str, stream: bool) -> None:
    server = EchoServer(engine=EchoEngine(break_after=2))
    body = {
        CHAT: {"messages": user("abcdef"), "n": 2},
        COMPLETIONS: {"prompt": "abcdef"},
        RESPONSES: {"input": "abcdef"},
    }
    with server.served() as address:
        response = httpx.post(address + path, json={**body[path], "stream": stream})
    if not stream:
        assert_refused(response, None, 503)
    elif path == RESPONSES:
        assert data_of(response)[-1]["response"]["error"] == {"code": "server_error", "message": "the engine stopped"}
    else:
        assert data_of(response)[-1]["error"]["code"] == "unavailable"
    assert server.value('redraft:requests_failed_total{code="unavailable"}') == (2 if path == CHAT else 1)
    assert server.engine.reserved == 0


# --------------------------------------------------------------------------------------------------------- completions


def test_completions(server: EchoServer, http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 2, "logprobs": 1, "stop": ["q"]}).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5}, {"b": -0.5}],
        "text_offset": [0, 1],
    }
    assert answer["usage"]["total_tokens"] == 5
    assert server.engine.tickets[-1].prompt.tokens == (97, 98, 99)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [([104, 105], ["hi"]), ([[104], [105]], ["h", "i"]), (["ab", "c"], ["ab", "c"]), ("<think>x", ["<think>x"])],
)
def test_prompts_may_be_several_and_token_ids(http: httpx.Client, prompt: Any, texts: list[str]) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": prompt, "n": 2, "max_tokens": 9}).json()
    assert [choice["text"] for choice in answer["choices"]] == [text for text in texts for _ in range(2)]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))
    assert answer["usage"]["completion_tokens"] == 2 * sum(map(len, texts))


def test_a_completion_stream_carries_the_same_as_the_json_answer(http: httpx.Client) -> None:
    asked = {"prompt": ["héllo", "you"], "logprobs": 2, "max_tokens": 9}
    whole = http.post(COMPLETIONS, json=asked).json()
    stream = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = data_of(http.post(COMPLETIONS, json=stream))
    assert (done, usage["usage"]) == ("[DONE]", whole["usage"])
    for choice in whole["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        for name, values in choice["logprobs"].items():
            assert [value for each in own if each["logprobs"] for value in each["logprobs"][name]] == values


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt.1"),
        ({"prompt": [2**31]}, "prompt.0"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
    ],
)
def test_what_a_completion_cannot_have_is_refused_by_name(
    http: httpx.Client, asked: dict[str, Any], param: str
) -> None:
    assert_refused(http.post(COMPLETIONS, json=asked), param)


# ----------------------------------------------------------------------------------------------------------- responses


class WatchedEncoder(Codepoints):
    """An encoder that knows which of its methods were called on an event loop, which a long prompt would stop."""

    def __init__(self) -> None:
        super().__init__()
        self.on_loop: list[str] = []
        self.called: set[str] = set()

    def _note(self, name: str) -> None:
        self.called.add(name)
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            self.on_loop.append(name)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        options: Mapping[str, object] | None = None,
        end: ChatEnd = ChatEnd.NEW_TURN,
    ) -> EncodedChat:
        self._note("encode_chat")
        return super().encode_chat(messages, tools, options, end)

    def encode_text(self, text: str) -> tuple[int, ...]:
        self._note("encode_text")
        return super().encode_text(text)

    def answer_reader(self, tools: Sequence[Mapping[str, object]], reasoning: Reasoning) -> AnswerReader:
        self._note("answer_reader")
        return super().answer_reader(tools, reasoning)


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokenizer_is_waited_for_on_the_event_loop(stream: bool) -> None:
    encoder = WatchedEncoder()
    with EchoServer(encoder=encoder).served() as address, httpx.Client(base_url=address, timeout=60) as http:
        answer = http.post(RESPONSES, json={"input": "<think>why</think>so", "stream": stream})
        assert answer.status_code == 200 and '"reasoning_tokens":3' in answer.text.replace(": ", ":")
    assert encoder.called == {"encode_chat", "encode_text", "answer_reader"}
    assert encoder.on_loop == []


def test_a_response(server: EchoServer, http: httpx.Client) -> None:
    asked = {
        "input": "hé",
        "instructions": "i",
        "max_output_tokens": 50,
        "metadata": {"domain": "d"},
        "user": "me",
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "top_logprobs": 1,
        "tools": [FLAT_TOOL, {"type": "web_search", "external_web_access": True}],
        "previous_response_id": None,
    }
    response = http.post(RESPONSES, json=asked)
    assert response.headers["x-redraft-ignored"] == "reasoning.summary, text.verbosity, include, tools.web_search"
    answer = response.json()
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "echo")
    (message,) = answer["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    (part,) = message["content"]
    assert (part["type"], part["text"], part["annotations"]) == ("output_text", "ihé", [])
    assert [each["token"] for each in part["logprobs"]] == ["i", "h", "é"]
    assert answer["usage"]["input_tokens"] == 6 and answer["usage"]["output_tokens"] == 3
    assert (answer["metadata"], answer["tools"], answer["max_output_tokens"]) == ({"domain": "d"}, [FLAT_TOOL], 50)
    prompt = server.engine.tickets[-1].prompt
    assert (prompt.domain, prompt.client, prompt.store, prompt.logprobs) == ("d", "me", False, 1)
    messages, tools, options = server.encoder.chats[-1]
    assert messages == [{"role": "system", "content": "i"}, {"role": "user", "content": "hé"}]
    assert tools == [TOOL]
    assert options == {"reasoning_effort": "low", "enable_thinking": True}


def test_the_items_of_an_input_become_turns(server: EchoServer, http: httpx.Client) -> None:
    part = {"type": "output_text", "text": "a", "annotations": []}
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [part]},
        {"type": "function_call", "id": "fc", "call_id": "c1", "name": "now", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "broken"},
        {"type": "function_call_output", "call_id": "c1", "output": "12"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "13"}]},
        {"role": "user", "content": "v"},
    ]
    assert http.post(RESPONSES, json={"input": items}).status_code == 200
    call = {"type": "function", "function": {"name": "now", "arguments": {"a": 1}}}
    assert server.encoder.chats[-1][0] == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "u"},
        {
            "role": "assistant",
            "content": "a",
            "reasoning_content": "r",
            "tool_calls": [
                {"id": "c1", **call},
                {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "broken"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
        {"role": "tool", "tool_call_id": "c2", "content": "13"},
        {"role": "user", "content": "v"},
    ]


def test_a_response_stream_carries_the_same_as_the_json_answer(http: httpx.Client) -> None:
    asked = {"input": f"<think>why</think>so{CALL}{CALL}end", "tools": [FLAT_TOOL]}
    whole = http.post(RESPONSES, json=asked).json()
    events = data_of(http.post(RESPONSES, json={**asked, "stream": True}))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    output = events[-1]["response"]["output"]

    def shape(items: list[Any]) -> list[Any]:
        return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]

    assert shape(output) == shape(whole["output"])
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call", "message"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == output
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [(item["id"], item["type"]) for item in added] == [(item["id"], item["type"]) for item in output]
    for index, item in enumerate(output):
        own = [event for event in events if event.get("output_index") == index]
        delta = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert delta == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert all(event["item_id"] == item["id"] for event in own if "item_id" in event)


def test_a_response_that_was_cut_is_incomplete(http: httpx.Client) -> None:
    asked = {"input": "<tool_call>abcdef", "max_output_tokens": 13}
    whole = http.post(RESPONSES, json=asked).json()
    *events, last = data_of(http.post(RESPONSES, json={**asked, "stream": True}))
    assert last["type"] == "response.incomplete"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["response"]["output"], "the streamed item says so too"
    for answer in (whole, last["response"]):
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert answer["output"][0]["content"][0]["text"] == "<tool_call>ab"
        assert answer["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"input": "a", "previous_response_id": 1}, "previous_response_id"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "conversation": "c"}, "conversation"),
        ({"input": "a", "text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"input": "a", "truncation": "left"}, "truncation"),
        ({"input": "a", "tools": [{"name": "now"}]}, "tools.0"),
        ({"input": "x" * 4_000}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference"}]}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
    ],
)
def test_what_a_response_cannot_have_is_refused_by_name(http: httpx.Client, asked: dict[str, Any], param: str) -> None:
    response = http.post(RESPONSES, json=asked)
    assert response.json()["error"]["param"].startswith(param)
    assert_refused(response, response.json()["error"]["param"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_a_full_queue_is_refused_before_anything_is_encoded(path: str) -> None:
    server = EchoServer(engine=EchoEngine(full=True), limits=replace(LIMITS, max_body_bytes=20_000))
    with server.served() as address:
        response = httpx.post(address + path, content=b"{", headers={"content-type": "application/json"})
    assert_refused(response, None, 503)
    assert response.json()["error"]["type"] == "overloaded_error"
    assert response.headers["retry-after"] == "7"


FORMAT, STRUCTURE = {"type": "json_object"}, {"regex": "a"}


@pytest.mark.parametrize(
    ("route", "name", "asked", "fits"),
    [
        (CHAT, "ChatRequest", {"response_format": FORMAT}, True),
        (CHAT, "ChatRequest", {"structured_outputs": STRUCTURE, "response_format": {"type": "text"}}, True),
        (CHAT, "ChatRequest", {"structured_outputs": STRUCTURE, "response_format": FORMAT}, False),
        (CHAT, "ChatRequest", {"structured_outputs": {"regex": None}, "response_format": FORMAT}, True),
        (CHAT, "ChatRequest", {"tools": [TOOL], "tool_choice": "required"}, True),
        (CHAT, "ChatRequest", {"tools": [TOOL], "tool_choice": "required", "structured_outputs": STRUCTURE}, False),
        (CHAT, "ChatRequest", {"tools": [TOOL], "tool_choice": "required", "response_format": FORMAT}, True),
        (CHAT, "ChatRequest", {"tools": [TOOL], "tool_choice": "auto", "structured_outputs": STRUCTURE}, True),
        (COMPLETIONS, "CompletionRequest", {"structured_outputs": STRUCTURE, "response_format": FORMAT}, False),
        (COMPLETIONS, "CompletionRequest", {"structured_outputs": None, "response_format": FORMAT}, True),
        (RESPONSES, "ResponsesRequest", {"tools": [FLAT_TOOL], "tool_choice": "required"}, True),
        (
            RESPONSES,
            "ResponsesRequest",
            {"tools": [FLAT_TOOL], "tool_choice": "required", "text": {"format": FORMAT}},
            True,
        ),
        (RESPONSES, "ResponsesRequest", {"text": {"format": FORMAT}}, True),
    ],
)
def test_the_document_says_which_fields_exclude_each_other(
    http: httpx.Client, route: str, name: str, asked: dict[str, Any], fits: bool
) -> None:
    body = {CHAT: {"messages": user("a")}, COMPLETIONS: {"prompt": "a"}, RESPONSES: {"input": "a"}}[route] | asked
    components = http.get("/openapi.json").json()["components"]
    validate = fastjsonschema.compile({"$ref": f"#/components/schemas/{name}", "components": components})
    assert http.post(route, json=body).status_code == (200 if fits else 400)
    if fits:
        validate(body)
    else:
        with pytest.raises(fastjsonschema.JsonSchemaException):
            validate(body)


# ---------------------------------------------------------------------------------------------------- ends of the prompt


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, ChatEnd.NEW_TURN),
        ({"add_generation_prompt": True, "continue_final_message": False}, ChatEnd.NEW_TURN),
        ({"add_generation_prompt": None}, ChatEnd.NEW_TURN),
        ({"add_generation_prompt": False}, ChatEnd.CLOSED),
        ({"add_generation_prompt": False, "continue_final_message": True}, ChatEnd.CONTINUED),
        ({"continue_final_message": True}, ChatEnd.CONTINUED),
    ],
)
def test_the_prompt_of_a_chat_ends_as_vllm_has_it(
    server: EchoServer, http: httpx.Client, fields: dict[str, object], end: ChatEnd
) -> None:
    response = http.post(CHAT, json={"messages": [{"role": "user", "content": "a"}], **fields})
    assert response.status_code == 200
    assert "x-redraft-ignored" not in response.headers
    assert server.encoder.ends[-1] is end


def test_a_prompt_has_one_end(http: httpx.Client) -> None:
    both = {"add_generation_prompt": True, "continue_final_message": True}
    response = http.post(CHAT, json={"messages": [{"role": "user", "content": "a"}], **both})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "continue_final_message"
    assert "cannot both be true" in error["message"]


class Refusing(Codepoints):
    """An encoder whose template takes no chat."""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        options: Mapping[str, object] | None = None,
        end: ChatEnd = ChatEnd.NEW_TURN,
    ) -> EncodedChat:
        raise BadRequest("the model's chat template refuses these messages: no", field="messages")


def test_a_refusal_of_the_template_names_the_request_s_own_field() -> None:
    asked = [{"role": "user", "content": "a"}]
    with EchoServer(encoder=Refusing()).served() as address, httpx.Client(base_url=address, timeout=60) as http:
        for path, body, field in (
            (CHAT, {"messages": asked}, "messages"),
            (RESPONSES, {"input": "a"}, "input"),
            ("/v1/messages", {"messages": asked, "max_tokens": 4}, "messages"),
        ):
            response = http.post(path, json=body)
            assert response.status_code == 400
            assert "refuses these messages" in response.json()["error"]["message"]
            if path != "/v1/messages":
                assert response.json()["error"]["param"] == field
