"""The servers of `redraft bench serve`, each in a process of its own with the same BLAS, and how each is asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from service.core import BadRequest, ModelError, python_command
from service.engine import device
from service.engine.footprint import plan_memory, weight_bytes
from service.engine.strategy import current
from service.evaluation.bench.adapter import BenchAdapter
from service.evaluation.clients import Ask, ask_chat, ask_generate
from service.evaluation.server_process import LocalServer, ServerProcess, engine_settings
from service.learning.export import export_fused
from service.models import vocabulary
from service.models.memory import device_free_bytes
from service.models.pair import unread_pair
from service.models.rope import with_rope_keys
from service.settings import Settings

_MLX_LM = """
from service.engine import device
from mlx_lm.server import main
device.limit_cache()
main()
"""
"""Through this package, which puts the fast BLAS in front of MLX's own. Freed memory is bounded as in our servers: else the
first of them that is busy leaves the others none of a GPU's."""


@dataclass(frozen=True, slots=True)
class BenchServer:
    """A server process and the function that sends it a request."""

    process: ServerProcess
    ask: Ask


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """Makes the servers, without starting them.

    draft, adapted, mlx_lm_draft: folders of drafts: the bare one, the one with the adapter, and mlx_lm.server's. folder: for
    the servers' state. rows: clients at a time, at most. servers: number of them that share this device's memory.
    """

    settings: Settings
    target: Path
    draft: Path | None
    adapted: Path | None
    mlx_lm_draft: Path | None
    folder: Path
    rows: int
    servers: int = 1

    def redraft(self, name: str, draft: Path | None) -> BenchServer:
        """`redraft serve` with these settings, recording included, but without training. draft: None for the target alone,
        without prompt look-up."""
        engine = engine_settings(self.settings.engine)
        engine["max_rows"] = max(self.settings.engine.max_rows, self.rows)
        if draft is None:
            engine["num_lookup_tokens"] = 0
        if self.servers > 1 and current().paged and not self.settings.engine.kv_budget_mb:
            engine["kv_budget_mb"] = self._share_mb(draft)
        sections: dict[str, dict[str, object]] = {
            "models": {"target": str(self.target), "draft": str(draft) if draft else "none"},
            "engine": engine,
            "store": {"record": self.settings.store.record},
            "training": {"enabled": False},
        }
        return BenchServer(LocalServer(self.folder / name, sections, self.settings.home), ask_generate)

    def _share_mb(self, draft: Path | None) -> int:
        """MiB of keys and values for each of the servers; without a budget the first would take all memory. Raises BadRequest,
        ModelError or PairError."""
        free = device_free_bytes()
        models = unread_pair(self.target, draft)
        engine = self.settings.engine
        plan = plan_memory(
            *models,
            free // self.servers - weight_bytes(*models),
            cache=device.cache_limit(),
            kv_mb=0,
            prefix_mb=engine.prefix_cache_mb,
            chunk=engine.prefill_chunk,
            proposed=max(engine.num_draft_tokens, engine.num_lookup_tokens),
            rank=None,
        )
        share = plan.budget.size >> 20
        # To compare embeddings MLX has read them: its cache is given back for the servers.
        del models
        device.free_bytes()
        if share < 1:
            raise BadRequest(
                f"{self.servers} servers of these models do not fit into the device's memory", field="arms"
            )
        return share

    def mlx_lm(self, name: str, draft: Path | None) -> BenchServer:
        """`mlx_lm.server` with as many rows as there are clients. With a draft it drafts 3 tokens, one request at a time."""
        scratch = self.folder / name
        target = _readable_by_mlx_lm(self.target, scratch / "target")
        drafting = ["--draft-model", str(_readable_by_mlx_lm(draft, scratch / "draft"))] if draft else []

        def command(port: int) -> list[str]:
            words = python_command("-c", _MLX_LM, "--model", str(target), *drafting)
            return [*words, "--port", str(port), "--log-level", "WARNING", "--decode-concurrency", str(self.rows)]

        return BenchServer(ServerProcess(scratch, command, "/health"), ask_chat)


def _readable_by_mlx_lm(model: Path, folder: Path) -> Path:
    """The model's folder. Where its config.json describes RoPE in keys that mlx-lm ignores: `folder`, with links to the model's
    files and a config.json that mlx-lm reads. Raises ModelError."""
    try:
        written = json.loads((model / "config.json").read_text(encoding="utf-8"))
        config = with_rope_keys(written)
    except (OSError, ValueError) as error:
        raise ModelError(f"{model} cannot be loaded by mlx-lm: {error}") from error
    if config == written:
        return model
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


SERVERS: dict[str, Callable[[ServerPlan], BenchServer | None]] = {
    "plain": lambda plan: plan.redraft("plain", None),
    "static": lambda plan: plan.redraft("static", plan.draft) if plan.draft else None,
    "adapted": lambda plan: plan.redraft("adapted", plan.adapted) if plan.adapted else None,
    "mlx_lm_server": lambda plan: plan.mlx_lm("mlx_lm_server", None),
    "mlx_lm_server_draft": lambda plan: (
        plan.mlx_lm("mlx_lm_server_draft", plan.mlx_lm_draft) if plan.mlx_lm_draft else None
    ),
}
"""Name -> what makes the server; None where the draft or the adapter it needs is not at hand."""


def fused_draft(adapter: BenchAdapter, draft: Path, folder: Path) -> Path:
    """Write the draft with the adapter folded in and the vocabulary it serves with to `folder`, and return that: a server
    needs no database to draft with it. Folded layers of a quantised draft are quantised again. Raises AdapterRefused."""
    export_fused(adapter.ref, draft, folder)
    reduced = vocabulary.read(adapter.ref.folder) or vocabulary.read(draft)
    if reduced is not None:
        vocabulary.write(reduced, folder)
    return folder
