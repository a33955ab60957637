"""Takes the pictures of docs/page.md: `uv run python -m tests.page.screenshots`, on a quiet machine. It serves the bundled pair
under the demo's traffic until an adapter was promoted and has drafted for a while, and needs Chromium; about five minutes."""

from __future__ import annotations

import itertools
import subprocess
import tempfile
import time
from pathlib import Path

from service.evaluation.clients import Clients
from service.evaluation.server_process import LocalServer
from service.evaluation.sql_prompts import traffic_prompts
from tests.support.browser import CHROMIUM, PAGE, SECONDS, make_environment

IMAGES = PAGE.parents[1] / "docs" / "images"
SETTINGS: dict[str, dict[str, object]] = {
    "engine": {"max_rows": 4},
    "training": {"min_cases": 1, "min_tokens": 1000, "epochs": 3, "tick_seconds": 0.5, "cooldown_seconds": 5.0},
    "gate": {"watch_generations": 10**6, "min_prompts": 10, "min_tokens": 200, "max_prompts": 24},
}
ANSWERS = 30
"""That the new adapter drafts before the pictures are taken."""
LIMIT_SECONDS = 1200.0


def main() -> None:
    """Raises AssertionError where no adapter is promoted in time."""
    assert CHROMIUM is not None, "no Chromium on this machine"
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        python = make_environment(folder / "environment")
        server = LocalServer(folder / "server", SETTINGS, folder / "home")
        server.start()
        lines = itertools.chain.from_iterable(traffic_prompts(400, seed) for seed in itertools.count())
        clients = Clients(server.url, lines, clients=2, max_tokens=32)
        try:
            end, until = time.monotonic() + LIMIT_SECONDS, None
            while until is None or len(clients.answers) < until:
                assert time.monotonic() < end, "no adapter was promoted"
                time.sleep(0.5)
                run = server.find("/train/1")
                # As in the demo: a run shares the processor with its server.
                clients.pause_seconds = 4.0 if run is not None and run["finished_at"] is None else 0.0
                if until is None and server.get("/adapters")["active"]:
                    until = len(clients.answers) + ANSWERS
            script = [str(python), str(PAGE / "shots.py"), CHROMIUM, server.url, str(IMAGES)]
            subprocess.run(script, check=True, timeout=SECONDS)
        finally:
            clients.stop()
            server.stop()


if __name__ == "__main__":
    main()
