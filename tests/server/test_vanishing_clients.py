"""Clients that go without a word, at any moment: what they held is free at once, and nothing is left of them."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.support.resources import Resources
from tests.support.scraped import scraped
from tests.support.tiny_server import generate, tiny_server, write_pair

RESET = struct.pack("ii", 1, 0)
"""Of SO_LINGER: the connection is reset, as where a process or a machine ended."""
WAVE = 20
"""Clients at a time, more than there are rows."""
ROWS = 8
SLOPE_BYTES = 2**20
"""Growth for 100 clients, at most, of what is not freed memory that MLX holds, which has a limit of its own."""
FREED = 'redraft:memory_bytes{kind="cache"}'
IDLE_SECONDS = 11.0
"""After which a thread of the pool is idle for too long."""
NOTICED_SECONDS = 0.1
"""Until the event loop has read that a connection is gone, on a machine that does other things."""


def vanish(port: int, number: int, seed: int) -> int:
    """One client. Returns how many bytes of an answer it has seen."""
    rng = random.Random(seed)
    body = json.dumps(
        {"prompt": f"{number} " + "what is it? " * rng.randint(1, 100), "max_tokens": 700, "stream": rng.random() < 0.7}
    ).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    sent = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        if rng.random() < 0.2:
            connection.sendall(sent[: rng.randrange(len(sent))])
            return 0
        connection.sendall(sent)
        connection.settimeout(rng.uniform(0.001, 0.5))
        try:
            return len(connection.recv(rng.randrange(1, 4096)))
        except TimeoutError:
            return 0


@pytest.mark.nightly
@pytest.mark.promise(23)
def test_1000_clients_that_vanish_leave_nothing(tmp_path: Path, figure: Callable[[str], None]) -> None:
    pair = write_pair(tmp_path)
    engine = {"max_rows": ROWS, "max_waiting": WAVE, "prefix_cache_mb": 4, "adaptive": False}
    server = tiny_server(tmp_path, pair, engine=engine, store={"max_generations": 200})
    server.start()
    try:
        assert server._process is not None
        process = psutil.Process(server._process.pid)

        def counts() -> dict[str, float]:
            return scraped(server.request("GET", "/metrics").text)

        def wave(number: int) -> tuple[float, int]:
            """Seconds until no request is left, and the clients that saw a part of their answer."""
            with ThreadPoolExecutor(WAVE) as clients:
                seen = list(clients.map(lambda i: vanish(server.port, i, number * WAVE + i), range(WAVE)))
            gone = time.monotonic()
            while (now := counts())["redraft:num_requests_running"] + now["redraft:num_requests_waiting"]:
                assert time.monotonic() < gone + 60
            return time.monotonic() - gone, sum(map(bool, seen))

        def settle() -> None:
            """The pool of threads ends those that were idle for so long when it is used again."""
            time.sleep(IDLE_SECONDS)
            generate(server, "a whole one")

        for number in range(50):
            wave(number)
        settle()
        before, freed = Resources.of(process), counts()[FREED]
        found = [wave(number) for number in range(50, 100)]
        settle()
        after = Resources.of(process)
        now = counts()
        rounds = now["redraft:round_seconds_sum"] / now["redraft:round_seconds_count"]
        whole = generate(server, "what is left of it?", max_tokens=40)
    finally:
        assert server.stop() == 0
    seconds, seen = sorted(each for each, _ in found), sum(each for _, each in found)
    growth = (after.memory - now[FREED] - before.memory + freed) / (len(found) * WAVE / 100)
    figure(
        f"{len(found) * WAVE} clients that vanish, {seen} of them in their answer: all rows back within "
        f"{1e3 * seconds[-1]:.0f} ms (median {1e3 * seconds[len(seconds) // 2]:.0f}, a round takes {1e3 * rounds:.1f} "
        f"on average); memory {growth / 2**20:+.2f} MiB for 100"
    )
    assert 100 < seen < len(found) * WAVE, "some vanish before their answer begins, some within"
    assert now['redraft:request_success_total{finished_reason="abort"}'] > 500
    assert whole["finish_reason"] == "length"
    assert seconds[len(seconds) // 2] <= NOTICED_SECONDS
    assert growth <= SLOPE_BYTES
    after.check_alike(before)
