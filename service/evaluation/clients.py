"""HTTP clients for measurements: several at a time, each sending one streamed request after another, with arrival times."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from service.core import RedraftError
from service.evaluation.prompts import PromptLine


@dataclass(slots=True)
class Answer:
    """One request and what came back.

    started, ended: time.monotonic() when it was sent and when its stream was complete. arrivals: of each event with text.
    count: output tokens, the end token among them. tokens, calls: token ids and target calls, where the server reports them.
    adapters: versions that drafted. error: why it failed, None when it did not.
    """

    line: PromptLine
    started: float = field(default_factory=time.monotonic)
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
"""client, prompt, max_tokens -> the answer to one streamed greedy request. Never raises: failures are in Answer.error."""
TakeEvent = Callable[[Answer, Any], None]
"""Adds the JSON of one event to the answer."""


def ask_generate(client: httpx.Client, line: PromptLine, max_tokens: int) -> Answer:
    """An Ask for `POST /generate` of this server."""
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

    return _stream(client, Answer(line), "/generate", body, take)


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

    return _stream(client, Answer(line), "/v1/chat/completions", body, take)


def _stream(client: httpx.Client, answer: Answer, path: str, body: Mapping[str, object], take: TakeEvent) -> Answer:
    """Send the request and fill the answer from the events of its stream."""
    try:
        with client.stream("POST", path, json=body) as response:
            if response.is_error:
                answer.error = f"{response.status_code} {response.read().decode(errors='replace')[:200]}"
            else:
                _take_events(response.iter_lines(), answer, take)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if answer.error is None and not answer.ended:
        answer.error = "the stream ended early"
    return answer


def _take_events(lines: Iterator[str], answer: Answer, take: TakeEvent) -> None:
    """Read server-sent events until the stream ends or an error event comes. Sets `ended` at [DONE]."""
    event = ""
    for text in lines:
        if text.startswith("event:"):
            event = text.removeprefix("event:").strip()
        if not text.startswith("data:"):
            continue
        payload = text.removeprefix("data:").strip()
        if payload == "[DONE]":
            answer.ended = time.monotonic()
            continue
        item = json.loads(payload)
        if event == "error":
            answer.error = str(item)
            return
        take(answer, item)


class Clients:
    """`clients` threads that send `lines` one after another until there are no more or `stop` is called.

    answers: finished ones, failed ones among them, in the order in which they ended. pause_seconds: what each client waits
    between an answer and its next request; may be set at any time.
    """

    def __init__(
        self, url: str, lines: Iterator[PromptLine], *, clients: int, max_tokens: int, ask: Ask = ask_generate
    ) -> None:
        self.answers: list[Answer] = []
        self.pause_seconds = 0.0
        self._lines = lines
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._url = url
        self._ask = ask
        self._pool = ThreadPoolExecutor(clients, thread_name_prefix="client")
        self._work = [self._pool.submit(self._run) for _ in range(clients)]

    def raise_failures(self) -> None:
        """Raises RedraftError naming how many requests have failed so far, and the first one's error."""
        with self._lock:
            errors, count = [answer.error for answer in self.answers if answer.error], len(self.answers)
        if errors:
            raise RedraftError(f"{len(errors)} of {count} requests failed: {errors[0]}")

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
                self._stop.wait(self.pause_seconds)

    def wait(self, on_step: Callable[[int], None] = lambda done: None) -> None:
        """Wait until all lines are answered. on_step: answers so far. Re-raises what a client thread raised."""
        while not all(work.done() for work in self._work):
            on_step(len(self.answers))
            time.sleep(0.2)
        self.stop()

    def stop(self) -> None:
        """Send no more requests and wait for those under way. Re-raises what a client thread raised."""
        self._stop.set()
        for work in self._work:
            work.result()
        self._pool.shutdown()


def gaps_ms(answer: Answer) -> list[tuple[float, float, float]]:
    """(start, end, milliseconds) of each silence between two events of one stream; start and end are time.monotonic()."""
    return [(before, after, 1000.0 * (after - before)) for before, after in pairwise(answer.arrivals)]


def longest_gap_ms(answers: Sequence[Answer], spans: Sequence[tuple[float, float]], *, outside: bool) -> float:
    """The longest silence within a stream that touches one of the spans, or (outside) none of them, in milliseconds; 0 without
    any. spans: of time.monotonic()."""

    def touches(start: float, end: float) -> bool:
        return any(start < last and end > first for first, last in spans)

    found = (ms for answer in answers for start, end, ms in gaps_ms(answer) if touches(start, end) is not outside)
    return max(found, default=0.0)
