"""The page's routes on a whole server: what it served is in the history, and an open page does not hold up its end."""

import json
import time
from pathlib import Path
from typing import Any

import httpx

from tests.support.tiny_server import generate, in_process_server, prompts, register_adapters, write_pair


def test_an_open_page_sees_what_is_served_and_does_not_hold_up_the_end(tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    server = in_process_server(tmp_path, pair)
    (ref,) = register_adapters(server, pair, 1)
    server.start()
    try:
        with httpx.stream("GET", f"{server.url}/events", timeout=20) as answer:
            snapshots = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
            first = next(snapshots)
            assert (first["ready"], first["adapter"], first["model"]) == (True, ref.id, str(pair[0]))
            assert first["memory"]["weights"] > 0
            outputs = [generate(server, line.prompt, domain="a domain") for line in prompts(6)]
            answered_at = time.monotonic()
            tokens = sum(len(output["tokens"]) for output in outputs)
            while next(snapshots)["totals"]["generation_tokens_total"] < tokens:
                assert time.monotonic() - answered_at < 2.0
            drafted = sum(output["timings"]["draft_n"] for output in outputs)
            history = recorded(server.url, len(outputs))
            assert {point["adapter"] for point in history["points"]} == {ref.id}
            assert 0 < sum(point["drafted"] for point in history["points"]) <= drafted
            assert history["depths"][0]["adapter"] == ref.id
            assert [adapter["id"] for adapter in history["adapters"]] == [ref.id]
            case = httpx.get(f"{server.url}/cases", headers=server.owned).json()["cases"][0]
            assert "user" in case["context"] and case["drafted"] != case["target"]
            assert (case["domain"], case["adapter"]) == ("a domain", ref.id)
            ended_at = time.monotonic()
            server.terminate()
            assert all(snapshot["reason"] in {"serving", "draining"} for snapshot in snapshots)
            server._thread.join(20)
            assert time.monotonic() - ended_at < 4.0
    finally:
        assert server.stop() == 0


def recorded(url: str, count: int) -> dict[str, Any]:
    """The history, once so many answers are in it."""
    end = time.monotonic() + 20.0
    while True:
        history = httpx.get(f"{url}/history").json()
        if sum(point["generations"] for point in history["points"]) == count:
            return history
        assert time.monotonic() < end, history
        time.sleep(0.1)


def test_a_request_without_a_draft_drafts_nothing_and_says_the_same(tmp_path: Path) -> None:
    server = in_process_server(tmp_path, write_pair(tmp_path))
    server.start()
    try:
        with_draft = generate(server, "race", store=False)
        without = generate(server, "race", store=False, num_draft_tokens=0)
        assert with_draft["timings"]["draft_n"] > 0 == without["timings"]["draft_n"]
        assert with_draft["tokens"] == without["tokens"]
    finally:
        server.stop()
