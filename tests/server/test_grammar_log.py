"""A real server whose clients ask for answers within grammars: its runs learn from these and are judged by them."""

import time
from pathlib import Path

import pytest

from service.core import RunState
from service.settings import load_settings
from service.store.stores import open_stores
from tests.support.tiny_server import in_process_server, write_pair

WORD = "[a-f]{20,60}"


@pytest.mark.nightly
def test_answers_within_grammars_are_learnt_from_and_measured_on(tmp_path: Path) -> None:
    server = in_process_server(tmp_path, write_pair(tmp_path))
    server.start()
    try:
        for number in range(24):
            asked = {"messages": [{"role": "user", "content": f"question {number}"}], "max_tokens": 24}
            answer = server.request("POST", "/v1/chat/completions", asked | {"structured_outputs": {"regex": WORD}})
            assert answer.status_code == 200, answer.text
        assert server.request("POST", "/train", {}).status_code == 202
        stores = open_stores(load_settings(server.config))
        end = time.monotonic() + 60
        while not (run := stores.runs.latest(1)[0]).state.over:
            assert time.monotonic() < end, run
            time.sleep(0.1)
    finally:
        server.stop()
    assert run.state in {RunState.PROMOTED, RunState.REJECTED}, run.error
    learnt = stores.training_texts.claimed(run.id)
    assert learnt and all(g.grammar is not None and "[a-f]{20,60}" in g.grammar.text for g in learnt)
    held = stores.generations.held_out(learnt[0].provenance, 99)
    assert run.verdict is not None and run.verdict.prompts == len(held) > 1
    stores.close()
