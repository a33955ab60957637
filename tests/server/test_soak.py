"""Thousands of requests, swaps, and minutes of the whole loop: no failures, and no growth of memory, files or threads."""

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from service.core import Sampling
from service.evaluation.clients import Clients
from service.models.pair import load_model
from service.models.text import TextEncoder
from tests.support import leaking_server
from tests.support.oracle import forced
from tests.support.resources import Resources
from tests.support.tiny_server import prompts, register_adapters, tiny_server, write_pair

SECONDS = 300
WARM_SECONDS = 60
GROWTH_BYTES = 150 * 2**20
"""Allowed growth of resident memory after the warm-up: the log, caches and replay buffer fill within bounds."""


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.promise(20)
def test_minutes_of_traffic_leave_no_trace(tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    training = {"enabled": True, "min_cases": 200, "min_tokens": 500, "cooldown_seconds": 5.0, "idle_seconds": 0.0}
    server = tiny_server(tmp_path, pair, training=training, store={"max_generations": 2000})
    server.start()
    try:
        assert server._process is not None
        process = psutil.Process(server._process.pid)
        endless = itertools.chain.from_iterable(prompts(500, seed) for seed in itertools.count())
        clients = Clients(server.url, endless, clients=4, max_tokens=32)
        try:
            time.sleep(WARM_SECONDS)
            before = process.memory_info().rss, process.num_fds(), process.num_threads()
            time.sleep(SECONDS - WARM_SECONDS)
            after = process.memory_info().rss, process.num_fds(), process.num_threads()
        finally:
            clients.stop()
        runs = [server.get(f"/train/{number}") for number in range(1, 3)]
    finally:
        assert server.stop() == 0
    assert all(run["state"] in {"promoted", "rejected"} for run in runs), runs
    assert after[0] - before[0] < GROWTH_BYTES
    # A child's pipes and their reader threads come and go.
    assert after[1] <= before[1] + 8 and after[2] <= before[2] + 4
    answers = clients.answers
    assert len(answers) > 500 and not [answer.error for answer in answers if answer.error]
    target = load_model(pair[0])
    encoder, ends = TextEncoder(target.tokenizer), frozenset(target.tokenizer.eos_token_ids)
    for answer in answers[:: max(1, len(answers) // 200)]:
        asked = encoder.encode_chat([{"role": "user", "content": answer.line.prompt}]).tokens
        assert answer.tokens == forced(target.model, asked, answer.tokens, Sampling(max_tokens=32), ends)


PHASES, REQUESTS, SWAPS = 20, 100, 10
"""So many phases, after which memory is read, of so many requests and swaps each."""
WARM_PHASES = 10
SLOPE_BYTES = 2**20
"""Growth for 100 requests, at most."""


@pytest.mark.nightly
@pytest.mark.promise(20)
@pytest.mark.parametrize("leaks", [False, True], ids=["as served", "planted leak"])
def test_2000_requests_and_200_swaps_leave_no_trace(tmp_path: Path, leaks: bool, figure: Callable[[str], None]) -> None:
    pair = write_pair(tmp_path)
    # What is kept of earlier requests fills up while it warms up.
    bounded = {"max_rows": 8, "prefill_chunk": 32, "adaptive": False, "prefix_cache_mb": 4}
    server = tiny_server(tmp_path, pair, store={"max_generations": 500}, engine=bounded)
    ids = [ref.id for ref in register_adapters(server, pair, 2)]
    if leaks:
        server._command = [sys.executable, leaking_server.__file__, "serve", "--config", str(server.config)]
    lines = itertools.chain.from_iterable(prompts(500, seed) for seed in itertools.count())
    errors: list[str] = []

    def phase(number: int) -> Resources:
        clients = Clients(server.url, itertools.islice(lines, REQUESTS), clients=8, max_tokens=16)
        for swap in range(SWAPS):
            server.post(f"/adapters/{ids[(number * SWAPS + swap) % 2]}/activate")
        clients.wait()
        errors.extend(answer.error for answer in clients.answers if answer.error)
        assert len(clients.answers) == REQUESTS
        time.sleep(0.5)
        return Resources.of(process)

    server.start()
    try:
        assert server._process is not None
        process = psutil.Process(server._process.pid)
        for number in range(WARM_PHASES):
            phase(number)
        found = [phase(number) for number in range(PHASES)]
    finally:
        assert server.stop() == 0
    memory = [each.memory for each in found]
    slope = float(np.polyfit(np.arange(PHASES), memory, 1)[0])
    assert errors == []
    if leaks:
        assert slope > SLOPE_BYTES, "a leak of 2 MB is seen"
        return
    figure(f"{PHASES * REQUESTS} requests, {PHASES * SWAPS} swaps: {slope / 2**20:+.2f} MiB for 100 requests")
    assert slope <= SLOPE_BYTES, [round(each / 2**20) for each in memory]
    found[-1].check_alike(found[0])
