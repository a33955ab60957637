"""What streams say of tokens while they run (`continuous_usage_stats`, which guidellm asks for), and of speculation."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": [{"type": "text", "text": "abcdefgh"}]}]},
    COMPLETIONS: {"prompt": ["abcdefgh", "ij"]},
}


def streamed(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = http.post(path, json={**BODIES[path], "max_tokens": 9, "ignore_eos": True, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("each", [1, 2])
def test_every_chunk_says_what_its_answer_has_used(http: httpx.Client, path: str, each: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = streamed(http, path, n=each, stream_options=options)
    by_answer: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        by_answer.setdefault(chunk["choices"][0]["index"], []).append(chunk["usage"])
    assert len(by_answer) == each * (1 if path == CHAT else 2)
    for index, usages in by_answer.items():
        completed = [usage["completion_tokens"] for usage in usages]
        assert completed == sorted(completed) and completed[-1] == (8 if path == CHAT or index < each else 2)
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
        assert len({usage["prompt_tokens"] for usage in usages}) == 1
        # How much of a prompt was cached is known at its answer's end.
        assert all("prompt_tokens_details" not in usage for usage in usages)
    assert last["choices"] == [] and last["usage"]["prompt_tokens_details"] is not None
    assert last["usage"]["completion_tokens"] == sum(usages[-1]["completion_tokens"] for usages in by_answer.values())
    first_of_each = [usages[0]["prompt_tokens"] for index, usages in by_answer.items() if index % each == 0]
    assert last["usage"]["prompt_tokens"] == sum(first_of_each)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "options",
    [
        None,
        {},
        {"include_usage": True},
        {"include_usage": True, "continuous_usage_stats": False},
        {"include_usage": True, "continuous_usage_stats": None},
        {"include_usage": False, "continuous_usage_stats": True},
        {"continuous_usage_stats": True},
    ],
)
def test_no_chunk_does_otherwise(http: httpx.Client, path: str, options: dict[str, Any] | None) -> None:
    """As in vLLM, which asks for include_usage too."""
    chunks = streamed(http, path, stream_options=options)
    used = [chunk for chunk in chunks if chunk.get("usage") is not None]
    assert used == (chunks[-1:] if options and options.get("include_usage") else [])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_the_histogram_is_of_all_answers(http: httpx.Client, path: str, stream: bool) -> None:
    if stream:
        found = [chunk["metrics"]["speculative_decoding"] for chunk in streamed(http, path, n=2) if "metrics" in chunk]
        assert len(found) == (2 if path == CHAT else 4)
    else:
        answer = http.post(path, json={**BODIES[path], "max_tokens": 9, "n": 2}).json()
        found = [answer["metrics"]["speculative_decoding"]]
        assert found[0]["num_spec_steps"] == (16 if path == CHAT else 20)
    for stats in found:
        histogram = stats["acceptance_histogram"]
        assert sum(histogram) == stats["num_spec_steps"]
        assert sum(j * count for j, count in enumerate(histogram)) == stats["num_accepted_draft_tokens"]
