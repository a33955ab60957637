"""What an operator ends on a real server: a stream under way, and a run with its child process."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from service.engine.decoder import Decoder
from service.engine.rounds import RoundReport
from service.lifecycle.launcher import Process
from tests.support.tiny_server import generate, in_process_server, prompts, write_pair
from tests.support.waiting import until

ROUND_SECONDS = 0.1


def test_a_stream_is_ended_within_one_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has what there was, with the reason; its row goes to the request that waited for one."""
    rounds: list[float] = []
    decode = Decoder.round

    def slow(decoder: Decoder, joining: int = 0) -> RoundReport:
        time.sleep(ROUND_SECONDS)
        report = decode(decoder, joining)
        rounds.append(time.monotonic())
        return report

    monkeypatch.setattr(Decoder, "round", slow)
    server = in_process_server(tmp_path, write_pair(tmp_path / "pair"), engine={"max_rows": 1})
    server.start()
    # With this seed the end token comes after 500 tokens.
    asked = {"prompt": "abcdefgh", "max_tokens": 1500, "stream": True, "temperature": 1.5, "seed": 11}
    try:
        with httpx.stream(
            "POST", f"{server.url}/generate", json=asked | {"return_tokens": True}, timeout=60.0
        ) as answer:
            events = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
            tokens = list(next(events)["tokens"])
            with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=60.0) as other:
                until(lambda: len(server.get("/requests")["requests"]) == 2)
                running, waiting = server.get("/requests")["requests"]
                assert (running["state"], running["route"]) == ("running", "/generate")
                assert (waiting["state"], waiting["route"]) == ("waiting", "/v1/completions")
                assert (waiting["tokens"], waiting["running_seconds"], waiting["adapter"]) == (0, None, None)
                assert server.request("DELETE", f"/requests/{waiting['id']}").status_code == 202
                # It never had a row: there is nothing but the end.
                frames = [line for line in other.iter_lines() if line.startswith("data: ")]
                assert '"finish_reason":"length"' in frames[-2] and frames[-1] == "data: [DONE]"
            assert server.request("DELETE", f"/requests/{running['id']}").status_code == 202
            before = len(rounds)
            until(lambda: server.get("/requests")["requests"] == [])
            # The one that was under way.
            assert len(rounds) <= before + 1
            event: dict[str, Any] = {}
            for event in events:
                tokens += event["tokens"]
        assert event["finish_reason"] == "cancelled" and event["id"] == running["id"]
        assert event["usage"]["completion_tokens"] == len(event["tokens"]) > 0
        assert tokens == 2 * event["tokens"], "every event's, and all of them at the end"
        assert server.request("DELETE", f"/requests/{running['id']}").status_code == 404
        assert generate(server, "next", max_tokens=2)["finish_reason"] == "length"
    finally:
        assert server.stop() == 0


def test_a_run_is_ended_with_its_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Process] = []
    begin = Process.__init__

    def noted(process: Process, *arguments: object, **more: object) -> None:
        begin(process, *arguments, **more)  # pyright: ignore[reportArgumentType]
        started.append(process)

    monkeypatch.setattr(Process, "__init__", noted)
    server = in_process_server(tmp_path, write_pair(tmp_path / "pair"), training={"epochs": 500})
    server.start()
    try:
        for line in prompts(6):
            generate(server, line.prompt)
        until(lambda: server.request("POST", "/train").status_code in {202, 409})
        (run,) = server.get("/runs")["runs"]
        until(lambda: server.get(f"/runs/{run['id']}")["progress"]["step"] > 0)
        (child,) = [psutil.Process(process.pid) for process in started]
        assert child.is_running()
        ended = server.request("DELETE", f"/runs/{run['id']}")
        assert ended.status_code == 200
        assert (ended.json()["state"], ended.json()["error"]) == ("ended", "ended by an operator")
        assert not child.is_running()
        assert server.request("DELETE", f"/runs/{run['id']}").status_code == 409
        assert server.request("DELETE", "/runs/99").status_code == 404
        assert server.get("/runs")["runs"] == [ended.json()] == [server.get(f"/train/{run['id']}")]
    finally:
        assert server.stop() == 0
