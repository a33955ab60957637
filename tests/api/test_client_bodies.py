"""Bodies of the shape that programs send, to a real server: texts are our own and short. At night the programs themselves run
(tests/clients).

Open WebUI 0.12.4: read on the way, on both routes; the page's fields are those that it sends to Open WebUI's own server, all at
once. LibreChat: read on the way from @librechat/agents 3.2.21.
Codex: codex-rs/codex-api/src/common.rs, `ResponsesApiRequest`; codex-rs/protocol/src/models.rs, `ResponseItem`.
Claude Code: Anthropic's API reference; the billing block: ggml-org/llama.cpp#20623.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.echo_engine import EchoServer

READ = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "required": ["path"],
    "additionalProperties": False,
}
CACHED = {"type": "ephemeral"}

WEBUI_CHAT: dict[str, Any] = {
    "stream": True,
    "model": "echo",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One."},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": [{"type": "text", "text": "Three?"}]},
    ],
    "stream_options": {"include_usage": True},
    "temperature": 0.7,
    "top_p": 0.9,
    "max_tokens": 64,
    "frequency_penalty": 0,
    "stop": ["<end>"],
    "seed": 1,
}
WEBUI_TOOLS: dict[str, Any] = {
    **WEBUI_CHAT,
    "tools": [{"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": READ}}],
    "tool_choice": "auto",
}
WEBUI_RESULT: dict[str, Any] = {
    **WEBUI_TOOLS,
    "messages": [
        {"role": "user", "content": "Read a.py."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I read it.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": '{"text": "pass"}'},
    ],
}
WEBUI_TASK: dict[str, Any] = {
    "model": "echo",
    "messages": [{"role": "user", "content": "### Task:\nA title for: one, two.\n### Output:\n{}"}],
    "stream": False,
}
WEBUI_PARAMETERS: dict[str, Any] = {
    **WEBUI_CHAT,
    "top_k": 40,
    "min_p": 0.05,
    "presence_penalty": 0.5,
    "repeat_penalty": 1,
    "repeat_last_n": 64,
    "mirostat": 0,
    "mirostat_eta": 0.1,
    "mirostat_tau": 5,
    "tfs_z": 1,
    "num_ctx": 4096,
    "num_keep": 24,
    "num_batch": 512,
    "num_thread": 2,
    "num_gpu": 1,
    "use_mmap": True,
    "use_mlock": True,
    "keep_alive": "5m",
    "think": True,
    "reasoning_effort": "medium",
    "logit_bias": {"5": -100},
    "response_format": {"type": "json_object"},
}
"""Every parameter of a chat or a model that its settings offer and this server does not refuse."""
WEBUI_PAGE: dict[str, Any] = {
    **WEBUI_CHAT,
    "params": {"temperature": 0.5, "function_calling": "native", "stream_response": True},
    "files": [],
    "filter_ids": [],
    "tool_ids": ["server:1"],
    "tool_servers": [],
    "features": {"voice": False, "image_generation": False, "code_interpreter": False, "web_search": False},
    "variables": {"{{USER_NAME}}": "A", "{{CURRENT_DATE}}": "2026-11-29"},
    "model_item": {"id": "echo", "object": "model", "owned_by": "openai", "info": {"meta": {"capabilities": {}}}},
    "session_id": "b2c3d4",
    "chat_id": "5e551011-0000-4000-8000-000000000000",
    "folder_id": None,
    "id": "5e551011-0000-4000-8000-000000000001",
    "parent_id": None,
    "user_message": {"id": "u", "parentId": None, "childrenIds": [], "role": "user", "content": "Three?"},
    "background_tasks": {"title_generation": True, "tags_generation": True, "follow_up_generation": True},
    "metadata": {
        "user_id": "a1b2c3",
        "chat_id": "5e551011-0000-4000-8000-000000000000",
        "tool_ids": None,
        "files": None,
        "features": {"web_search": False},
        "variables": {},
        "direct": False,
        "params": {"function_calling": "native", "stream_delta_chunk_size": None},
        "task": "title_generation",
        "task_body": {"messages": [{"role": "user", "content": "One."}]},
    },
}
WEBUI_RESPONSES: dict[str, Any] = {
    "stream": True,
    "model": "echo",
    "temperature": 0.5,
    "top_k": 40,
    "max_output_tokens": 200,
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Read a.py."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I read."}]},
        {"type": "function_call", "call_id": "call_1", "name": "read", "arguments": '{"path": "a.py"}', "id": "fc_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "pass"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is empty."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
    ],
    "tools": [{"type": "function", "name": "read", "description": "Reads.", "parameters": READ, "strict": False}],
}
LIBRECHAT: dict[str, Any] = {
    "model": "echo",
    "temperature": 0.5,
    "top_p": 0.9,
    "user": "5e551011000040008000abcd",
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 200,
    "tools": WEBUI_TOOLS["tools"],
    "messages": [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": [{"type": "text", "text": "Read a.py."}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path":"a.py"}'}}
            ],
        },
        {"role": "tool", "content": "pass", "name": "read", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "It is empty."},
        {"role": "user", "content": "Thank you."},
    ],
}
LIBRECHAT_TITLE: dict[str, Any] = {
    "model": "echo",
    "user": "5e551011000040008000abcd",
    "stream": False,
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "extract",
            "schema": {
                "type": "object",
                "properties": {"title": {"type": "string", "description": "A title in 5 words or less"}},
                "required": ["title"],
            },
        },
    },
    "messages": [{"role": "user", "content": "A title for:\n\nUser: One?\nAI: Two."}],
}
LIBRECHAT_RESPONSES: dict[str, Any] = {
    "model": "echo",
    "temperature": 0.5,
    "top_p": 0.9,
    "user": "5e551011000040008000abcd",
    "stream": True,
    "text": {},
    "max_output_tokens": 200,
    "tools": [{"type": "function", "name": "read", "description": "Reads.", "parameters": READ, "strict": None}],
    "input": [
        {"type": "message", "role": "system", "content": "You are brief."},
        {"type": "message", "role": "user", "content": "Read a.py."},
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_1",
            "name": "read",
            "arguments": '{"path": "a.py"}',
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "pass"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "It is empty.", "annotations": [], "logprobs": None}],
        },
        {"type": "message", "role": "user", "content": "Thank you."},
    ],
}
CODEX: dict[str, Any] = {
    "model": "echo",
    "instructions": "You write code.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read only."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a.py"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Read it."}]},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": READ},
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits.",
            "format": {"type": "grammar", "syntax": "lark"},
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "5e551011-0000-4000-8000-000000000000",
    "text": {"verbosity": "medium"},
}
CLAUDE_CODE: dict[str, Any] = {
    "model": "echo",
    "max_tokens": 32_000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"},
        {"type": "text", "text": "You write code.", "cache_control": CACHED},
        {"type": "text", "text": "The day is Monday.", "cache_control": CACHED},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Read a.py."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I read it.", "signature": "abc"},
                {"type": "text", "text": "Reading."},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a.py"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "pass"}]},
                {"type": "text", "text": "Go on.", "cache_control": CACHED},
            ],
        },
    ],
    "tools": [{"name": "Read", "description": "Reads.", "input_schema": READ, "cache_control": CACHED}],
    "metadata": {"user_id": json.dumps({"device_id": "a" * 64, "account_uuid": "", "session_id": "b" * 36})},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "temperature": 1,
    "stream": True,
}
BODIES = {
    "webui-chat": ("/v1/chat/completions", WEBUI_CHAT, "data: [DONE]"),
    "webui-tools": ("/v1/chat/completions", WEBUI_TOOLS, "data: [DONE]"),
    "webui-result": ("/v1/chat/completions", WEBUI_RESULT, "data: [DONE]"),
    "webui-parameters": ("/v1/chat/completions", WEBUI_PARAMETERS, "data: [DONE]"),
    "webui-page": ("/v1/chat/completions", WEBUI_PAGE, "data: [DONE]"),
    "webui-title": ("/v1/chat/completions", {**WEBUI_TASK, "max_tokens": 1000}, "data: [DONE]"),
    "webui-tags-and-follow-ups": ("/v1/chat/completions", WEBUI_TASK, "data: [DONE]"),
    "webui-emoji": ("/v1/chat/completions", {**WEBUI_TASK, "max_tokens": 4}, "data: [DONE]"),
    "webui-new-model": ("/v1/chat/completions", {**WEBUI_TASK, "max_completion_tokens": 100}, "data: [DONE]"),
    "webui-responses": ("/v1/responses", WEBUI_RESPONSES, "event: response.completed"),
    "librechat": ("/v1/chat/completions", LIBRECHAT, "data: [DONE]"),
    "librechat-title": ("/v1/chat/completions", LIBRECHAT_TITLE, "data: [DONE]"),
    "librechat-responses": ("/v1/responses", LIBRECHAT_RESPONSES, "event: response.completed"),
    "codex": ("/v1/responses", CODEX, "event: response.completed"),
    "claude-code": ("/v1/messages?beta=true", CLAUDE_CODE, "event: message_stop"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_answered_streamed_and_whole(http: httpx.Client, name: str) -> None:
    path, body, last = BODIES[name]
    options = {key: value for key, value in body.items() if key != "stream_options"}
    whole = http.post(path, json={**options, "stream": False})
    assert whole.status_code == 200, whole.text
    streamed = http.post(path, json={**body, "stream": True})
    assert streamed.status_code == 200 and last in streamed.text and '"error":{' not in streamed.text, streamed.text


def test_claude_code_counts_tokens(http: httpx.Client) -> None:
    body = {name: CLAUDE_CODE[name] for name in ("model", "system", "messages", "tools")}
    counted = http.post("/v1/messages/count_tokens?beta=true", json=body)
    assert counted.status_code == 200 and counted.json()["input_tokens"] > 20


def test_a_block_that_changes_with_every_request_does_not_reach_the_model(
    server: EchoServer, http: httpx.Client
) -> None:
    """It would keep prompts from sharing a beginning."""
    system: list[Any] = []
    for cch in ("fa690", "0b1c2"):
        text = f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={cch};"
        asked = {**CLAUDE_CODE, "stream": False, "system": [{"type": "text", "text": text}, *CLAUDE_CODE["system"][1:]]}
        assert http.post("/v1/messages", json=asked).status_code == 200
        system.append(server.encoder.chats[-1][0][0])
    assert system == [{"role": "system", "content": "You write code.The day is Monday."}] * 2


def test_what_is_ignored_is_named(http: httpx.Client) -> None:
    codex = http.post("/v1/responses", json={**CODEX, "stream": False}).headers["x-redraft-ignored"]
    assert codex == "reasoning.summary, text.verbosity, include, prompt_cache_key, tools.custom, tools.web_search"
    claude = http.post("/v1/messages?beta=true", json={**CLAUDE_CODE, "stream": False}).headers["x-redraft-ignored"]
    assert claude == (
        "messages.content.signature, messages.content.cache_control, system.cache_control, tools.cache_control, "
        "context_management, max_tokens, beta"
    )


def test_what_open_webui_s_page_says_of_itself_is_ignored_by_name(server: EchoServer, http: httpx.Client) -> None:
    page = http.post("/v1/chat/completions", json=WEBUI_PAGE)
    assert page.headers["x-redraft-ignored"] == (
        "params, tool_ids, features, variables, model_item, session_id, chat_id, id, user_message, background_tasks"
    )
    asked = server.engine.tickets[-1].prompt
    plain = http.post("/v1/chat/completions", json=WEBUI_CHAT)
    assert "x-redraft-ignored" not in plain.headers
    assert server.engine.tickets[-1].prompt.sampling == asked.sampling
    parameters = http.post("/v1/chat/completions", json=WEBUI_PARAMETERS).headers["x-redraft-ignored"]
    assert parameters == (
        "repeat_last_n, mirostat_eta, mirostat_tau, tfs_z, num_ctx, num_keep, num_batch, num_thread, num_gpu, use_mmap, "
        "use_mlock, keep_alive, think"
    )


def test_what_a_user_of_open_webui_chose_and_is_not_served_is_refused_by_name(http: httpx.Client) -> None:
    for name, value in (("repeat_penalty", 1.1), ("mirostat", 2)):
        refused = http.post("/v1/chat/completions", json={**WEBUI_CHAT, name: value})
        assert refused.status_code == 400 and refused.json()["error"]["message"] == f"{name} is not served"


@pytest.mark.parametrize("name", ["webui-result", "webui-responses", "librechat", "librechat-responses"])
def test_past_calls_and_their_results_reach_the_model(server: EchoServer, http: httpx.Client, name: str) -> None:
    path, body, _ = BODIES[name]
    assert http.post(path, json=body).status_code == 200
    chat: Any = server.encoder.chats[-1]
    messages, tools, _ = chat
    (called,) = [message["tool_calls"] for message in messages if message.get("tool_calls")]
    assert called[0]["function"] == {"name": "read", "arguments": {"path": "a.py"}}
    (result,) = [message["content"] for message in messages if message["role"] == "tool"]
    assert "pass" in result and [tool["function"]["name"] for tool in tools] == ["read"]
