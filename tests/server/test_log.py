"""A server's log as its operator reads it: of a real process, line by line."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.scraped import scraped
from tests.support.tiny_server import generate, in_process_server, tiny_server, write_pair
from tests.support.waiting import until

CANARY = "xyzzycanary"


def request_lines(log: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in log.read_text().splitlines() if '"event": "request"' in line]
    return [line for line in found if line["method"] == "POST"]


def test_every_line_is_json_and_a_request_s_has_the_figures_of_its_answer(tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    server = tiny_server(tmp_path, pair, server={"log_format": "json"})
    server.start()
    try:
        answers = [generate(server, CANARY, domain=CANARY, client=CANARY) for _ in range(2)]
        body = {"prompt": CANARY, "max_tokens": 20, "stream": True}
        with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60.0) as streamed:
            answers += [json.loads(line[6:]) for line in streamed.iter_lines() if '"timings"' in line]
        chat = {"model": str(pair[0]), "messages": [{"role": "user", "content": CANARY}], "n": 2, "max_tokens": 9}
        answers.append(server.request("POST", "/v1/chat/completions", chat).json())
        assert server.request("POST", "/generate", {"prompt": [CANARY]}).status_code == 400
        until(lambda: len(request_lines(server.log)) == 5)
    finally:
        assert server.stop() == 0
    text = server.log.read_text()
    assert CANARY not in text
    lines = [json.loads(line) for line in text.splitlines()]
    assert all(line["event"] and line["timestamp"].endswith("Z") and line["logger"] for line in lines)
    events = [line["event"] for line in lines]
    assert f"redraft serves at {server.url}" in events and any(
        event.startswith("recorded for training") for event in events
    )
    *served, refused = request_lines(server.log)
    for line, answer in zip(served, answers, strict=True):
        spent = answer["timings"]
        assert line["prompt_tokens"] == spent["prompt_n"] + spent["cache_n"] == answer["usage"]["prompt_tokens"]
        assert line["completion_tokens"] == spent["predicted_n"] == answer["usage"]["completion_tokens"]
        assert (line["cached_tokens"], line["adapters"]) == (spent["cache_n"], spent["adapters"])
        assert (line["drafted_tokens"], line["accepted_tokens"]) == (spent["draft_n"], spent["draft_n_accepted"])
    for line, answer in zip(served[:3], answers[:3], strict=True):
        assert line["finish_reason"] == answer["finish_reason"]
        seconds = [line[f"{name}_seconds"] for name in ("queue", "prefill", "decode")]
        engine = (answer["timings"]["prompt_ms"] + answer["timings"]["predicted_ms"]) / 1000
        assert abs(sum(seconds) - engine) < 2e-4 and sum(seconds) <= line["total_seconds"] + 2e-4
    assert (refused["status"], refused["error"]) == (400, "bad_request")


@pytest.mark.promise(4)
def test_what_a_server_measures_of_requests_is_scraped(tmp_path: Path) -> None:
    """By the names that vLLM's V1 engine has."""
    pair = write_pair(tmp_path)
    server = in_process_server(tmp_path, pair, engine={"adaptive": True, "max_rows": 2})
    server.start()
    try:
        answers = [generate(server, text, max_tokens=40) for text in ("abcdefgh" * 3, "what is this?")]
        text = server.request("GET", "/metrics").text
    finally:
        server.stop()
    found, spent = scraped(text), [answer["timings"] for answer in answers]
    assert all(f'model_name="{pair[0]}"' in line for line in text.splitlines() if not line.startswith("#"))
    prompts = sum(each["prompt_n"] + each["cache_n"] for each in spent)
    assert found["redraft:prompt_tokens_total"] == found["redraft:request_prompt_tokens_sum"] == prompts
    tokens = sum(each["predicted_n"] for each in spent)
    assert found["redraft:generation_tokens_total"] == found["redraft:request_generation_tokens_sum"] == tokens
    phases = sum(found[f"redraft:request_{name}_time_seconds_sum"] for name in ("queue", "prefill", "decode"))
    assert abs(phases - sum(each["prompt_ms"] + each["predicted_ms"] for each in spent) / 1000) < 1e-3
    assert phases < found["redraft:e2e_request_latency_seconds_sum"]
    assert found["redraft:spec_decode_estimated_speedup"] > 0
    (info,) = [name for name in found if name.startswith("redraft:build_info")]
    assert 'backend=""' not in info and 'device=""' not in info


def test_failure_cases_are_counted_as_they_are_stored(tmp_path: Path) -> None:
    """Each round drafts: where costs decide, a slow moment may leave nothing to reject."""
    server = in_process_server(tmp_path, write_pair(tmp_path), engine={"adaptive": False})
    server.start()
    try:
        generate(server, "what is this?", max_tokens=40)
        text = server.request("GET", "/metrics").text
    finally:
        server.stop()
    with closing(sqlite3.connect(server.folder / "redraft.db")) as database:
        stored = dict(database.execute("SELECT tie, count(*) FROM failure_cases GROUP BY tie").fetchall())
    found = scraped(text)
    counted = {tie: found[f'redraft:failure_cases_total{{tie="{str(bool(tie)).lower()}"}}'] for tie in (0, 1)}
    assert counted == {0: 0, 1: 0} | stored and stored[0] > 0
