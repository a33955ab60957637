"""A real server whose run ends when a request needs the memory that it took."""

import time
from pathlib import Path

from service.engine.kv.budget import Budget
from service.lifecycle.loans import Borrower
from service.lifecycle.training import MEMORY_NEEDED
from tests.support.tiny_server import generate, in_process_server, prompts, write_pair

SECONDS = 60.0


def test_a_request_gets_the_memory_of_a_run_that_costs_nothing(tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "pair")
    training = {"min_cases": 10**6, "cooldown_seconds": 3600.0}
    server = in_process_server(tmp_path, pair, engine={"max_context": 2048}, training=training)
    server.start()
    try:
        application = server._application
        assert application is not None
        thread = application.engine_thread
        for line in prompts(8):
            generate(server, line.prompt, max_tokens=24)
        text = "a" * 1500
        expected = generate(server, text, max_tokens=8)["tokens"]
        engine = thread._engine
        assert engine is not None
        budget = engine.decoder.memory.budget
        assert budget is not None
        # A budget for that request, and a run that takes nearly all of it.
        small = Budget(2 * budget.bytes_of([2048]), budget.row)
        wanted = application._loan_sizes[Borrower.RUN].wanted
        engine.decoder.memory.limit(small, spare=wanted - small.size + budget.bytes_of([128]))
        end = time.monotonic() + SECONDS
        while (asked := server.request("POST", "/train", {})).status_code != 202:
            assert time.monotonic() < end, asked.text
            time.sleep(0.1)
        run = asked.json()["id"]
        assert generate(server, "short", max_tokens=4)["tokens"]
        assert not server.get(f"/runs/{run}")["error"], "a short request is answered beside it"
        assert generate(server, text, max_tokens=8)["tokens"] == expected
        found = server.get(f"/runs/{run}")
        while found["state"] != "out_of_memory":
            assert time.monotonic() < end, found
            time.sleep(0.1)
            found = server.get(f"/runs/{run}")
        assert found["error"] == MEMORY_NEEDED
        assert application._serving is not None
        who = application._serving.provenance
        assert application.stores.training_texts.untrained(who).generations > 0
    finally:
        server.stop()
