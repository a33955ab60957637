"""Bodies of the shape that programs send which cannot run here, to a real server: texts are our own and short.

Open WebUI: backend/open_webui/routers/openai.py, `generate_chat_completion`, and its tasks (titles, tags).
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
WEBUI_TITLE: dict[str, Any] = {
    "model": "echo",
    "messages": [{"role": "user", "content": "A title for: one, two."}],
    "stream": False,
    "max_completion_tokens": 100,
}
WEBUI_TOOLS: dict[str, Any] = {
    **WEBUI_CHAT,
    "tools": [{"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": READ}}],
    "tool_choice": "auto",
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
    "webui-title": ("/v1/chat/completions", WEBUI_TITLE, "data: [DONE]"),
    "webui-tools": ("/v1/chat/completions", WEBUI_TOOLS, "data: [DONE]"),
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
