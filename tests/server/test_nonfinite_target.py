"""A target whose logits are not finite, over HTTP: its request gets an error and leaves no record; others are answered."""

import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import mlx.core as mx
import pytest

from tests.support.scraped import scraped
from tests.support.tiny_server import generate, in_process_server, write_pair
from tests.support.typed import load_arrays

BAD = "~"
"""The letter whose token has an embedding of NaN."""
CHAT = [{"role": "user", "content": f"say {BAD} please"}]


def spoilt_pair(root: Path) -> tuple[Path, Path]:
    pair = write_pair(root)
    vocabulary = json.loads((pair[0] / "tokenizer.json").read_text())["model"]["vocab"]
    path = pair[0] / "model.safetensors"
    weights = dict(load_arrays(path))
    weights["model.embed_tokens.weight"][vocabulary[BAD]] = float("nan")
    # No answer has it by itself.
    weights["lm_head.weight"][vocabulary[BAD]] = 0.0
    mx.save_safetensors(str(path), weights)
    return pair


@pytest.mark.promise(5)
def test_the_request_gets_an_error_and_nothing_of_it_is_kept(tmp_path: Path) -> None:
    server = in_process_server(tmp_path, spoilt_pair(tmp_path), server={"model_aliases": ["target"]})
    bodies = {
        "/generate": {"prompt": f"word {BAD} word", "max_tokens": 8},
        "/v1/completions": {"model": "target", "prompt": f"word {BAD}", "max_tokens": 8, "logprobs": 2},
        "/v1/chat/completions": {"model": "target", "messages": CHAT, "max_tokens": 8, "temperature": 0.9, "seed": 1},
        "/v1/responses": {"model": "target", "input": CHAT, "max_output_tokens": 16},
        "/v1/messages": {"model": "target", "messages": CHAT, "max_tokens": 8, "temperature": 1.0},
    }
    server.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            others = [pool.submit(generate, server, f"neighbour {i}", max_tokens=60) for i in range(4)]
            for path, body in bodies.items():
                answer = server.request("POST", path, body)
                assert answer.status_code == 500, (path, answer.text)
                assert "not finite for output token 1" in answer.json()["error"]["message"], path
                streamed = server.request("POST", path, body | {"stream": True})
                assert "not finite for output token 1" in streamed.text and "!!!" not in streamed.text, path
            for other in others:
                assert other.result()["timings"]["predicted_n"] > 0
        assert generate(server, "after")["tokens"]
        failed = scraped(server.request("GET", "/metrics").text)[
            'redraft:requests_failed_total{code="nonfinite_logits"}'
        ]
        assert failed == 2 * len(bodies)
    finally:
        server.stop()
    with closing(sqlite3.connect(server.folder / "redraft.db")) as database:
        kept = database.execute("select count(*) from generations").fetchone()
    assert kept == (5,), "the neighbours and the one after"
