"""Clients: several at a time, each streaming one answer after another over HTTP, noting when every piece arrived."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx

from service.evaluation.prompts import PromptLine


@dataclass(slots=True)
class Answer:
    """arrivals: time.monotonic() of every event with tokens. error: what went wrong, None when nothing did."""

    line: PromptLine
    tokens: list[int] = field(default_factory=list[int])
    arrivals: list[float] = field(default_factory=list[float])
    adapters: list[int] = field(default_factory=list[int])
    prompt_tokens: int = 0
    error: str | None = None


def ask(client: httpx.Client, line: PromptLine, max_tokens: int, store: bool = True) -> Answer:
    """One streamed greedy answer. Never raises: failures are what is being counted."""
    answer = Answer(line)
    body = {
        "prompt": line.prompt,
        "domain": line.domain,
        "max_tokens": max_tokens,
        "stream": True,
        "return_tokens": True,
        "store": store,
    }
    finished = False
    try:
        with client.stream("POST", "/generate", json=body) as response:
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
                    continue
                item = json.loads(payload)
                if event == "error":
                    answer.error = str(item)
                    break
                if "finish_reason" in item:
                    answer.adapters = item["timings"]["adapters"]
                    answer.prompt_tokens = item["usage"]["prompt_tokens"]
                    answer.tokens = item["tokens"]
                elif item.get("tokens"):
                    answer.arrivals.append(time.monotonic())
    except (httpx.HTTPError, ValueError, KeyError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if answer.error is None and not finished:
        answer.error = "the stream ended early"
    return answer


class Traffic:
    """`clients` threads that ask `lines` one after another until they are used up or `stop` is called."""

    def __init__(self, url: str, lines: Iterator[PromptLine], *, clients: int, max_tokens: int) -> None:
        self.answers: list[Answer] = []
        self._lines = lines
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._url = url
        self._pool = ThreadPoolExecutor(clients, thread_name_prefix="client")
        self._work = [self._pool.submit(self._run) for _ in range(clients)]

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=600.0) as client:
            while not self._stop.is_set():
                with self._lock:
                    line = next(self._lines, None)
                if line is None:
                    return
                answer = ask(client, line, self._max_tokens)
                with self._lock:
                    self.answers.append(answer)

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
