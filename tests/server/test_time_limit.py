"""Time limits and bursts at a real engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.tiny_server import InProcessServer, in_process_server, write_pair

ASKED: dict[str, object] = {"prompt": "abc", "max_tokens": 1_900, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessServer]:
    folder = tmp_path_factory.mktemp("limits")
    made = in_process_server(folder, write_pair(folder / "pair"), server={"request_timeout": 0.4})
    made.start()
    yield made
    made.stop()


def test_a_long_answer_ends_in_time_and_a_stream_takes_its_own(server: InProcessServer) -> None:
    cut = server.request("POST", "/generate", ASKED).json()
    assert cut["finish_reason"] == "length" and 0 < cut["usage"]["completion_tokens"] < 1_900
    with httpx.stream(
        "POST", f"{server.url}/generate", json=ASKED | {"stream": True, "max_tokens": 120}, timeout=60
    ) as stream:
        lines = [line for line in stream.iter_lines() if line.startswith("data: {")]
    # A stream takes its time: it is whole.
    assert '"completion_tokens":120' in lines[-1] and '"finish_reason":"length"' in lines[-1]
    assert server.request("POST", "/generate", ASKED | {"max_tokens": 4}).status_code == 200


def test_metrics_answer_beside_a_burst_of_counted_prompts(server: InProcessServer) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "w " * 900}]}
    with ThreadPoolExecutor(120) as clients:
        counts = [
            clients.submit(httpx.post, f"{server.url}/v1/messages/count_tokens", json=body, timeout=60)
            for _ in range(120)
        ]
        began = time.monotonic()
        for path in ("/health", "/metrics"):
            assert httpx.get(f"{server.url}{path}", headers=server.owned, timeout=60).status_code == 200
        seconds = time.monotonic() - began
        waiting = sum(not each.done() for each in counts)
        codes = {each.result(60).status_code for each in counts}
    print(f"/health and /metrics took {seconds:.2f} s while {waiting} prompts waited")
    assert codes == {200} and seconds < 5
