"""What the target writes for practice is in no figure of traffic: a real server, and a real child that practises."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sqlalchemy import func, select

from service.core import RunState
from service.learning.make.target_text import TargetText
from service.store import tables
from service.store.database import Database
from tests.support.scraped import scraped
from tests.support.store_rows import url_of
from tests.support.tiny_server import InProcessServer, generate, in_process_server, prompts, write_pair
from tests.support.waiting import until

ABOUT_RUNS = (
    "redraft:training_",
    "redraft:adapter_",
    "redraft:memory_bytes",
    "redraft:engine_idle",
    "process_",
    "python_",
)
"""Series that are about runs, adapters and the process, and not about what was asked."""
LOGGED = ("generations", "generation_targets", "failure_cases", "replay_buffer", "replay_domains", "grammars")
"""Tables with rows of traffic."""
ASKED = 6


def traffic(server: InProcessServer) -> Mapping[str, float]:
    """Every series of /metrics that is about what was asked, and the rows of traffic in the database."""
    text = server.request("GET", "/metrics").text
    found = {name: value for name, value in scraped(text).items() if not name.startswith(ABOUT_RUNS)}
    database = Database(url_of(server.folder / "redraft.db"), read_only=True)
    try:
        with database.read() as connection:
            for name in LOGGED:
                found[name] = connection.scalar(select(func.count()).select_from(tables.metadata.tables[name])) or 0
    finally:
        database.close()
    return found


def test_practice_is_in_no_figure_of_traffic(tmp_path: Path) -> None:
    server = in_process_server(
        tmp_path, write_pair(tmp_path / "pair"), training={"enabled": True, "min_cases": 1_000_000, "practice": True}
    )
    server.start()
    try:
        for line in prompts(ASKED):
            generate(server, line.prompt)
        until(lambda: traffic(server)["generations"] == ASKED, seconds=120)
        before = traffic(server)
        run = server.post("/train?practice_minutes=0.02")
        until(lambda: RunState(server.get(f"/train/{run['id']}")["state"]).over, seconds=120)
        assert server.get(f"/train/{run['id']}")["adapter"] is not None
        assert traffic(server) == before
    finally:
        server.stop()
    written = [TargetText.load(path).tokens.size for path in (tmp_path / "home" / "practice").rglob("*.npz")]
    asked = before["redraft:prompt_tokens_total"] + before["redraft:generation_tokens_total"]
    assert sum(written) > 2 * asked > 0, "it wrote more than was asked, and none of that was counted"
