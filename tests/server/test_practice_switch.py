"""Practice that is turned on while a real server runs: where it is kept, and the memory that it gets."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import service.server
from service.engine.footprint import MemoryPlan
from service.lifecycle.practice_choice import FILE
from tests.support.tiny_server import InProcessServer, in_process_server, write_pair

TRAINS = {"enabled": True, "min_cases": 1_000_000}


@contextmanager
def served(folder: Path, pair: tuple[Path, Path], **training: object) -> Generator[InProcessServer]:
    server = in_process_server(folder, pair, training={**TRAINS, **training})
    server.start()
    try:
        yield server
    finally:
        server.stop()


def test_it_outlives_a_restart_and_memory_is_planned_for_it_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []
    plan_memory, most = service.server.plan_memory, 2**50

    def practice_bytes(*_given: object) -> int:
        return most

    def counted(*given: Any, training: Callable[[int], int], **more: Any) -> MemoryPlan:
        planned.append(training(2**34))
        return plan_memory(*given, training=training, **more)

    monkeypatch.setattr(service.server, "plan_memory", counted)
    monkeypatch.setattr(service.server, "practice_bytes", practice_bytes)
    pair = write_pair(tmp_path / "pair")
    with served(tmp_path, pair) as server:
        assert server.get("/practice")["on"] is False and planned[-1] < most
        turned = server.request("PUT", "/practice", {"on": True})
        assert (turned.status_code, turned.json()["on"]) == (200, True)
        assert json.loads((tmp_path / "home" / FILE).read_text()) == {"on": True}
        assert len(planned) == 1, "it makes do with what is free"
    with served(tmp_path, pair) as server:
        assert server.get("/practice")["on"] is True and planned[-1] == most
    with served(tmp_path, pair, practice=False) as server:
        assert server.get("/practice") == {
            "on": False,
            "fixed": "training.practice is set in the configuration",
            "waits": None,
        }
        assert server.request("PUT", "/practice", {"on": True}).status_code == 409
    assert planned[-1] < most
