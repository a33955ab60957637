"""Fields of clients' programs: accepted and named where they change nothing, absent where they ask for nothing, refused in a
sentence where they would change the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import fastjsonschema
import httpx
import pytest

from service.api.asking import ModelNames
from service.api.bodies import NEUTRAL_VALUES
from service.api.ignored import MAX_HEADER_CHARS
from tests.support.echo_engine import EchoServer

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT, GENERATE = "/v1/messages", "/v1/messages/count_tokens", "/generate"
HEADER = "x-redraft-ignored"
JSON = {"content-type": "application/json"}
USER: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    COMPLETIONS: {"prompt": "a"},
    RESPONSES: {"input": "a"},
    MESSAGES: {"messages": USER, "max_tokens": 5},
    COUNT: {"messages": USER},
    GENERATE: {"prompt": "a"},
}
MODELS = {
    CHAT: "ChatRequest",
    COMPLETIONS: "CompletionRequest",
    RESPONSES: "ResponsesRequest",
    MESSAGES: "MessagesRequest",
    COUNT: "CountRequest",
    GENERATE: "GenerateRequest",
}
ONLY_TRUE = {"spaces_between_special_tokens", "add_generation_prompt", "include_reasoning"}
ROUTES = pytest.mark.parametrize("path", BODIES)
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
THEN: dict[str, Any] = {"type": "function", "function": {"name": "then"}}


@pytest.fixture(scope="module")
def strict() -> Iterator[httpx.Client]:
    with EchoServer(strict=True).served() as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


def refusal(response: httpx.Response) -> tuple[str, str]:
    """The message and the field of a 400."""
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["message"], error["param"]


# ------------------------------------------------------------------------------------------------------ unknown fields


@ROUTES
@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_accepted_and_named(http: httpx.Client, path: str, stream: bool) -> None:
    more: dict[str, Any] = {"stream": stream} if path != COUNT else {}
    unknown = {"unheard_of": 1, "a,b\né": {"x": [1]}, "empty": {}, "nothing": None, "off": False}
    response = http.post(path, json={**BODIES[path], **more, **unknown})
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "unheard_of, a\\x2cb\\n\\xe9"
    assert HEADER not in http.post(path, json={**BODIES[path], **more, "nothing": None}).headers


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (" ", "\\x20"),
        ("", '""'),
        ("\t", "\\t"),
        (" a b ", "\\x20a\\x20b\\x20"),
        ("\x7f", "\\x7f"),
    ],
)
def test_any_name_is_a_header_s_value(http: httpx.Client, name: str, shown: str) -> None:
    response = http.post(CHAT, content=json.dumps({"messages": USER, name: 1}), headers=JSON)
    assert (response.status_code, response.headers[HEADER]) == (200, shown)
    response = http.post(CHAT, content=json.dumps({"messages": USER, "x": 1, name: 1}), headers=JSON)
    assert (response.status_code, response.headers[HEADER]) == (200, f"x, {shown}")


@ROUTES
def test_a_strict_server_refuses_unknown_fields_and_takes_the_known_ones(
    strict: httpx.Client, http: httpx.Client, path: str
) -> None:
    for value in (1, None):
        body = {**BODIES[path], "unheard_of": value}
        assert refusal(strict.post(path, json=body)) == (
            "this server is strict and does not know unheard_of",
            "unheard_of",
        )
        assert http.post(path, json=body).status_code == 200
    assert strict.post(path, json=BODIES[path]).status_code == 200


def test_a_strict_server_still_ignores_what_well_known_clients_send(strict: httpx.Client) -> None:
    response = strict.post(CHAT, json={"messages": USER, "service_tier": "auto", "user": None})
    assert (response.status_code, response.headers[HEADER]) == (200, "service_tier")
    past = [*USER, {"role": "assistant", "content": "b", "id": "msg_1"}, *USER]
    assert refusal(strict.post(CHAT, json={"messages": past}))[1] == "messages.id"


def test_a_header_has_no_more_names_than_fit(http: httpx.Client) -> None:
    response = http.post(CHAT, json={"messages": USER, **{f"unheard_of_{i:04}": 1 for i in range(500)}})
    named = response.headers[HEADER].split(", ")
    assert len(response.headers[HEADER]) < MAX_HEADER_CHARS + 20
    assert named[-1] == f"and {500 - (len(named) - 1)} more" and len(named) > 50


PAST: list[tuple[dict[str, Any], str | None]] = [
    ({"annotations": [{"type": "url_citation"}]}, "messages.annotations"),
    ({"annotations": []}, None),
    ({"id": "msg_1"}, "messages.id"),
    ({"metadata": {}}, None),
    ({"metadata": {"a": 1}}, "messages.metadata"),
    ({"parsed": None}, None),
    ({"provider_specific_fields": None}, None),
    ({"provider_specific_fields": {"a": 1}}, "messages.provider_specific_fields"),
    ({"reasoning_details": []}, None),
    ({"reasoning_details": [{"type": "reasoning.text"}]}, "messages.reasoning_details"),
    ({"thinking_blocks": []}, None),
    ({"images": [], "audio": None, "refusal": None, "function_call": None, "tool_calls": []}, None),
    ({"refusal": "", "audio": {}, "function_call": False, "name": "", "tool_calls": None, "reasoning": ""}, None),
    ({"cache_control": {"type": "ephemeral"}}, "messages.cache_control"),
    ({"tool_calls": [{**CALL, "extra_content": {}}]}, None),
    (
        {"tool_calls": [{**CALL, "extra_content": {"google": 1}, "index": 0}]},
        "messages.tool_calls.index, messages.tool_calls.extra_content",
    ),
    (
        {"tool_calls": [{**CALL, "function": {**CALL["function"], "parsed_arguments": {"a": 1}}}]},
        "messages.tool_calls.function.parsed_arguments",
    ),
    (
        {"content": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]},
        "messages.content.cache_control",
    ),
]


@pytest.mark.parametrize(("fields", "named"), PAST, ids=lambda value: str(value)[:50])
def test_fields_that_clients_add_to_past_turns(http: httpx.Client, fields: dict[str, Any], named: str | None) -> None:
    past = {"role": "assistant", "content": "b", **fields}
    turns = [*USER, past, {"role": "tool", "tool_call_id": "c", "content": "r"}, *USER]
    response = http.post(CHAT, json={"messages": turns})
    assert response.status_code == 200, response.text
    assert response.headers.get(HEADER) == named


def test_what_tools_have_besides_does_not_reach_the_model(server: EchoServer, http: httpx.Client) -> None:
    function = {"name": "now", "description": "", "extra": 1}
    tool = {"type": "function", "strict": True, "cache_control": {"type": "ephemeral"}, "function": function}
    response = http.post(CHAT, json={"messages": USER, "tools": [tool]})
    assert response.headers[HEADER] == "tools.function.extra, tools.strict, tools.cache_control"
    assert server.encoder.chats[-1][1] == [{"type": "function", "function": {"name": "now", "description": ""}}]


# ------------------------------------------------------------------------------------------------------ absent values


@ROUTES
def test_neutral_values_of_every_optional_field_are_absent(http: httpx.Client, path: str) -> None:
    """And the document says so."""
    components = http.get("/openapi.json").json()["components"]
    model = components["schemas"][MODELS[path]]
    validate = fastjsonschema.compile({"$ref": f"#/components/schemas/{MODELS[path]}", "components": components})
    optional = sorted(model["properties"].keys() - BODIES[path].keys())
    assert len(optional) > 8
    for name in optional:
        for value in NEUTRAL_VALUES:
            body = {**BODIES[path], name: value}
            response = http.post(path, json=body)
            if value is False and name in ONLY_TRUE and (path, name) != (CHAT, "add_generation_prompt"):
                assert refusal(response) == (f"{name} is not served but as true", name)
                continue
            assert response.status_code == 200, (name, value, response.text)
            assert HEADER not in response.headers, (name, value)
            validate(body)


def test_empty_stop_strings_are_absent(server: EchoServer, http: httpx.Client) -> None:
    for path in (CHAT, COMPLETIONS, GENERATE):
        assert http.post(path, json={**BODIES[path], "stop": ["", "x", None]}).status_code == 200
        assert server.engine.tickets[-1].prompt.sampling.stop == ("x",)
        assert http.post(path, json={**BODIES[path], "stop": ""}).status_code == 200
        assert server.engine.tickets[-1].prompt.sampling.stop == ()


def test_what_is_valid_though_empty_is_read_so(server: EchoServer, http: httpx.Client) -> None:
    """A flag that is false, and the schema of any JSON."""
    body = {"messages": USER, "store": False, "structured_outputs": {"json": {}}}
    assert http.post(CHAT, json=body).status_code == 200
    prompt = server.engine.tickets[-1].prompt
    assert prompt.store is False and prompt.constraint is not None


# ------------------------------------------------------------------------------------------------------------ refusals

IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
PART = "messages.0.content.0"


def saying(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, saying(IMAGE), "images are not served", PART),
    (CHAT, saying({"type": "input_audio"}), "audio is not served", PART),
    (CHAT, saying({"type": "video_url"}), "videos are not served", PART),
    (CHAT, saying({"type": "file", "text": "x"}), "files are not served", "messages.0.content.0.type"),
    (CHAT, saying({"type": "x\n"}), "content of type x\\n is not served", PART),
    (CHAT, {"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "images are not served", "messages.0.images"),
    (CHAT, {"modalities": ["text", "audio"], "audio": {"voice": "x"}}, "audio is not served", "modalities.1"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions are not served: give tools", "functions"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools of type web_search are not served", "tools.0.type"),
    (CHAT, {"tool_choice": {"type": "file_search"}}, "tool_choice of type file_search is not served", "tool_choice"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format of type xml is not served", "response_format"),
    (CHAT, {"typical_p": 0.5}, "typical_p is not served", "typical_p"),
    (CHAT, {"typical_p": True}, "typical_p is not served", "typical_p"),
    (COMPLETIONS, {"suffix": "b"}, "text behind the answer (suffix) is not served", "suffix"),
    (RESPONSES, {"input": [{"type": "input_image", "image_url": "x"}]}, "images are not served", "input.0.type"),
    (RESPONSES, {"input": [{"type": "input_text", "text": "x"}]}, "input of type input_text is not served", "input.0.type"),
    (RESPONSES, {"tool_choice": {"type": "web_search"}}, "tool_choice of type web_search is not served", "tool_choice"),
    (RESPONSES, {"input": saying({"type": "input_image"})["messages"]}, "images are not served", "input.0.content.0"),
    (MESSAGES, saying({"type": "image", "source": {}}), "images are not served", PART),
    (MESSAGES, {"system": [{"type": "document"}]}, "documents are not served", "system.0.type"),
    (MESSAGES, {"mcp_servers": [{"name": "x"}]}, "MCP servers are not served: give their tools", "mcp_servers"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more", "message", "param"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_is_not_served_is_said_in_a_sentence(
    http: httpx.Client, strict: httpx.Client, path: str, more: dict[str, Any], message: str, param: str
) -> None:
    body = {**BODIES[path], **more, "unheard_of": 1}
    assert refusal(http.post(path, json=body)) == (message, param)
    assert refusal(strict.post(path, json=body)) == (message, param)


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content must be a string or a list"),
    (CHAT, {"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0 must be an object"),
    (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "messages.0.tool_call_id is missing"),
    (CHAT, {"messages": [{"content": "a"}]}, "messages.0 must have a role"),
    (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function is missing"),
    (CHAT, {"tool_choice": "any"}, "tool_choice must be an object or 'auto', 'none' or 'required'"),
    (CHAT, {"temperature": -1, "seed": "x"}, "temperature must be at least 0; seed must be a whole number"),
    (COMPLETIONS, {"prompt": 5}, "prompt must be a string or a list"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt.1 must have at least 1 character"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt.1 must be a whole number"),
    (COMPLETIONS, {"prompt": [[1], ["a"]]}, "prompt.1.0 must be a whole number"),
    (RESPONSES, {"input": [5]}, "input.0 must be an object"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "c"}]}, "input.0.name is missing"),
    (MESSAGES, {"max_tokens": None}, "max_tokens must be a whole number"),
    (GENERATE, {"prompt": 5}, "prompt must be a string"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more", "message"), MISTAKES, ids=lambda value: str(value)[:50])
def test_mistakes_are_said_of_what_the_client_meant(
    http: httpx.Client, path: str, more: dict[str, Any], message: str
) -> None:
    assert refusal(http.post(path, json={**BODIES[path], **more}))[0] == message


# ------------------------------------------------------------------------------------------------- read as it was meant


def test_parts_of_every_type_are_read_by_their_text(server: EchoServer, http: httpx.Client) -> None:
    parts: list[Any] = [
        "a",
        {"type": "input_text", "text": "b"},
        {"text": "c"},
        {"type": "own", "text": "d"},
        {"type": None, "text": "e"},
    ]
    assert http.post(CHAT, json={"messages": [{"role": "user", "content": parts}]}).status_code == 200
    assert server.encoder.chats[-1][0][0]["content"] == "abcde"
    no = {"type": "refusal", "refusal": "no"}
    for past in ({"content": [no]}, {"content": None, "refusal": "no"}, {"content": "", "refusal": "no"}):
        assert http.post(CHAT, json={"messages": [*USER, {"role": "assistant", **past}, *USER]}).status_code == 200
        assert server.encoder.chats[-1][0][1]["content"] == "no"
    assert http.post(RESPONSES, json={"input": [{"role": "assistant", "content": [no]}, *USER]}).status_code == 200
    assert server.encoder.chats[-1][0][0]["content"] == "no"
    turns = [*USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c", "content": None}]
    assert http.post(CHAT, json={"messages": turns}).status_code == 200
    assert server.encoder.chats[-1][0][2]["content"] == ""


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"enable_thinking": True, "reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": True}),
        ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, {"enable_thinking": True}),
    ],
)
def test_whether_the_model_thinks(
    server: EchoServer, http: httpx.Client, more: dict[str, Any], options: dict[str, Any]
) -> None:
    assert http.post(CHAT, json={"messages": USER, **more}).status_code == 200
    assert server.encoder.chats[-1][2] == options


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_allowed_tools_are_the_only_ones(server: EchoServer, http: httpx.Client, path: str) -> None:
    def choice(mode: str, *names: str) -> dict[str, Any]:
        if path == CHAT:
            tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": name}} for name in names]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
        tools = [{"type": "function", "name": name} for name in names] + [{"type": "web_search"}]
        return {"type": "allowed_tools", "mode": mode, "tools": tools}

    tools = [NOW, THEN] if path == CHAT else [{"type": "function", **tool["function"]} for tool in (NOW, THEN)]
    body = {**BODIES[path], "tools": tools}
    free = http.post(path, json={**body, "tool_choice": choice("auto", "then")})
    assert free.status_code == 200, free.text
    assert server.encoder.chats[-1][1] == [THEN] and server.engine.tickets[-1].prompt.constraint is None
    assert http.post(path, json={**body, "tool_choice": choice("required", "then")}).status_code == 200
    assert server.encoder.chats[-1][1] == [THEN] and server.engine.tickets[-1].prompt.constraint is not None
    missing = http.post(path, json={**body, "tool_choice": choice("auto", "then", "never")})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "tool_not_found")


# ------------------------------------------------------------------------------------------------------ names of models


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT])
def test_any_name_of_a_model_is_answered_and_a_strict_server_lists_its_own(
    http: httpx.Client, strict: httpx.Client, path: str
) -> None:
    body = {**BODIES[path], "model": "other"}
    response = http.post(path, json=body)
    assert (response.status_code, response.headers[HEADER]) == (200, "model")
    assert response.json().get("model", "echo") == "echo"
    for name in ("gpt-4o", "", None):
        known = http.post(path, json={**body, "model": name})
        assert known.status_code == 200 and HEADER not in known.headers
        assert known.json().get("model", "echo") in {"echo", name}
    refused = strict.post(path, json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert "echo, gpt-4o" in refused.json()["error"]["message"]


def test_a_folder_is_known_by_its_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Qwen3-8B-4bit"
    folder.mkdir()
    assert ModelNames.of_target(str(folder), ["gpt"]).all == ["gpt", "Qwen3-8B-4bit", str(folder)]
    assert ModelNames.of_target(f"{folder}/", []).name == "Qwen3-8B-4bit"
    monkeypatch.chdir(folder)
    assert ModelNames.of_target(".", []).name == "Qwen3-8B-4bit"
    snapshot = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    assert ModelNames.of_target(str(snapshot), []).name == "Qwen/Qwen3-8B"
    assert ModelNames.of_target("smollm2-135m", ["gpt"]).all == ["gpt", "smollm2-135m"]
    assert ModelNames.of_target("Qwen/Qwen3-8B", []).all == ["Qwen/Qwen3-8B"]


FLAT = {"type": "function", "name": "now", "parameters": {"type": "object"}}
ANTHROPIC_TOOL = {"name": "now", "input_schema": {"type": "object"}}
SHAPE = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": SHAPE}}
FORCED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"tools": [NOW], "tool_choice": "required", "response_format": JSON_SCHEMA}),
    (CHAT, {"tools": [NOW], "tool_choice": NOW, "response_format": {"type": "json_object"}}),
    (
        CHAT,
        {
            "tools": [NOW],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW]}},
            "response_format": JSON_SCHEMA,
        },
    ),
    (
        RESPONSES,
        {
            "tools": [FLAT],
            "tool_choice": {"type": "function", "name": "now"},
            "text": {"format": {"type": "json_schema", "name": "now", "strict": True, "schema": SHAPE}},
        },
    ),
    (RESPONSES, {"tools": [FLAT], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}),
    (
        MESSAGES,
        {
            "tools": [ANTHROPIC_TOOL],
            "tool_choice": {"type": "any"},
            "output_config": {"format": {"type": "json_schema", "schema": SHAPE}},
        },
    ),
]


@pytest.mark.parametrize(("path", "more"), FORCED, ids=lambda value: str(value)[:50])
def test_a_forced_call_leaves_a_format_nothing_to_apply_to(
    server: EchoServer, http: httpx.Client, path: str, more: dict[str, Any]
) -> None:
    response = http.post(path, json={**BODIES[path], **more})
    assert response.status_code == 200, response.text
    constraint = server.engine.tickets[-1].prompt.constraint
    assert constraint is not None and constraint.grammar.text.startswith("lark: 1 tools, several:")
    # Without the choice it applies to what is no call.
    assert http.post(path, json={**BODIES[path], **more, "tool_choice": None}).status_code == 200
    constraint = server.engine.tickets[-1].prompt.constraint
    assert constraint is not None and ", or {" in constraint.grammar.text


def test_a_structured_output_beside_a_forced_call_is_refused(http: httpx.Client) -> None:
    body = {**BODIES[CHAT], "tools": [NOW], "tool_choice": "required", "structured_outputs": {"regex": "a"}}
    message, _ = refusal(http.post(CHAT, json=body))
    assert message == "forced calls cannot be combined with another format"


def test_tools_and_items_of_other_types_are_ignored_by_name(server: EchoServer, http: httpx.Client) -> None:
    hosted: list[dict[str, Any]] = [
        {"type": "mcp", "server_label": "x", "server_url": "https://x.example"},
        {"type": "file_search", "vector_store_ids": ["v"]},
        {"type": "image_generation"},
        {"type": "of, the\nfuture"},
    ]
    items: list[dict[str, Any]] = [
        *USER,
        {"type": "web_search_call", "id": "ws_1", "action": {"query": "q"}},
        {"type": "image_generation_call", "id": "ig_1", "result": "x"},
        {"type": "custom_tool_call", "call_id": "c", "name": "n", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "y"},
        {"type": "compaction", "encrypted_content": "x"},
    ]
    more = {"truncation": "auto", "stream_options": {"include_obfuscation": False}}
    response = http.post(RESPONSES, json={"input": items, "tools": [FLAT, *hosted], **more})
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == (
        "stream_options, truncation, tools.file_search, tools.image_generation, tools.mcp, tools.of\\x2c\\x20the\\nfuture, "
        "input.compaction, input.custom_tool_call, input.custom_tool_call_output, input.image_generation_call, "
        "input.web_search_call"
    )
    messages, tools, _ = server.encoder.chats[-1]
    assert messages == USER and [tool["function"] for tool in tools] == [
        {"name": "now", "parameters": {"type": "object"}}
    ]
    assert response.json()["truncation"] == "disabled"
    assert HEADER not in http.post(RESPONSES, json={"input": items[:1], "truncation": "disabled"}).headers
