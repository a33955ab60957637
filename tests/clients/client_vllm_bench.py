"""Requests of the shape that `vllm bench serve` sends (vllm/benchmarks/lib/endpoint_request_func.py, 0.11), and times taken as
it takes them: the first chunk with a choice is the first token."""

import asyncio
import json
import sys
import time

import aiohttp
from served_times import FirstTokens, check_speculation

URL, TOKENS, COUNT = sys.argv[1], 24, 6
PROMPT = "The sea is wide and the ships are slow, so letters take long to arrive. " * 18
COMPLETION = {
    "model": "smollm2-135m",
    "temperature": 0.0,
    "repetition_penalty": 1.0,
    "max_tokens": TOKENS,
    "logprobs": None,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
}
CHAT = {
    "model": "smollm2-135m",
    "temperature": 0.0,
    "max_completion_tokens": TOKENS,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
}


async def streamed(session, path, body):
    """Seconds to the first chunk with a choice, the text, the usage and what is said of speculation."""
    started, first, text, usage, stats = time.perf_counter(), None, "", None, None
    async with session.post(URL + path, json=body, headers={"authorization": "Bearer none"}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data.startswith(":") or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if choices := chunk.get("choices"):
                first = first or time.perf_counter() - started
                text += choices[0].get("text") or choices[0].get("delta", {}).get("content") or ""
            elif chunk.get("usage"):
                usage = chunk["usage"]
            stats = (chunk.get("metrics") or {}).get("speculative_decoding") or stats
    assert usage["completion_tokens"] == TOKENS and text, (usage, text)
    check_speculation(stats)
    return first


async def main():
    async with aiohttp.ClientSession() as session:
        own = FirstTokens(URL)
        seconds = [
            await streamed(session, "/v1/completions", {**COMPLETION, "prompt": f"Letter {i}. {PROMPT}"})
            for i in range(COUNT)
        ]
        own.check(sum(seconds) / COUNT, COUNT)
        own, seconds = FirstTokens(URL), []
        for i in range(COUNT):
            content = [{"type": "text", "text": f"Letter {i}. {PROMPT}"}]
            messages = [{"role": "user", "content": content}]
            seconds.append(await streamed(session, "/v1/chat/completions", {**CHAT, "messages": messages}))
        own.check(sum(seconds) / COUNT, COUNT)


asyncio.run(main())
