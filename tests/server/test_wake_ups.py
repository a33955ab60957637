"""How often the engine's thread wakes the event loop: once a round, and for an answer that is not streamed once in all."""

import asyncio
import json
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.engine.decoder import Decoder
from service.engine.rounds import RoundReport
from service.evaluation.server_process import LocalServer
from tests.support.scraped import scraped
from tests.support.tiny_server import in_process_server, write_pair
from tests.support.waiting import until

PROMPTS = ["abc", "hello there", "one two three", "the quick brown fox"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@dataclass
class Seen:
    """What the engine's thread did. Its first round waits for `go`; after `fails_after` rounds they raise."""

    fails_after: int | None = None
    rows: list[int] = field(default_factory=list[int])
    """Of every round."""
    awaited: list[int] = field(default_factory=list[int])
    """Rounds, from 1, of which a client waits for something: new tokens of a stream, or the end of an answer."""
    wake_ups: list[int] = field(default_factory=list[int])
    """For each wake-up, how many rounds there had been."""
    go: threading.Event = field(default_factory=threading.Event)

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        wake, decode = asyncio.BaseEventLoop.call_soon_threadsafe, Decoder.round

        def call_soon_threadsafe(
            loop: asyncio.BaseEventLoop, callback: Callable[..., Any], *args: Any, **kw: Any
        ) -> Any:
            if threading.current_thread().name == "redraft-mlx":
                self.wake_ups.append(len(self.rows))
            return wake(loop, callback, *args, **kw)

        def decode_round(decoder: Decoder, coming: int = 0) -> RoundReport:
            assert self.go.wait(60)
            if self.fails_after == len(self.rows):
                raise RuntimeError("no such luck")
            report = decode(decoder, coming)
            self.rows.append(len(report.rows))
            if any(row.prompt.client == "stream" or row.finish is not None for row in report.rows):
                self.awaited.append(len(self.rows))
            return report

        patch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", call_soon_threadsafe)
        patch.setattr(Decoder, "round", decode_round)


@contextmanager
def served(tmp_path: Path, pair: tuple[Path, Path]) -> Generator[LocalServer]:
    server = in_process_server(tmp_path, pair, engine={"max_rows": 8}, server={"request_timeout": 30.0})
    server.start()
    try:
        yield server
    finally:
        server.stop()


def ask(server: LocalServer, prompt: str, tokens: int, stream: bool) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": tokens, "stream": stream, "client": "stream" if stream else "whole"}
    return httpx.post(f"{server.url}/generate", json=body, timeout=30)


def ask_together(server: LocalServer, seen: Seen, modes: list[bool]) -> list[httpx.Response]:
    """Every prompt in every mode, all of them submitted before the first round is over."""
    asked = [(prompt, 24 + 9 * i, stream) for i, prompt in enumerate(PROMPTS) for stream in modes]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [pool.submit(ask, server, *one) for one in asked]
        started = "redraft:requests_started_total"
        until(lambda: scraped(server.request("GET", "/metrics").text)[started] == len(asked))
        seen.go.set()
        return [answer.result() for answer in answers]


def text_of(answer: httpx.Response) -> str:
    if answer.headers["content-type"] == "application/json":
        return answer.json()["text"]
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(event).get("text", "") for event in events)


@pytest.mark.parametrize(
    "modes",
    [
        pytest.param([False], id="whole", marks=pytest.mark.nightly),
        pytest.param([True], id="streamed", marks=pytest.mark.nightly),
        pytest.param([False, True], id="both"),
    ],
)
def test_a_round_wakes_the_event_loop_once_and_only_for_what_clients_wait_for(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, modes: list[bool]
) -> None:
    seen = Seen()
    with served(tmp_path, pair) as server:
        seen.watch(monkeypatch)
        answers = ask_together(server, seen, modes)
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    if len(modes) == 2:
        texts = [text_of(answer) for answer in answers]
        assert texts[::2] == texts[1::2] and all(texts)
    assert seen.wake_ups == seen.awaited
    assert max(seen.rows) == len(answers)
    if modes == [False]:
        assert len(seen.wake_ups) <= len(answers) < len(seen.rows)


def test_requests_that_fail_together_wake_the_event_loop_once(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(fails_after=3)
    with served(tmp_path, pair) as server:
        seen.watch(monkeypatch)
        answers = ask_together(server, seen, [False, True])
    for whole, streamed in zip(answers[::2], answers[1::2], strict=True):
        assert whole.status_code == 503
        assert "the engine stopped: RuntimeError" in streamed.text and "event: error" in streamed.text
    assert seen.wake_ups == [*seen.awaited, 3]
