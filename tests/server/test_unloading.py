"""`engine.idle_unload_minutes`: an idle server gives its weights back, and answers the next request as before."""

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import service.server
from service.core import AdapterRef, ModelError
from service.engine import device
from service.engine.decoder import Decoder
from service.engine.thread import EngineThread
from tests.support.tiny_server import (
    InProcessServer,
    generate,
    in_process_server,
    prompts,
    register_adapters,
    write_pair,
)

IDLE = 0.4
"""Seconds without a request after which these servers unload."""


class Unloading:
    """A server that unloads after IDLE seconds, with two adapters, the second of them active."""

    def __init__(self, root: Path) -> None:
        self.pair = write_pair(root / "pair")
        engine = {"idle_unload_minutes": IDLE / 60, "adaptive": True, "prefix_cache_dir": str(root / "prefixes")}
        self.server: InProcessServer = in_process_server(root, self.pair, engine=engine)
        self.adapters: list[AdapterRef] = register_adapters(self.server, self.pair, 2)
        gc.collect()
        self.active = device.memory().active
        """Bytes that MLX held before the server started."""
        self.server.start()

    @property
    def thread(self) -> EngineThread:
        assert self.server._application is not None
        return self.server._application.engine_thread

    def decoder(self) -> Decoder:
        assert self.thread._engine is not None
        return self.thread._engine.decoder

    def reaches(self, reason: str) -> None:
        wait_for(lambda: self.thread.status().reason == reason, reason)


def wait_for(holds: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.02)


@pytest.fixture
def unloading(tmp_path: Path) -> Iterator[Unloading]:
    made = Unloading(tmp_path)
    try:
        yield made
    finally:
        made.server.stop()


def test_weights_are_given_back_and_loaded_at_the_next_request(unloading: Unloading) -> None:
    server, text = unloading.server, "abc abd " * 100
    before = generate(server, text)
    weights = unloading.thread.status().memory.weights
    decoder, parameters = weakref.ref(unloading.decoder()), weakref.ref(unloading.decoder().batch.target.model)
    unloading.reaches("unloaded")
    gc.collect()
    assert decoder() is None and parameters() is None, "something still holds the models"
    # The thread releases what it has freed after it says that it has unloaded.
    wait_for(lambda: unloading.thread.status().memory.cache == 0, "freed memory is released")
    left = unloading.thread.status().memory
    assert left.weights == left.kv == left.prefix == 0
    assert left.active <= unloading.active + weights / 10, left
    ready = server.request("GET", "/health/ready")
    assert ready.status_code == 200, "a balancer goes on sending requests"
    assert ready.json()["loaded"] is False and ready.json()["adapter"] == unloading.adapters[1].id
    assert server.get("/adapters")["active"] == unloading.adapters[1].id
    after = generate(server, text)
    assert after["tokens"] == before["tokens"] and unloading.thread.status().memory.weights == weights
    assert unloading.decoder().adapter == unloading.adapters[1].id, "the adapter drafts again, before any tick"
    assert server.get("/health/ready")["loaded"] is True
    assert unloading.decoder().prefixes.tokens_read > 0, "files of the prefix cache outlive the models"


def test_an_adapter_is_activated_while_the_models_are_unloaded(unloading: Unloading) -> None:
    server, first = unloading.server, unloading.adapters[0].id
    unloading.reaches("unloaded")
    assert server.post(f"/adapters/{first}/activate")["active"] == first
    unloading.reaches("unloaded")
    assert server.get("/adapters")["active"] == first
    generate(server, "abc")
    assert unloading.decoder().adapter == first


def test_models_that_cannot_be_loaded_again_fail_requests_until_they_can(unloading: Unloading) -> None:
    server = unloading.server
    expected = generate(server, "abc")["tokens"]
    weights = unloading.pair[0] / "model.safetensors"
    unloading.reaches("unloaded")
    content = weights.read_bytes()
    weights.unlink()
    refused = server.request("POST", "/generate", {"prompt": "abc", "max_tokens": 4})
    assert refused.status_code == 503 and "could not be reloaded" in refused.json()["error"]["message"]
    assert server.request("GET", "/health/ready").status_code == 200
    weights.write_bytes(content)
    assert generate(server, "abc")["tokens"] == expected


def test_models_that_have_changed_are_not_served(unloading: Unloading, tmp_path: Path) -> None:
    server = unloading.server
    unloading.reaches("unloaded")
    # Weights that are as large, and others.
    target, draft = (folder / "model.safetensors" for folder in unloading.pair)
    target.write_bytes(draft.read_bytes())
    refused = server.request("POST", "/generate", {"prompt": "abc", "max_tokens": 4})
    assert refused.status_code == 503 and "start the server again" in refused.json()["error"]["message"]


def test_what_look_ups_found_is_kept_and_erased(unloading: Unloading) -> None:
    server = unloading.server
    for line in prompts(3):
        generate(server, line.prompt, max_tokens=32)
    held = unloading.decoder().lookup
    assert held is not None and held._newer
    unloading.reaches("unloaded")
    assert server.request("DELETE", "/generations", {"everything": True}).status_code == 200
    assert not held._newer and not held._older
    assert unloading.decoder().lookup is held


def test_it_is_refused_where_rows_are_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.server, "current", lambda: SimpleNamespace(paged=True))
    server = in_process_server(tmp_path, write_pair(tmp_path / "pair"), engine={"idle_unload_minutes": 5})
    with pytest.raises(ModelError, match="idle_unload_minutes is not available on CUDA"):
        server.start()
