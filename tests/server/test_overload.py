"""Many more clients than places: refusals are quick, because refused prompts are not tokenised."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

import service.server
from service.core import ChatEnd, EncodedChat
from service.engine.decoder import Decoder
from service.engine.rounds import RoundReport
from service.evaluation.server_process import LocalServer
from service.models.text import TextEncoder
from tests.support.tiny_server import in_process_server, tiny_server, write_pair

WORDS = "the quick brown fox jumps over the lazy dog and runs away from what it has seen there "


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


def long_prompt(number: int, tokens: int) -> str:
    """One byte is one token of the tiny pair."""
    return f"{number} {WORDS * (tokens // len(WORDS))}"


@pytest.mark.promise(22)
def test_only_what_is_admitted_is_tokenised(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine waits until the last refusal, so the number of admitted requests is the number of places."""
    tokenised: list[int] = []
    refusals = threading.Event()

    class Counting(TextEncoder):
        def encode_chat(
            self,
            messages: Sequence[Mapping[str, object]],
            tools: Sequence[Mapping[str, object]] = (),
            options: Mapping[str, object] | None = None,
            end: ChatEnd = ChatEnd.NEW_TURN,
        ) -> EncodedChat:
            tokenised.append(len(str(messages[0]["content"])))
            return super().encode_chat(messages, tools, options, end)

    def held_back(decoder: Decoder, waiting: int) -> RoundReport:
        assert refusals.wait(60)
        return decode(decoder, waiting)

    decode = Decoder.round
    monkeypatch.setattr(service.server, "TextEncoder", Counting)

    async def one(client: httpx.AsyncClient, number: int) -> httpx.Response:
        answer = await client.post("/generate", json={"prompt": long_prompt(number, 500), "max_tokens": 4})
        if answer.status_code == 503:
            refused.append(answer)
            if len(refused) == 24 - 6:
                refusals.set()
        return answer

    refused: list[httpx.Response] = []

    async def rush(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=httpx.Limits(max_connections=None)) as client:
            return await asyncio.gather(*(one(client, number) for number in range(24)))

    server = in_process_server(tmp_path, pair, engine={"max_rows": 2, "max_waiting": 4})
    server.start()
    try:
        monkeypatch.setattr(Decoder, "round", held_back)
        answers = asyncio.run(rush(server.url))
        assert all(answer.json()["error"]["code"] == "overloaded" for answer in refused)
        assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
        admitted = [answer for answer in answers if answer.status_code == 200]
        assert (len(admitted), len(refused)) == (6, 18)
        assert len(tokenised) == 6
        # No token of this pair covers more than the four bytes of "</s>", so this prompt cannot fit.
        hopeless = server.request("POST", "/generate", {"prompt": "x" * (2048 * 4 + 1)})
        assert hopeless.status_code == 400 and "bytes" in hopeless.text
        assert len(tokenised) == 6
        assert server.request("POST", "/generate", {"prompt": "a", "max_tokens": 2}).status_code == 200
    finally:
        refusals.set()
        assert server.stop() == 0


# ------------------------------------------------------------------------------------------------------------ in full


async def phase(port: int, times: Sequence[float]) -> list[tuple[int, float]]:
    """One request at each of these times (seconds from now), each on a connection of its own that is open before. Returns
    status and seconds from the first byte sent to the first received. Served requests run until the last has its answer."""
    writers: list[asyncio.StreamWriter] = []

    async def ask(number: int, at: float) -> tuple[int, float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        body = json.dumps({"prompt": long_prompt(number, 1_500), "max_tokens": 500, "stream": True}).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        await asyncio.sleep(at - time.monotonic())
        started = time.monotonic()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = int((await reader.readline()).split()[1])
        return status, time.monotonic() - started

    start = time.monotonic() + 2.0
    answers = await asyncio.gather(*(ask(number, start + at) for number, at in enumerate(times)))
    for writer in writers:
        writer.close()
        await writer.wait_closed()
    return answers


def report(title: str, answers: list[tuple[int, float]]) -> float:
    refused = [seconds for status, seconds in answers if status == 503]
    p50, p99 = np.percentile(refused, [50, 99])
    print(
        f"{title}: {len(answers)} requests, {len(refused)} refused; "
        f"p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms, longest {max(refused) * 1e3:.0f} ms"
    )
    assert len(refused) >= len(answers) / 2
    return float(p99)


@pytest.mark.bench
@pytest.mark.promise(22)
def test_refusals_take_at_most_100_ms(tmp_path: Path, pair: tuple[Path, Path], figure: Callable[[str], None]) -> None:
    """4 rows, 12 waiting places and 160 clients: all at the same moment (five times), and each once a second."""
    server: LocalServer = tiny_server(tmp_path, pair, engine={"max_rows": 4, "max_waiting": 12})
    server.start()

    steady = [turn + client / 160 for client in range(160) for turn in range(5)]
    try:
        bursts = [report(f"burst {turn}", asyncio.run(phase(server.port, [0.0] * 160))) for turn in range(5)]
        spread = report("steady", asyncio.run(phase(server.port, steady)))
    finally:
        server.stop()
    burst = sorted(bursts)[2]
    figure(
        f"160 clients for 16 places: refused within {1e3 * burst:.0f} ms at once, {1e3 * spread:.0f} ms spread (p99)"
    )
    assert burst <= 0.1
    assert spread <= 0.1


ROWS, WAITING, ANSWER = 4, 12, 64
"""Places of the server that is asked for a minute, and the tokens of its answers."""
SECONDS, TIMES = 60, 10
MEMORY_BYTES = 8 * 2**20
"""Growth over the second half of the minute, at most."""


@dataclass
class Asked:
    """seconds: until the first byte of the answer. tokens: of its last event; None where it was cut."""

    status: int
    seconds: float
    tokens: int | None


async def ask(port: int, number: int) -> Asked:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": long_prompt(number, 500), "max_tokens": ANSWER, "stream": True}).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    )
    started = time.monotonic()
    try:
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = int((await reader.readline()).split()[1])
        seconds = time.monotonic() - started
        text = (await reader.read()).decode()
        whole = re.search(r'"completion_tokens": ?(\d+)', text) if "data: [DONE]" in text else None
        return Asked(status, seconds, int(whole[1]) if whole else None)
    finally:
        writer.close()


async def rate(port: int, seconds: float) -> float:
    """Answers a second where no more ask at once than there are places."""
    end = time.monotonic() + seconds

    async def client(number: int) -> int:
        served = 0
        while time.monotonic() < end:
            assert (await ask(port, number * 100_000 + served)).status == 200
            served += 1
        return served

    return sum(await asyncio.gather(*(client(number) for number in range(ROWS + WAITING)))) / seconds


async def flood(port: int, every: float, count: int, memory: Callable[[], int]) -> tuple[list[Asked], list[int]]:
    """So many requests, one each so many seconds, whatever becomes of those before; and the memory once a second."""
    start, asked, sizes = time.monotonic(), list[asyncio.Task[Asked]](), list[int]()
    for number in range(count):
        await asyncio.sleep(start + number * every - time.monotonic())
        asked.append(asyncio.create_task(ask(port, number)))
        if len(sizes) < time.monotonic() - start:
            sizes.append(memory())
    return list(await asyncio.gather(*asked)), sizes


@pytest.mark.bench
@pytest.mark.promise(22)
def test_ten_times_what_it_serves_for_a_minute(
    tmp_path: Path, pair: tuple[Path, Path], figure: Callable[[str], None]
) -> None:
    server: LocalServer = tiny_server(
        tmp_path, pair, engine={"max_rows": ROWS, "max_waiting": WAITING, "prefix_cache_mb": 4}
    )
    server.start()
    try:
        assert server._process is not None
        process = psutil.Process(server._process.pid)
        served = asyncio.run(rate(server.port, 15.0))
        every = 1 / (TIMES * served)
        asked, sizes = asyncio.run(flood(server.port, every, round(SECONDS / every), lambda: process.memory_info().rss))
        after = asyncio.run(rate(server.port, 15.0))
    finally:
        assert server.stop() == 0
    refused = [each.seconds for each in asked if each.status == 503]
    admitted = [each for each in asked if each.status != 503]
    p99, growth = float(np.percentile(refused, 99)), max(sizes[-5:]) - max(sizes[len(sizes) // 2 : len(sizes) // 2 + 5])
    figure(
        f"{served:.0f} answers a second; {len(asked)} requests in {SECONDS} s: {len(refused)} refused, the 99th of 100 "
        f"within {1e3 * p99:.0f} ms, {len(admitted)} answered; memory {growth / 2**20:+.1f} MiB in the second half; "
        f"afterwards {after / served:.2f} of its speed"
    )
    assert len(refused) > len(asked) / 2 and len(admitted) > served * SECONDS / 4
    assert all(each.status == 200 and each.tokens == ANSWER for each in admitted)
    assert p99 <= 0.1
    assert growth <= MEMORY_BYTES
