"""Practice that is turned on while a real server runs: where it is kept, and the memory that it gets."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

import service.server
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


def test_it_outlives_a_restart_and_memory_is_set_aside_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    practice_bytes = service.server.practice_bytes

    def counted(*given: object) -> int:
        asked.append(practice_bytes(*given))  # pyright: ignore[reportArgumentType]
        return asked[-1]

    monkeypatch.setattr(service.server, "practice_bytes", counted)
    pair = write_pair(tmp_path / "pair")
    with served(tmp_path, pair) as server:
        assert server.get("/practice")["on"] is False and asked == []
        turned = server.request("PUT", "/practice", {"on": True})
        assert (turned.status_code, turned.json()["on"]) == (200, True)
        assert json.loads((tmp_path / "home" / FILE).read_text()) == {"on": True}
        assert asked == [], "it makes do with what is free"
    with served(tmp_path, pair) as server:
        assert server.get("/practice")["on"] is True and len(asked) == 1
    with served(tmp_path, pair, practice=False) as server:
        assert server.get("/practice") == {
            "on": False,
            "fixed": "training.practice is set in the configuration",
            "waits": None,
        }
        assert server.request("PUT", "/practice", {"on": True}).status_code == 409
    assert len(asked) == 1
