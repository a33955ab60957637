"""Memory for keys and values: what it bounds over HTTP, and where it comes from."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import service.server
from service.core import ModelError
from service.engine import device
from service.engine.kv.budget import USABLE
from service.evaluation.pair_plan import plan_pair
from service.models.machine import backend
from service.models.memory import OTHERS
from tests.support.scraped import scraped
from tests.support.tiny_server import InProcessServer, generate, in_process_server, prompts, write_pair

MIB = 2**20


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


def longest(server: InProcessServer) -> int:
    """Tokens of a request, as the server says."""
    return int(server.get("/v1/models")["data"][0]["max_model_len"])


def test_what_can_never_fit_is_refused_by_name_and_what_fits_is_answered(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    texts = [line.prompt for line in prompts(4)]
    (tmp_path / "large").mkdir()
    large = in_process_server(tmp_path / "large", pair, engine={"max_rows": 8, "max_context": 4096})
    large.start()
    try:
        unbounded = longest(large)
        expected = [generate(large, text, max_tokens=24)["tokens"] for text in texts]
    finally:
        large.stop()
    (tmp_path / "small").mkdir()
    engine = {"max_rows": 8, "max_context": 4096, "kv_budget_mb": 1}
    server = in_process_server(tmp_path / "small", pair, engine=engine)
    server.start()
    try:
        most = longest(server)
        assert 256 <= most < unbounded
        refused = server.request("POST", "/generate", {"prompt": most * "a", "max_tokens": 16})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["code"] == "context_length_exceeded" and str(most) in error["message"]
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(lambda text: generate(server, text, max_tokens=24)["tokens"], texts))
        assert answers == expected
        # Beside other rows so small a budget may leave nothing for prefixes.
        assert generate(server, texts[0], max_tokens=24)["tokens"] == expected[0]
        shown = scraped(server.request("GET", "/metrics").text)
        for kind in ("weights", "prefix"):
            assert shown[f'redraft:memory_bytes{{kind="{kind}"}}'] >= 1, kind
        assert shown["redraft:kv_cache_usage_perc"] == 0 and "redraft:num_preemptions_total" in shown
    finally:
        server.stop()


def test_rows_get_what_is_free_whether_runs_may_come_or_not(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.server, "device_free_bytes", lambda: 200 * MIB)
    # What MLX holds of freed memory counts as free, and differs from start to start.
    held = device.memory
    monkeypatch.setattr(device, "memory", lambda: replace(held(), cache=0))
    sizes: dict[bool, int] = {}
    for enabled in (False, True):
        root = tmp_path / str(enabled)
        root.mkdir()
        server = in_process_server(root, pair, engine={"prefix_cache_mb": 20}, training={"enabled": enabled})
        server.start()
        try:
            assert server._application is not None
            engine = server._application.engine_thread._engine
            assert engine is not None and engine.decoder.memory.budget is not None
            sizes[enabled] = engine.decoder.memory.budget.size
        finally:
            server.stop()
    # MLX may hold an eighth for reuse. Adapters have their room; a run, which takes more than all of this, has none.
    assert USABLE * 120 * MIB <= sizes[False] <= USABLE * 400 * MIB
    assert 0.9 * sizes[False] < sizes[True] < sizes[False]


def test_a_server_takes_what_a_smaller_machine_would_have(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    """Its longest request is what `doctor --memory` says of that machine."""
    gib = (OTHERS + 300 * MIB) / 2**30
    server = in_process_server(tmp_path, pair, engine={"memory_gb": gib})
    server.start()
    try:
        assert server._application is not None
        settings, names = server._application.settings, [str(folder) for folder in pair]
        said = plan_pair(names, settings, memory=int(gib * 2**30), on="cpu" if backend() == "cpu" else "metal")
        engine = server._application.engine_thread._engine
        assert engine is not None and engine.decoder.memory.budget is not None
        assert 0 < engine.decoder.memory.budget.size <= 300 * MIB
        assert engine.decoder.memory.budget.longest() == said.plan.budget.longest()
    finally:
        server.stop()


def test_a_server_without_memory_for_a_request_does_not_start(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Below nothing: in this process MLX may hold freed memory, which counts as free.
    monkeypatch.setattr(service.server, "device_free_bytes", lambda: -(2**40))
    server = in_process_server(tmp_path, pair, engine={"prefix_cache_mb": 4096})
    with pytest.raises(ModelError, match=r"0 MiB are left for keys and values.*engine\.kv_budget_mb"):
        server.start()
    server.stop()
