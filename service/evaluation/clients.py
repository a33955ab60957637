"""Clients: several at a time, each streaming one answer after another over HTTP, noting when every piece arrived."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from service.evaluation.prompts import PromptLine


@dataclass(slots=True)
class Answer:
    """begun, ended: time.monotonic() when it was asked and when its stream was complete. arrivals: of every event with tokens.
    count: output tokens, the end token among them. tokens, calls: their ids and the target calls behind them, where the server
    tells. error: what went wrong, None when nothing did."""

    line: PromptLine
    begun: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    text: str = ""
    count: int = 0
    tokens: list[int] = field(default_factory=list[int])
    arrivals: list[float] = field(default_factory=list[float])
    adapters: list[int] = field(default_factory=list[int])
    prompt_tokens: int = 0
    calls: int = 0
    error: str | None = None


Ask = Callable[[httpx.Client, PromptLine, int], Answer]
"""client, prompt, max_tokens -> one streamed greedy answer. Never raises: failures are what is being counted."""


def ask(client: httpx.Client, line: PromptLine, max_tokens: int) -> Answer:
    """An Ask for this server."""
    body = {
        "prompt": line.prompt,
        "domain": line.domain,
        "max_tokens": max_tokens,
        "stream": True,
        "return_tokens": True,
    }

    def take(answer: Answer, item: Any) -> None:
        if "finish_reason" in item:
            answer.adapters = item["timings"]["adapters"]
            answer.calls = item["timings"]["rounds"]
            answer.prompt_tokens = item["usage"]["prompt_tokens"]
            answer.tokens = item["tokens"]
            answer.count = len(answer.tokens)
        elif item.get("tokens"):
            answer.text += item["text"]
            answer.arrivals.append(time.monotonic())

    return _ask(client, Answer(line), "/generate", body, take)


def ask_chat(client: httpx.Client, line: PromptLine, max_tokens: int) -> Answer:
    """An Ask for servers with OpenAI's chat completions."""
    body = {
        "messages": [{"role": "user", "content": line.prompt}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }

    def take(answer: Answer, item: Any) -> None:
        if usage := item.get("usage"):
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.count = usage["completion_tokens"]
        for choice in item["choices"]:
            if text := choice["delta"].get("content"):
                answer.text += text
                answer.arrivals.append(time.monotonic())

    return _ask(client, Answer(line), "/v1/chat/completions", body, take)


def _ask(
    client: httpx.Client, answer: Answer, path: str, body: Mapping[str, object], take: Callable[[Answer, Any], None]
) -> Answer:
    """Fills the answer from the stream's events, each of which `take` looks at."""
    finished = False
    try:
        with client.stream("POST", path, json=body) as response:
            if response.is_error:
                answer.error = f"{response.status_code} {response.read().decode(errors='replace')[:200]}"
                return answer
            event = ""
            for text in response.iter_lines():
                if text.startswith("event:"):
                    event = text.removeprefix("event:").strip()
                if not text.startswith("data:"):
                    continue
                payload = text.removeprefix("data:").strip()
                if payload == "[DONE]":
                    finished = True
                    answer.ended = time.monotonic()
                    continue
                item = json.loads(payload)
                if event == "error":
                    answer.error = str(item)
                    break
                take(answer, item)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if answer.error is None and not finished:
        answer.error = "the stream ended early"
    return answer


class Traffic:
    """`clients` threads that ask `lines` one after another until they are used up or `stop` is called. rest: seconds that each
    waits between an answer and its next question; may be set at any time."""

    def __init__(self, url: str, lines: Iterator[PromptLine], *, clients: int, max_tokens: int, ask: Ask = ask) -> None:
        self.answers: list[Answer] = []
        self.rest = 0.0
        self._lines = lines
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._url = url
        self._ask = ask
        self._pool = ThreadPoolExecutor(clients, thread_name_prefix="client")
        self._work = [self._pool.submit(self._run) for _ in range(clients)]

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, trust_env=False, timeout=600.0) as client:
            while not self._stop.is_set():
                with self._lock:
                    line = next(self._lines, None)
                if line is None:
                    return
                answer = self._ask(client, line, self._max_tokens)
                with self._lock:
                    self.answers.append(answer)
                self._stop.wait(self.rest)

    def wait(self, on_step: Callable[[int], None] = lambda done: None) -> None:
        """Until all lines are answered."""
        while not all(work.done() for work in self._work):
            on_step(len(self.answers))
            time.sleep(0.2)
        self.stop()

    def stop(self) -> None:
        """Let running answers finish, ask nothing more. Re-raises what a client raised."""
        self._stop.set()
        for work in self._work:
            work.result()
        self._pool.shutdown()


def longest_gap_ms(answers: list[Answer], inside: list[tuple[float, float]], outside: bool) -> float:
    """The longest silence between two events of one stream that touches one of the spans `inside`, or (outside) none."""
    longest = 0.0
    for answer in answers:
        for before, after in zip(answer.arrivals, answer.arrivals[1:], strict=False):
            touches = any(before < end and after > start for start, end in inside)
            if touches is not outside:
                longest = max(longest, after - before)
    return 1000.0 * longest
