"""Minutes of traffic through the whole loop: no failures, and no growth of memory, files or threads."""

import itertools
import time
from pathlib import Path

import psutil
import pytest

from service.core import Sampling
from service.evaluation.clients import Clients
from service.models.pair import load_model
from service.models.text import TextEncoder
from tests.support.oracle import forced
from tests.support.tiny_server import prompts, tiny_server, write_pair

SECONDS = 300
WARM_SECONDS = 60
GROWTH_BYTES = 150 * 2**20
"""Allowed growth of resident memory after the warm-up: the log, caches and replay buffer fill within bounds."""


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 300)
def test_minutes_of_traffic_leave_no_trace(tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    training = {"enabled": True, "min_cases": 200, "min_tokens": 500, "cooldown_seconds": 5.0}
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
        asked = encoder.encode_chat([{"role": "user", "content": answer.line.prompt}])
        assert answer.tokens == forced(target.model, asked, answer.tokens, Sampling(max_tokens=32), ends)
