"""Batches of prompts beyond what the queue holds: they are queued in turn, and given up with their client."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from service.core import Overloaded, Prompt, RedraftError, Sink, Unavailable
from service.core import Place as QueuePlace
from tests.support.echo_engine import LIMITS, EchoEngine, EchoServer, EchoTicket
from tests.support.waiting import until

COMPLETIONS = "/v1/completions"


class CountingEngine(EchoEngine):
    """Knows how many requests were under way at a time, and may refuse those that come without a reserved place."""

    def __init__(self, refuse: Callable[[int], RedraftError | None] = lambda number: None, **more: Any) -> None:
        super().__init__(**more)
        self.refuse = refuse
        self.asked = self.most = 0

    def submit(self, prompt: Prompt, sink: Sink, place: QueuePlace | None = None, *, route: str = "") -> EchoTicket:
        if place is None:
            self.asked += 1
            if (error := self.refuse(self.asked)) is not None:
                raise error
        ticket = super().submit(prompt, sink, place, route=route)
        self.most = max(self.most, len(self.requests()))
        return ticket


def texts(count: int) -> list[str]:
    return [f"{i:03}" for i in range(count)]


def choices(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    found = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    return [choice["text"] for choice in found]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("each", [1, 2])
def test_many_prompts_are_answered_in_turn(stream: bool, each: int) -> None:
    engine = CountingEngine(pause=0.002)
    with EchoServer(engine=engine).served() as address, httpx.Client(base_url=address, timeout=60) as http:
        body = {"prompt": texts(100), "n": each, "max_tokens": 9, "stream": stream}
        answer = http.post(COMPLETIONS, json=body)
        expected = [text for text in texts(100) for _ in range(each)]
        if stream:
            assert answer.text.count('"finish_reason":"stop"') == len(expected) and "data: [DONE]" in answer.text
        else:
            assert choices(answer) == expected
            assert answer.json()["usage"]["prompt_tokens"] == 300
            assert answer.json()["usage"]["completion_tokens"] == 300 * each
    assert LIMITS.max_answers is not None and 1 <= engine.most <= LIMITS.max_answers // 2
    assert engine.reserved == 0 and len(engine.tickets) == len(expected)


def test_a_batch_may_take_longer_than_one_of_its_answers_may() -> None:
    server = EchoServer(engine=EchoEngine(pause=0.05), limits=replace(LIMITS, max_answers=1, request_timeout=0.6))
    with server.served() as address, httpx.Client(base_url=address, timeout=60) as http:
        began = time.monotonic()
        assert choices(http.post(COMPLETIONS, json={"prompt": texts(8), "max_tokens": 9})) == texts(8)
        assert time.monotonic() - began > 0.6
    assert server.value('redraft:requests_failed_total{code="timeout"}') == 0


@pytest.mark.parametrize("most", [1, 2, 3])
def test_small_queues_take_one_prompt_at_a_time_at_least(most: int) -> None:
    engine = CountingEngine(pause=0.002)
    server = EchoServer(engine=engine, limits=replace(LIMITS, max_answers=most))
    with server.served() as address, httpx.Client(base_url=address, timeout=60) as http:
        assert choices(http.post(COMPLETIONS, json={"prompt": texts(20), "max_tokens": 9})) == texts(20)
    assert engine.most == 1


def test_a_full_queue_is_asked_again() -> None:
    """Others took the places: prompts that are left wait, and none is lost."""
    engine = CountingEngine(lambda number: Overloaded("the queue is full", 1) if number % 3 else None)
    with EchoServer(engine=engine).served() as address, httpx.Client(base_url=address, timeout=60) as http:
        assert choices(http.post(COMPLETIONS, json={"prompt": texts(30), "max_tokens": 9})) == texts(30)
    assert engine.asked > 30


def test_a_server_that_shuts_down_fails_the_whole_batch() -> None:
    engine = CountingEngine(lambda number: Unavailable("the server is shutting down") if number > 5 else None)
    server = EchoServer(engine=engine)
    with server.served() as address, httpx.Client(base_url=address, timeout=60) as http:
        refused = http.post(COMPLETIONS, json={"prompt": texts(30), "max_tokens": 9})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        until(lambda: not engine.requests())
    assert len(engine.tickets) <= 6 + 5


def test_an_answer_that_fails_ends_the_batch() -> None:
    engine = CountingEngine(break_after=2)
    with EchoServer(engine=engine).served() as address, httpx.Client(base_url=address, timeout=60) as http:
        assert http.post(COMPLETIONS, json={"prompt": texts(30), "max_tokens": 9}).status_code == 503
        until(lambda: not engine.requests())
        time.sleep(0.05)
    assert len(engine.tickets) < 30


def test_a_client_that_leaves_gives_up_what_was_not_begun() -> None:
    engine = CountingEngine(pause=0.05)
    with EchoServer(engine=engine).served() as address, httpx.Client(base_url=address, timeout=0.3) as http:
        with pytest.raises(httpx.ReadTimeout):
            http.post(COMPLETIONS, json={"prompt": texts(99), "max_tokens": 9})
        until(lambda: bool(engine.tickets) and not engine.requests())
        begun = len(engine.tickets)
        time.sleep(0.2)
        assert len(engine.tickets) == begun < 99


def test_the_whole_batch_is_checked_before_any_of_it_runs(server: EchoServer, http: httpx.Client) -> None:
    before = len(server.engine.tickets)
    refused = http.post(COMPLETIONS, json={"prompt": [*texts(20), "a" * 4000], "max_tokens": 9})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert len(server.engine.tickets) == before and server.engine.reserved == 0


def test_the_time_to_the_first_token_begins_with_a_prompts_turn() -> None:
    server = EchoServer(engine=CountingEngine(pause=0.02), limits=replace(LIMITS, max_answers=1))
    with server.served() as address, httpx.Client(base_url=address, timeout=60) as http:
        choices(http.post(COMPLETIONS, json={"prompt": texts(10), "max_tokens": 9}))
        seconds = server.value("redraft:time_to_first_token_seconds_sum") / 10
    assert seconds < 0.2
